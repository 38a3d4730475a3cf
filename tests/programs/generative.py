"""Programs that learn to make data: GANs, autoencoders, diffusion, energies.

Noise, timesteps and mixing weights are columns of the data.
"""
# ruff: noqa: B905  (people write `zip` without `strict`)

import keras
import numpy as np
import tensorflow as tf
from keras import layers, ops
from programs.program import Program, normal, numbers

NUM_ROWS, NUM_CODES, NUM_TIMES = 24, 4, 8
CRITIC_STEPS = 3


# GANs: two networks and an optimizer for each.


class GAN(keras.Model):
    """Trains the discriminator, and then the generator against the new discriminator."""

    def __init__(self, discriminator, generator):
        super().__init__()
        self.discriminator, self.generator = discriminator, generator
        self.d_loss_metric = keras.metrics.Mean(name="d_loss")
        self.g_loss_metric = keras.metrics.Mean(name="g_loss")
        self.built = True

    def compile(self, d_optimizer, g_optimizer, loss_fn):
        super().compile()
        self.d_optimizer, self.g_optimizer, self.loss_fn = d_optimizer, g_optimizer, loss_fn

    @property
    def metrics(self):
        return [self.d_loss_metric, self.g_loss_metric]

    def train_step(self, data):
        num_rows = tf.shape(data["images"])[0]
        made = self.generator(data["noise"])
        images = tf.concat([made, data["images"]], axis=0)
        labels = tf.concat([tf.ones((num_rows, 1)), tf.zeros((num_rows, 1))], axis=0)
        with tf.GradientTape() as tape:
            d_loss = self.loss_fn(labels, self.discriminator(images))
        gradients = tape.gradient(d_loss, self.discriminator.trainable_weights)
        self.d_optimizer.apply_gradients(zip(gradients, self.discriminator.trainable_weights))

        with tf.GradientTape() as tape:
            answers = self.discriminator(self.generator(data["more_noise"]))
            g_loss = self.loss_fn(tf.zeros((num_rows, 1)), answers)
        gradients = tape.gradient(g_loss, self.generator.trainable_weights)
        self.g_optimizer.apply_gradients(zip(gradients, self.generator.trainable_weights))

        self.d_loss_metric.update_state(d_loss)
        self.g_loss_metric.update_state(g_loss)
        return {each.name: each.result() for each in self.metrics}


class AlternatingGAN(GAN):
    """Trains the discriminator in even steps and the generator in odd ones, with `tf.cond`."""

    def __init__(self, discriminator, generator):
        super().__init__(discriminator, generator)
        self.steps = self.add_weight(shape=(), dtype="int32", trainable=False, name="steps")

    def train_step(self, data):
        def train_discriminator():
            with tf.GradientTape() as tape:
                fake = self.discriminator(self.generator(data["noise"]))
                real = self.discriminator(data["images"])
                loss = self.loss_fn(tf.ones_like(fake), fake)
                loss += self.loss_fn(tf.zeros_like(real), real)
            weights = self.discriminator.trainable_weights
            self.d_optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights))
            return loss

        def train_generator():
            with tf.GradientTape() as tape:
                answers = self.discriminator(self.generator(data["more_noise"]))
                loss = self.loss_fn(tf.zeros_like(answers), answers)
            weights = self.generator.trainable_weights
            self.g_optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights))
            return loss

        loss = tf.cond(tf.equal(self.steps % 2, 0), train_discriminator, train_generator)
        self.steps.assign_add(1)
        return {"loss_of_step": loss}


class OnePassGAN(GAN):
    """Takes the gradients of both networks from one pass, and then updates both."""

    def train_step(self, data):
        with tf.GradientTape() as g_tape, tf.GradientTape() as d_tape:
            made = self.generator(data["noise"], training=True)
            real = self.discriminator(data["images"], training=True)
            fake = self.discriminator(made, training=True)
            g_loss = self.loss_fn(tf.ones_like(fake), fake)
            d_loss = self.loss_fn(tf.ones_like(real), real)
            d_loss += self.loss_fn(tf.zeros_like(fake), fake)
        of_g = g_tape.gradient(g_loss, self.generator.trainable_variables)
        of_d = d_tape.gradient(d_loss, self.discriminator.trainable_variables)
        self.g_optimizer.apply_gradients(zip(of_g, self.generator.trainable_variables))
        self.d_optimizer.apply_gradients(zip(of_d, self.discriminator.trainable_variables))
        self.d_loss_metric.update_state(d_loss)
        self.g_loss_metric.update_state(g_loss)
        return {"d_loss": self.d_loss_metric.result(), "g_loss": self.g_loss_metric.result()}


class ConditionalGAN(GAN):
    """Gives the class to the generator as more inputs, to the discriminator as more channels."""

    def train_step(self, data):
        x, labels = data
        num_rows = tf.shape(labels)[0]
        planes = tf.broadcast_to(labels[:, None, None, :], (num_rows, 4, 4, 2))
        made = self.generator(tf.concat([x["noise"], labels], axis=1))
        images = tf.concat([made, x["images"]], axis=0)
        images = tf.concat([images, tf.concat([planes, planes], axis=0)], axis=-1)
        is_made = tf.concat([tf.ones((num_rows, 1)), tf.zeros((num_rows, 1))], axis=0)
        with tf.GradientTape() as tape:
            d_loss = self.loss_fn(is_made, self.discriminator(images))
        gradients = tape.gradient(d_loss, self.discriminator.trainable_weights)
        self.d_optimizer.apply_gradients(zip(gradients, self.discriminator.trainable_weights))

        with tf.GradientTape() as tape:
            made = self.generator(tf.concat([x["more_noise"], labels], axis=1))
            answers = self.discriminator(tf.concat([made, planes], axis=-1))
            g_loss = self.loss_fn(tf.zeros((num_rows, 1)), answers)
        gradients = tape.gradient(g_loss, self.generator.trainable_weights)
        self.g_optimizer.apply_gradients(zip(gradients, self.generator.trainable_weights))

        self.d_loss_metric.update_state(d_loss)
        self.g_loss_metric.update_state(g_loss)
        return {"d_loss": self.d_loss_metric.result(), "g_loss": self.g_loss_metric.result()}


class WGAN(keras.Model):
    """Several steps of the critic, whose weights are clipped, and one of the generator."""

    def __init__(self, critic, generator, critic_steps=CRITIC_STEPS, limit=0.1):
        super().__init__()
        self.critic, self.generator = critic, generator
        self.critic_steps, self.limit = critic_steps, limit
        self.built = True

    def compile(self, c_optimizer, g_optimizer):
        super().compile()
        self.c_optimizer, self.g_optimizer = c_optimizer, g_optimizer

    def train_step(self, data):
        for step in range(self.critic_steps):
            with tf.GradientTape() as tape:
                made = self.generator(data["noise"][:, step])
                c_loss = tf.reduce_mean(self.critic(made))
                c_loss -= tf.reduce_mean(self.critic(data["images"]))
            gradients = tape.gradient(c_loss, self.critic.trainable_variables)
            self.c_optimizer.apply_gradients(zip(gradients, self.critic.trainable_variables))
            for weight in self.critic.trainable_variables:
                weight.assign(tf.clip_by_value(weight, -self.limit, self.limit))
        with tf.GradientTape() as tape:
            g_loss = -tf.reduce_mean(self.critic(self.generator(data["noise"][:, -1])))
        gradients = tape.gradient(g_loss, self.generator.trainable_variables)
        self.g_optimizer.apply_gradients(zip(gradients, self.generator.trainable_variables))
        return {"c_loss": c_loss, "g_loss": g_loss}


class WGANGP(keras.Model):
    """Several steps of the critic, with a penalty on its gradient, and one of the generator."""

    def __init__(self, discriminator, generator, d_steps=CRITIC_STEPS, gp_weight=10.0):
        super().__init__()
        self.discriminator, self.generator = discriminator, generator
        self.d_steps, self.gp_weight = d_steps, gp_weight
        self.built = True

    def compile(self, d_optimizer, g_optimizer, d_loss_fn, g_loss_fn):
        super().compile()
        self.d_optimizer, self.g_optimizer = d_optimizer, g_optimizer
        self.d_loss_fn, self.g_loss_fn = d_loss_fn, g_loss_fn

    def gradient_penalty(self, share, real, fake):
        between = real + share * (fake - real)
        with tf.GradientTape() as tape:
            tape.watch(between)
            answers = self.discriminator(between, training=True)
        gradients = tape.gradient(answers, between)
        norm = tf.sqrt(tf.reduce_sum(tf.square(gradients), axis=[1, 2, 3]))
        return tf.reduce_mean(tf.square(norm - 1))

    def train_step(self, data):
        for step in range(self.d_steps):
            with tf.GradientTape() as tape:
                made = self.generator(data["noise"][:, step], training=True)
                fake = self.discriminator(made, training=True)
                real = self.discriminator(data["images"], training=True)
                penalty = self.gradient_penalty(data["share"], data["images"], made)
                d_loss = self.d_loss_fn(real, fake) + self.gp_weight * penalty
            gradients = tape.gradient(d_loss, self.discriminator.trainable_variables)
            self.d_optimizer.apply_gradients(zip(gradients, self.discriminator.trainable_variables))
        with tf.GradientTape() as tape:
            made = self.generator(data["noise"][:, -1], training=True)
            g_loss = self.g_loss_fn(self.discriminator(made, training=True))
        gradients = tape.gradient(g_loss, self.generator.trainable_variables)
        self.g_optimizer.apply_gradients(zip(gradients, self.generator.trainable_variables))
        return {"d_loss": d_loss, "g_loss": g_loss}


class CycleGAN(keras.Model):
    """Two generators, there and back, two discriminators, and an optimizer for each."""

    def __init__(self, gen_g, gen_f, disc_x, disc_y, lambda_cycle=10.0, lambda_identity=0.5):
        super().__init__()
        self.gen_g, self.gen_f, self.disc_x, self.disc_y = gen_g, gen_f, disc_x, disc_y
        self.lambda_cycle, self.lambda_identity = lambda_cycle, lambda_identity
        self.built = True

    def compile(self, gen_g_optimizer, gen_f_optimizer, disc_x_optimizer, disc_y_optimizer):
        super().compile()
        self.gen_g_optimizer, self.gen_f_optimizer = gen_g_optimizer, gen_f_optimizer
        self.disc_x_optimizer, self.disc_y_optimizer = disc_x_optimizer, disc_y_optimizer
        self.adversarial = keras.losses.MeanSquaredError()
        self.cycle = keras.losses.MeanAbsoluteError()

    def discriminator_loss(self, real, fake):
        real_loss = self.adversarial(tf.ones_like(real), real)
        return 0.5 * (real_loss + self.adversarial(tf.zeros_like(fake), fake))

    def generator_loss(self, fake, image, cycled, same):
        loss = self.adversarial(tf.ones_like(fake), fake)
        loss += self.lambda_cycle * self.cycle(image, cycled)
        return loss + self.lambda_cycle * self.lambda_identity * self.cycle(image, same)

    def train_step(self, batch):
        real_x, real_y = batch
        with tf.GradientTape(persistent=True) as tape:
            fake_y, fake_x = self.gen_g(real_x, training=True), self.gen_f(real_y, training=True)
            cycled_x = self.gen_f(fake_y, training=True)
            cycled_y = self.gen_g(fake_x, training=True)
            same_x, same_y = self.gen_f(real_x, training=True), self.gen_g(real_y, training=True)
            of_fake_x = self.disc_x(fake_x, training=True)
            of_fake_y = self.disc_y(fake_y, training=True)
            g_loss = self.generator_loss(of_fake_y, real_y, cycled_y, same_y)
            f_loss = self.generator_loss(of_fake_x, real_x, cycled_x, same_x)
            x_loss = self.discriminator_loss(self.disc_x(real_x, training=True), of_fake_x)
            y_loss = self.discriminator_loss(self.disc_y(real_y, training=True), of_fake_y)
        of_g = tape.gradient(g_loss, self.gen_g.trainable_variables)
        of_f = tape.gradient(f_loss, self.gen_f.trainable_variables)
        of_x = tape.gradient(x_loss, self.disc_x.trainable_variables)
        of_y = tape.gradient(y_loss, self.disc_y.trainable_variables)
        self.gen_g_optimizer.apply_gradients(zip(of_g, self.gen_g.trainable_variables))
        self.gen_f_optimizer.apply_gradients(zip(of_f, self.gen_f.trainable_variables))
        self.disc_x_optimizer.apply_gradients(zip(of_x, self.disc_x.trainable_variables))
        self.disc_y_optimizer.apply_gradients(zip(of_y, self.disc_y.trainable_variables))
        return {"G_loss": g_loss, "F_loss": f_loss, "D_X_loss": x_loss, "D_Y_loss": y_loss}


class Pix2Pix(keras.Model):
    """An image to an image; the discriminator sees the input beside what was made of it."""

    def __init__(self, generator, discriminator, weight=100.0):
        super().__init__()
        self.generator, self.discriminator, self.weight = generator, discriminator, weight
        self.loss_object = keras.losses.BinaryCrossentropy(from_logits=True)
        self.built = True

    def compile(self, generator_optimizer, discriminator_optimizer, **kwargs):
        super().compile(**kwargs)
        self.generator_optimizer = generator_optimizer
        self.discriminator_optimizer = discriminator_optimizer

    def call(self, image):
        return self.generator(image)

    def train_step(self, data):
        image, target = data
        with tf.GradientTape() as gen_tape, tf.GradientTape() as disc_tape:
            made = self.generator(image, training=True)
            real = self.discriminator(tf.concat([image, target], -1), training=True)
            fake = self.discriminator(tf.concat([image, made], -1), training=True)
            l1_loss = tf.reduce_mean(tf.abs(target - made))
            gan_loss = self.loss_object(tf.ones_like(fake), fake)
            gen_loss = gan_loss + self.weight * l1_loss
            disc_loss = self.loss_object(tf.ones_like(real), real)
            disc_loss += self.loss_object(tf.zeros_like(fake), fake)
        of_gen = gen_tape.gradient(gen_loss, self.generator.trainable_variables)
        of_disc = disc_tape.gradient(disc_loss, self.discriminator.trainable_variables)
        self.generator_optimizer.apply_gradients(zip(of_gen, self.generator.trainable_variables))
        self.discriminator_optimizer.apply_gradients(
            zip(of_disc, self.discriminator.trainable_variables)
        )
        return {"gen_loss": gen_loss, "l1_loss": l1_loss, "disc_loss": disc_loss}


# Autoencoders.


class Sampling(layers.Layer):
    """Returns mean + standard deviation * noise, and adds the KL divergence to the losses."""

    def call(self, inputs):
        mean, log_variance, noise = inputs
        self.add_loss(ops.mean(divergence(mean, log_variance)))
        return mean + ops.exp(0.5 * log_variance) * noise


class VAE(keras.Model):
    """Tracks its own losses."""

    def __init__(self, encoder, decoder):
        super().__init__()
        self.encoder, self.decoder = encoder, decoder
        self.total_loss_tracker = keras.metrics.Mean(name="total_loss")
        self.reconstruction_loss_tracker = keras.metrics.Mean(name="reconstruction_loss")
        self.kl_loss_tracker = keras.metrics.Mean(name="kl_loss")
        self.built = True

    @property
    def metrics(self):
        return [
            self.total_loss_tracker,
            self.reconstruction_loss_tracker,
            self.kl_loss_tracker,
        ]

    def kl_weight(self):
        return 1.0

    def train_step(self, data):
        images, noise = data["images"], data["noise"]
        with tf.GradientTape() as tape:
            mean, log_variance = self.encoder(images)
            made = self.decoder(mean + tf.exp(0.5 * log_variance) * noise)
            by_pixel = keras.losses.binary_crossentropy(images, made)
            reconstruction_loss = tf.reduce_mean(tf.reduce_sum(by_pixel, axis=(1, 2)))
            kl_loss = tf.reduce_mean(divergence(mean, log_variance))
            total_loss = reconstruction_loss + self.kl_weight() * kl_loss
        gradients = tape.gradient(total_loss, self.trainable_weights)
        self.optimizer.apply_gradients(zip(gradients, self.trainable_weights))
        self.total_loss_tracker.update_state(total_loss)
        self.reconstruction_loss_tracker.update_state(reconstruction_loss)
        self.kl_loss_tracker.update_state(kl_loss)
        return {each.name: each.result() for each in self.metrics}


class BetaVAE(VAE):
    """The weight of the divergence grows from 0 to beta with a step counter of the model's own."""

    def __init__(self, encoder, decoder, beta=4.0, warmup_steps=5):
        super().__init__(encoder, decoder)
        self.beta, self.warmup_steps = beta, warmup_steps
        self.steps = self.add_weight(shape=(), initializer="zeros", trainable=False)

    def kl_weight(self):
        return self.beta * tf.minimum(self.steps / self.warmup_steps, 1.0)

    def train_step(self, data):
        logs = super().train_step(data)
        self.steps.assign_add(1.0)
        return logs | {"kl_weight": self.kl_weight()}


class VectorQuantizer(layers.Layer):
    """Replaces each vector by the nearest code, and averages the vectors of each code."""

    def __init__(self, num_codes, size, decay=0.9, commitment=0.25, epsilon=1e-5):
        super().__init__()
        self.num_codes, self.size, self.decay = num_codes, size, decay
        self.commitment, self.epsilon = commitment, epsilon

    def build(self, _):
        shape = self.num_codes, self.size
        self.codes = self.add_weight(shape=shape, initializer="random_normal", trainable=False)
        self.sums = self.add_weight(shape=shape, initializer="zeros", trainable=False)
        self.counts = self.add_weight(shape=shape[:1], initializer="ones", trainable=False)
        self.sums.assign(self.codes)

    def total(self, value):
        """Returns a sum over the rows that this layer sees."""
        return value

    def call(self, x, training=False):
        flat = tf.reshape(x, (-1, self.size))
        distances = tf.reduce_sum(self.codes**2, axis=1) - 2.0 * flat @ tf.transpose(self.codes)
        chosen = tf.one_hot(tf.argmin(distances, axis=1), self.num_codes)
        quantized = tf.reshape(chosen @ self.codes, tf.shape(x))
        self.add_loss(self.commitment * tf.reduce_mean(tf.square(tf.stop_gradient(quantized) - x)))
        if training:
            self.update(chosen, tf.stop_gradient(flat))
        return x + tf.stop_gradient(quantized - x)  # the gradient passes straight through

    def update(self, chosen, flat):
        counts = self.total(tf.reduce_sum(chosen, axis=0))
        sums = self.total(tf.transpose(chosen) @ flat)
        self.counts.assign(self.decay * self.counts + (1 - self.decay) * counts)
        self.sums.assign(self.decay * self.sums + (1 - self.decay) * sums)
        everything = tf.reduce_sum(self.counts)
        share = (self.counts + self.epsilon) / (everything + self.num_codes * self.epsilon)
        self.codes.assign(self.sums / (share * everything)[:, None])


class DistributedVectorQuantizer(VectorQuantizer):
    """Sums over the replicas, as code that was written for `tf.distribute` does."""

    def total(self, value):
        return tf.distribute.get_replica_context().all_reduce("sum", value)


class VQVAE(keras.Model):
    """An autoencoder of codes."""

    def __init__(self, quantizer):
        super().__init__()
        ends = layers.Conv2D(3, 2, 2), layers.Conv2DTranspose(1, 2, 2)
        self.vqvae = keras.Sequential([keras.Input((4, 4, 1)), ends[0], quantizer, ends[1]])
        self.total_loss_tracker = keras.metrics.Mean(name="total_loss")
        self.built = True

    @property
    def metrics(self):
        return [self.total_loss_tracker]

    def train_step(self, images):
        with tf.GradientTape() as tape:
            made = self.vqvae(images, training=True)
            total_loss = tf.reduce_mean((images - made) ** 2) + sum(self.vqvae.losses)
        gradients = tape.gradient(total_loss, self.vqvae.trainable_variables)
        self.optimizer.apply_gradients(zip(gradients, self.vqvae.trainable_variables))
        self.total_loss_tracker.update_state(total_loss)
        return {"loss": self.total_loss_tracker.result()}


class AdversarialAutoencoder(keras.Model):
    """The encoder is trained twice: to reconstruct, and to give codes like the prior's."""

    def __init__(self, encoder, decoder, discriminator):
        super().__init__()
        self.encoder, self.decoder, self.discriminator = encoder, decoder, discriminator
        self.cross_entropy = keras.losses.BinaryCrossentropy(from_logits=True)
        self.built = True

    def compile(self, optimizer, disc_optimizer, gen_optimizer):
        super().compile(optimizer=optimizer)
        self.disc_optimizer, self.gen_optimizer = disc_optimizer, gen_optimizer

    def train_step(self, data):
        images, prior = data
        with tf.GradientTape() as tape:
            made = self.decoder(self.encoder(images, training=True), training=True)
            loss = tf.reduce_mean(tf.square(images - made))
        weights = self.encoder.trainable_variables + self.decoder.trainable_variables
        self.optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights))

        with tf.GradientTape() as tape:
            real = self.discriminator(prior, training=True)
            fake = self.discriminator(self.encoder(images, training=True), training=True)
            disc_loss = self.cross_entropy(tf.ones_like(real), real)
            disc_loss += self.cross_entropy(tf.zeros_like(fake), fake)
        weights = self.discriminator.trainable_variables
        self.disc_optimizer.apply_gradients(zip(tape.gradient(disc_loss, weights), weights))

        with tf.GradientTape() as tape:
            fake = self.discriminator(self.encoder(images, training=True), training=True)
            gen_loss = self.cross_entropy(tf.ones_like(fake), fake)
        weights = self.encoder.trainable_variables
        self.gen_optimizer.apply_gradients(zip(tape.gradient(gen_loss, weights), weights))
        return {"loss": loss, "disc_loss": disc_loss, "gen_loss": gen_loss}


# Diffusion and energies.


class TimeEmbedding(layers.Layer):
    """Returns sines and cosines of whole timesteps."""

    def call(self, times):
        angles = ops.cast(times, "float32")[:, None] * ops.array([0.1, 0.7], "float32")
        return ops.concatenate([ops.sin(angles), ops.cos(angles)], axis=-1)


class DDPM(keras.Model):
    """Predicts the noise; the averaged network follows the update and serves in tests."""

    def __init__(self, network, ema_network, ema=0.9):
        super().__init__()
        self.network, self.ema_network, self.ema = network, ema_network, ema
        self.ema_network.set_weights(network.get_weights())
        self.ema_network.trainable = False
        self.signal = np.cumprod(1 - np.linspace(0.05, 0.5, NUM_TIMES)).astype(np.float32)
        self.noise_loss_tracker = keras.metrics.Mean(name="n_loss")
        self.built = True

    @property
    def metrics(self):
        return [self.noise_loss_tracker]

    def noised(self, data):
        signal = tf.gather(tf.constant(self.signal), data["times"])[:, None, None, None]
        return tf.sqrt(signal) * data["images"] + tf.sqrt(1 - signal) * data["noise"]

    def train_step(self, data):
        with tf.GradientTape() as tape:
            predicted = self.network([self.noised(data), data["times"]], training=True)
            loss = self.loss(data["noise"], predicted)
        gradients = tape.gradient(loss, self.network.trainable_weights)
        self.optimizer.apply_gradients(zip(gradients, self.network.trainable_weights))
        for weight, average in zip(self.network.weights, self.ema_network.weights):
            average.assign(self.ema * average + (1 - self.ema) * weight)
        self.noise_loss_tracker.update_state(loss)
        return {"n_loss": self.noise_loss_tracker.result()}

    def test_step(self, data):
        predicted = self.ema_network([self.noised(data), data["times"]], training=False)
        self.noise_loss_tracker.update_state(self.loss(data["noise"], predicted))
        return {"n_loss": self.noise_loss_tracker.result()}


class EnergyModel(keras.Model):
    """Lowers the energy of images and raises that of samples, which descend it from noise."""

    def __init__(self, energy, step_size=0.5, alpha=0.1):
        super().__init__()
        self.energy, self.step_size, self.alpha = energy, step_size, alpha
        self.loss_metric = keras.metrics.Mean(name="loss")
        self.cdiv_loss_metric = keras.metrics.Mean(name="cdiv")
        self.built = True

    @property
    def metrics(self):
        return [self.loss_metric, self.cdiv_loss_metric]

    def samples(self, x, noises):
        for noise in tf.unstack(noises, axis=1):
            x = tf.clip_by_value(x + 0.01 * noise, -1.0, 1.0)
            with tf.GradientTape() as tape:
                tape.watch(x)
                energy = self.energy(x, training=False)
            slope = tf.clip_by_value(tape.gradient(energy, x), -0.3, 0.3)
            x = tf.clip_by_value(x - self.step_size * slope, -1.0, 1.0)
        return x

    def train_step(self, data):
        fake = self.samples(data["start"], data["noises"])
        images = tf.concat([data["images"], fake], axis=0)
        with tf.GradientTape() as tape:
            of_real, of_fake = tf.split(self.energy(images, training=True), 2, axis=0)
            cdiv_loss = tf.reduce_mean(of_real) - tf.reduce_mean(of_fake)
            loss = cdiv_loss + self.alpha * tf.reduce_mean(of_real**2 + of_fake**2)
        gradients = tape.gradient(loss, self.energy.trainable_variables)
        self.optimizer.apply_gradients(zip(gradients, self.energy.trainable_variables))
        self.loss_metric.update_state(loss)
        self.cdiv_loss_metric.update_state(cdiv_loss)
        return {each.name: each.result() for each in self.metrics}


# Networks and data.


def divergence(mean, log_variance):
    """Returns the KL divergence from the normal distribution, [batch]."""
    return -0.5 * ops.sum(1 + log_variance - mean**2 - ops.exp(log_variance), axis=1)


def generator(num_inputs=4, activation="tanh"):
    """Returns a network from a code to an image of 4 x 4 pixels."""
    return keras.Sequential(
        [
            keras.Input((num_inputs,)),
            layers.Dense(12, "tanh"),
            layers.Reshape((2, 2, 3)),
            layers.Conv2DTranspose(1, 3, 2, "same", activation=activation),
        ]
    )


def discriminator(num_channels=1, *, use_bias=True):
    """Returns a network from an image to a logit.

    A critic has no last bias, because its loss does not depend on one: Adam would make steps of the
    rounding error of a gradient of zero.
    """
    return keras.Sequential(
        [
            keras.Input((4, 4, num_channels)),
            layers.Conv2D(4, 3, 2, "same"),
            layers.LeakyReLU(0.2),
            layers.Flatten(),
            layers.Dense(1, use_bias=use_bias),
        ]
    )


def patches(num_channels=1):
    """Returns a network from an image to a logit for each of its 2 x 2 patches."""
    return keras.Sequential(
        [
            keras.Input((4, 4, num_channels)),
            layers.Conv2D(4, 3, 2, "same", activation="leaky_relu"),
            layers.Conv2D(1, 2, padding="same"),
        ]
    )


def translator():
    """Returns a network from an image to an image, with instance normalization and a skip."""
    image = keras.Input((4, 4, 1))
    down = layers.Conv2D(4, 3, 2, "same", use_bias=False)(image)
    down = layers.Activation("relu")(layers.GroupNormalization(-1)(down))
    up = layers.Conv2DTranspose(3, 3, 2, "same", activation="relu")(down)
    both = layers.Concatenate()([up, image])
    return keras.Model(image, layers.Conv2D(1, 3, padding="same", activation="tanh")(both))


def encoder():
    """Returns a network from an image to a mean and a log variance."""
    image = keras.Input((4, 4, 1))
    hidden = layers.Flatten()(layers.Conv2D(4, 3, 2, "same", activation="relu")(image))
    return keras.Model(image, [layers.Dense(2)(hidden), layers.Dense(2)(hidden)])


def vae_of_add_loss():
    """Returns a VAE that stock Keras's step trains."""
    image, noise = keras.Input((4, 4, 1), name="images"), keras.Input((2,), name="noise")
    made = generator(2, "sigmoid")(Sampling()([*encoder()(image), noise]))
    return keras.Model({"images": image, "noise": noise}, made)


def denoiser():
    """Returns a network from a noised image and a timestep to the noise."""
    image, times = keras.Input((4, 4, 1)), keras.Input((), dtype="int32")
    features = layers.Conv2D(4, 3, padding="same")(image)
    shift = layers.Dense(4)(TimeEmbedding()(times))
    hidden = layers.Activation("swish")(features + layers.Reshape((1, 1, 4))(shift))
    return keras.Model([image, times], layers.Conv2D(1, 3, padding="same")(hidden))


def energy():
    """Returns a network from an image to its energy."""
    layers_ = [layers.Conv2D(4, 3, 2, "same", activation="swish"), layers.Flatten()]
    return keras.Sequential([keras.Input((4, 4, 1)), *layers_, layers.Dense(1)])


def small(inputs, outputs, activation=None):
    """Returns a network of dense layers on vectors."""
    return keras.Sequential(
        [keras.Input((inputs,)), layers.Dense(6, "tanh"), layers.Dense(outputs, activation)]
    )


def aae():
    """Returns an adversarial autoencoder."""
    return AdversarialAutoencoder(small(8, 2), small(2, 8), small(2, 1))


def images(seed=0):
    """Returns images in (-1, 1)."""
    return np.tanh(normal(seed, NUM_ROWS, 4, 4, 1))


def gray():
    """Returns images in (0, 1)."""
    return (images() + 1) / 2


def classes():
    """Returns one-hot labels of 2 classes."""
    return np.eye(2, dtype=np.float32)[numbers(5, 2, NUM_ROWS)]


def for_two_updates():
    """Returns images, and noise for the update of each network."""
    noise = normal(1, NUM_ROWS, 4), normal(2, NUM_ROWS, 4)
    return {"images": images(), "noise": noise[0], "more_noise": noise[1]}


def with_noise():
    """Returns gray images, and noise for their codes."""
    return {"images": gray(), "noise": normal(1, NUM_ROWS, 2)}


def of_critic():
    """Returns images, noise for each step, and shares for the gradient penalty."""
    share = np.random.default_rng(3).uniform(size=(NUM_ROWS, 1, 1, 1)).astype(np.float32)
    noise = normal(1, NUM_ROWS, CRITIC_STEPS + 1, 4)
    return {"images": images(), "noise": noise, "share": share}


def diffused():
    """Returns images, noise and timesteps."""
    times = numbers(2, NUM_TIMES, NUM_ROWS)
    return {"images": images(), "noise": normal(1, NUM_ROWS, 4, 4, 1), "times": times}


def of_energy():
    """Returns images, where the samples start, and the noise of their two steps."""
    noises = normal(2, NUM_ROWS, 2, 4, 4, 1)
    return {"images": images(), "start": images(1), "noises": noises}


def adam(learning_rate=0.01):
    """Returns Adam as GANs use it."""
    return keras.optimizers.Adam(learning_rate, beta_1=0.5)


def for_gan():
    """Returns the arguments of a GAN's `compile`."""
    loss = keras.losses.BinaryCrossentropy(from_logits=True)
    return {"d_optimizer": adam(), "g_optimizer": adam(0.02), "loss_fn": loss}


def for_wgan():
    """Returns the arguments of `WGAN.compile`."""
    rmsprop = keras.optimizers.RMSprop
    return {"c_optimizer": rmsprop(0.01), "g_optimizer": rmsprop(0.02)}


def for_wgan_gp():
    """Returns the arguments of `WGANGP.compile`."""
    return {
        "d_optimizer": adam(),
        "g_optimizer": adam(0.02),
        "d_loss_fn": lambda real, fake: tf.reduce_mean(fake) - tf.reduce_mean(real),
        "g_loss_fn": lambda fake: -tf.reduce_mean(fake),
    }


def for_cycle_gan():
    """Returns the arguments of `CycleGAN.compile`."""
    names = ("gen_g", "gen_f", "disc_x", "disc_y")
    return {f"{name}_optimizer": adam() for name in names}


def for_aae():
    """Returns the arguments of `AdversarialAutoencoder.compile`."""
    return {"optimizer": adam(), "disc_optimizer": adam(), "gen_optimizer": adam(0.02)}


PROGRAMS = [
    Program(
        "DCGAN",
        "keras.io: DCGAN to generate face images",
        lambda: GAN(discriminator(), generator()),
        for_two_updates,
        for_gan,
    ),
    Program(
        "GAN that alternates",
        "each step updates one of two networks, chosen by tf.cond",
        lambda: AlternatingGAN(discriminator(), generator()),
        for_two_updates,
        for_gan,
    ),
    Program(
        "DCGAN in one pass",
        "tensorflow.org: Deep Convolutional Generative Adversarial Network",
        lambda: OnePassGAN(discriminator(), generator()),
        for_two_updates,
        for_gan,
    ),
    Program(
        "conditional GAN",
        "keras.io: Conditional GAN",
        lambda: ConditionalGAN(discriminator(3), generator(6)),
        lambda: (for_two_updates(), classes()),
        for_gan,
    ),
    Program(
        "WGAN with clipped weights",
        "Arjovsky et al. 2017, arXiv:1701.07875",
        lambda: WGAN(discriminator(use_bias=False), generator()),
        of_critic,
        for_wgan,
    ),
    Program(
        "WGAN-GP",
        "keras.io: WGAN-GP overriding Model.train_step",
        lambda: WGANGP(discriminator(use_bias=False), generator()),
        of_critic,
        for_wgan_gp,
    ),
    Program(
        "CycleGAN",
        "keras.io: CycleGAN",
        lambda: CycleGAN(translator(), translator(), patches(), patches()),
        lambda: (images(0), images(1)),
        for_cycle_gan,
    ),
    Program(
        "pix2pix",
        "tensorflow.org: pix2pix, image-to-image translation with a conditional GAN",
        lambda: Pix2Pix(translator(), patches(2)),
        lambda: (images(0), images(1)),
        lambda: {"generator_optimizer": adam(), "discriminator_optimizer": adam()},
    ),
    Program(
        "VAE with trackers",
        "keras.io: Variational AutoEncoder",
        lambda: VAE(encoder(), generator(2, "sigmoid")),
        with_noise,
        lambda: {"optimizer": adam()},
    ),
    Program(
        "VAE by add_loss",
        "keras.io: Making new layers and models via subclassing",
        vae_of_add_loss,
        lambda: (with_noise(), gray()),
        lambda: {"optimizer": adam(), "loss": "binary_crossentropy"},
    ),
    Program(
        "beta-VAE with warm-up",
        "Higgins et al. 2017, ICLR; Bowman et al. 2016, arXiv:1511.06349",
        lambda: BetaVAE(encoder(), generator(2, "sigmoid")),
        with_noise,
        lambda: {"optimizer": adam()},
    ),
    Program(
        "VQ-VAE",
        "keras.io: Vector-Quantized Variational Autoencoders; van den Oord et al. 2017, appendix A",
        lambda: VQVAE(VectorQuantizer(NUM_CODES, 3)),
        images,
        lambda: {"optimizer": adam()},
    ),
    Program(
        "VQ-VAE with all_reduce",
        "sonnet: VectorQuantizerEMA",
        lambda: VQVAE(DistributedVectorQuantizer(NUM_CODES, 3)),
        images,
        lambda: {"optimizer": adam()},
    ),
    Program(
        "adversarial autoencoder",
        "Makhzani et al. 2015, arXiv:1511.05644",
        aae,
        lambda: (normal(0, NUM_ROWS, 8), normal(1, NUM_ROWS, 2)),
        for_aae,
    ),
    Program(
        "DDPM",
        "keras.io: Denoising Diffusion Probabilistic Model",
        lambda: DDPM(denoiser(), denoiser()),
        diffused,
        lambda: {"optimizer": adam(), "loss": keras.losses.MeanSquaredError()},
    ),
    Program(
        "energy-based model",
        "Du and Mordatch 2019, arXiv:1903.08689; Foster 2023, Generative Deep Learning, ch. 7",
        lambda: EnergyModel(energy()),
        of_energy,
        lambda: {"optimizer": adam()},
    ),
]
