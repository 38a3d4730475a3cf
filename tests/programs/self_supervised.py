"""Self-supervised training and distillation: contrastive losses, target networks, masked images.

Several losses compare all rows of a batch. On several replicas they gather the rows of all replicas
first, so their reference is the whole batch on one device.
"""

import keras
import tensorflow as tf
from keras import layers, ops
from programs.program import Program, gather, network, normal, numbers


def image_encoder(width: int = 4) -> keras.Sequential:
    """Returns a small network of images [4, 4, 1], built."""
    return keras.Sequential(
        [
            keras.Input((4, 4, 1)),
            layers.Conv2D(3, 3, strides=2, padding="same", activation="tanh"),
            layers.Flatten(),
            layers.Dense(width),
        ]
    )


def two_views() -> tuple:
    """Returns two noisy copies of the same images, as x and y."""
    images = normal(0, 24, 4, 4, 1)
    return images + 0.3 * normal(1, 24, 4, 4, 1), images + 0.3 * normal(2, 24, 4, 4, 1)


def unit(rows):
    """Returns the rows with a length of one."""
    return ops.normalize(rows, axis=1, order=2)


def updated(metrics, loss, y, answers) -> dict:
    """Updates the metrics and returns their results, as in Keras's guide to `train_step`."""
    for metric in metrics:
        if metric.name == "loss":
            metric.update_state(loss)
        else:
            metric.update_state(y, answers)
    return {metric.name: metric.result() for metric in metrics}


class SimCLRByRow(keras.Model):
    """An encoder learns from two views of images, and a linear probe from a few labels.

    The contrastive loss is a vector of all rows, as in the example: its gradient is their sum.
    """

    def __init__(self):
        super().__init__()
        self.gathered, self.temperature = gather(), 0.5
        self.encoder, self.projection_head = image_encoder(), network(4, 3)
        self.linear_probe = keras.Sequential([keras.Input((4,)), layers.Dense(3)])
        self.built = True

    def compile(self, contrastive_optimizer, probe_optimizer, **kwargs):
        super().compile(**kwargs)
        self.contrastive_optimizer = contrastive_optimizer
        self.probe_optimizer = probe_optimizer
        self.probe_loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        self.contrastive_loss_tracker = keras.metrics.Mean(name="c_loss")
        self.contrastive_accuracy = keras.metrics.SparseCategoricalAccuracy(name="c_acc")
        self.probe_loss_tracker = keras.metrics.Mean(name="p_loss")
        self.probe_accuracy = keras.metrics.SparseCategoricalAccuracy(name="p_acc")

    @property
    def metrics(self):
        return [
            self.contrastive_loss_tracker,
            self.contrastive_accuracy,
            self.probe_loss_tracker,
            self.probe_accuracy,
        ]

    def contrastive_loss(self, first, second):
        first, second = unit(self.gathered(first)), unit(self.gathered(second))
        similarities = ops.matmul(first, ops.transpose(second)) / self.temperature
        labels = ops.arange(ops.shape(first)[0])
        self.contrastive_accuracy.update_state(labels, similarities)
        self.contrastive_accuracy.update_state(labels, ops.transpose(similarities))
        entropy = keras.losses.sparse_categorical_crossentropy
        forth = entropy(labels, similarities, from_logits=True)
        back = entropy(labels, ops.transpose(similarities), from_logits=True)
        return (forth + back) / 2

    def train_step(self, data):
        images, labels = data
        with tf.GradientTape() as tape:
            first = self.projection_head(self.encoder(images["first"], training=True))
            second = self.projection_head(self.encoder(images["second"], training=True))
            loss = self.contrastive_loss(first, second)
        weights = self.encoder.trainable_weights + self.projection_head.trainable_weights
        gradients = tape.gradient(loss, weights)
        self.contrastive_optimizer.apply_gradients(zip(gradients, weights, strict=True))
        self.contrastive_loss_tracker.update_state(loss)

        with tf.GradientTape() as tape:
            answers = self.linear_probe(self.encoder(images["labeled"], training=False))
            loss = self.probe_loss(labels, answers)
        weights = self.linear_probe.trainable_weights
        gradients = tape.gradient(loss, weights)
        self.probe_optimizer.apply_gradients(zip(gradients, weights, strict=True))
        self.probe_loss_tracker.update_state(loss)
        self.probe_accuracy.update_state(labels, answers)
        return {m.name: m.result() for m in self.metrics}


class SimCLR(SimCLRByRow):
    """The same as in the paper: the loss is a mean."""

    def contrastive_loss(self, first, second):
        return ops.mean(super().contrastive_loss(first, second))


def simclr_data() -> tuple:
    first, second = two_views()
    return {"first": first, "second": second, "labeled": normal(3, 24, 4, 4, 1)}, numbers(4, 3, 24)


class BYOL(keras.Model):
    """An online network predicts the target network, which is its average after each update."""

    def __init__(self):
        super().__init__()
        self.momentum = 0.9
        self.online, self.target = image_encoder(), image_encoder()
        self.predictor = network(4, 4)
        self.target.set_weights(self.online.get_weights())
        self.target.trainable = False
        self.loss_tracker = keras.metrics.Mean(name="loss")
        self.built = True

    @property
    def metrics(self):
        return [self.loss_tracker]

    def distance(self, answers, wanted):
        cosine = tf.reduce_sum(unit(answers) * tf.stop_gradient(unit(wanted)), axis=1)
        return tf.reduce_mean(2 - 2 * cosine)

    def train_step(self, data):
        first, second = data
        with tf.GradientTape() as tape:
            forth = self.predictor(self.online(first, training=True))
            back = self.predictor(self.online(second, training=True))
            loss = self.distance(forth, self.target(second, training=False))
            loss += self.distance(back, self.target(first, training=False))
        weights = self.online.trainable_variables + self.predictor.trainable_variables
        self.optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights, strict=True))
        for slow, fast in zip(self.target.weights, self.online.weights, strict=True):
            slow.assign(self.momentum * slow + (1 - self.momentum) * fast)
        self.loss_tracker.update_state(loss)
        return {"loss": self.loss_tracker.result()}


class MoCo(keras.Model):
    """Queries are compared with their keys and with a queue of keys of earlier batches."""

    def __init__(self):
        super().__init__()
        self.gathered, self.temperature, self.momentum = gather(), 0.5, 0.9
        self.encoder = image_encoder()
        self.key_encoder = image_encoder()
        self.key_encoder.set_weights(self.encoder.get_weights())
        self.key_encoder.trainable = False
        self.queue = keras.Variable(unit(normal(5, 12, 4)), trainable=False, name="queue")
        self.loss_tracker = keras.metrics.Mean(name="loss")
        self.built = True

    @property
    def metrics(self):
        return [self.loss_tracker]

    def train_step(self, data):
        first, second = data
        keys = unit(self.key_encoder(second, training=False))
        with tf.GradientTape() as tape:
            queries = unit(self.encoder(first, training=True))
            own = tf.reduce_sum(queries * keys, axis=1, keepdims=True)
            others = tf.matmul(queries, self.queue, transpose_b=True)
            logits = tf.concat([own, others], axis=1) / self.temperature
            labels = tf.zeros(tf.shape(logits)[0], tf.int32)
            loss = tf.reduce_mean(
                tf.nn.sparse_softmax_cross_entropy_with_logits(labels=labels, logits=logits)
            )
        weights = self.encoder.trainable_weights
        self.optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights, strict=True))
        for key, query in zip(self.key_encoder.weights, self.encoder.weights, strict=True):
            key.assign(self.momentum * key + (1 - self.momentum) * query)
        keys = self.gathered(keys)
        self.queue.assign(tf.concat([keys, self.queue[: -tf.shape(keys)[0]]], axis=0))
        self.loss_tracker.update_state(loss)
        return {m.name: m.result() for m in self.metrics}


class BarlowLoss(keras.losses.Loss):
    """Wants the two views' features to correlate with themselves, and not with each other."""

    def call(self, y_true, y_pred):
        first, second = self.normalized(y_true), self.normalized(y_pred)
        rows = tf.cast(tf.shape(first)[0], first.dtype)
        correlation = tf.matmul(first, second, transpose_a=True) / rows
        away = tf.square(correlation - tf.eye(first.shape[1]))
        own = tf.linalg.diag_part(away)
        return tf.reduce_sum(own) + 0.1 * (tf.reduce_sum(away) - tf.reduce_sum(own))

    def normalized(self, features):
        mean, variance = tf.nn.moments(features, axes=[0])
        return (features - mean) / tf.sqrt(variance + 1e-3)


class BarlowTwins(keras.Model):
    """The loss is made of the correlation of features over the whole batch."""

    def __init__(self):
        super().__init__()
        self.gathered, self.encoder = gather(), image_encoder()
        self.loss_tracker = keras.metrics.Mean(name="loss")
        self.built = True

    @property
    def metrics(self):
        return [self.loss_tracker]

    def train_step(self, data):
        first, second = data
        with tf.GradientTape() as tape:
            first = self.encoder(first, training=True)
            second = self.encoder(second, training=True)
            loss = self.loss(self.gathered(first), self.gathered(second))
        weights = self.encoder.trainable_variables
        self.optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights, strict=True))
        self.loss_tracker.update_state(loss)
        return {"loss": self.loss_tracker.result()}


class Distances(layers.Layer):
    """Returns the squared distances from the anchor to the positive and to the negative."""

    def call(self, anchor, positive, negative):
        near = ops.sum(ops.square(anchor - positive), axis=-1)
        return near, ops.sum(ops.square(anchor - negative), axis=-1)


class Siamese(keras.Model):
    """Triplets. The loss is a vector, so its gradient is the sum over the rows, not the mean.

    The batch is (anchor, positive, negative): the last one stands where sample weights would.
    """

    def __init__(self, margin=0.5):
        super().__init__()
        inputs = [keras.Input((4,), name=name) for name in ("anchor", "positive", "negative")]
        embedding = network(4, 3)
        distances = Distances()(*(embedding(each) for each in inputs))
        self.siamese_network = keras.Model(inputs, distances)
        self.margin = margin
        self.loss_tracker = keras.metrics.Mean(name="loss")
        self.built = True

    @property
    def metrics(self):
        return [self.loss_tracker]

    def call(self, inputs):
        return self.siamese_network(inputs)

    def train_step(self, data):
        with tf.GradientTape() as tape:
            loss = self._compute_loss(data)
        weights = self.siamese_network.trainable_weights
        self.optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights, strict=True))
        self.loss_tracker.update_state(loss)
        return {"loss": self.loss_tracker.result()}

    def _compute_loss(self, data):
        near, far = self.siamese_network(data)
        return tf.maximum(near - far + self.margin, 0.0)


class Distiller(keras.Model):
    """A student learns from labels and from the softened answers of a frozen teacher."""

    def __init__(self, student, teacher):
        super().__init__()
        self.student, self.teacher = student, teacher
        self.teacher.trainable = False
        self.built = True

    def compile(
        self,
        optimizer,
        metrics,
        student_loss_fn,
        distillation_loss_fn,
        alpha=0.1,
        temperature=3,
    ):
        super().compile(optimizer=optimizer, metrics=metrics)
        self.student_loss_fn = student_loss_fn
        self.distillation_loss_fn = distillation_loss_fn
        self.alpha, self.temperature = alpha, temperature

    def compute_loss(
        self, x=None, y=None, y_pred=None, sample_weight=None, training=True, allow_empty=False
    ):
        teachers = self.teacher(x, training=False)
        of_labels = self.student_loss_fn(y, y_pred)
        of_teacher = self.distillation_loss_fn(
            ops.softmax(teachers / self.temperature, axis=1),
            ops.softmax(y_pred / self.temperature, axis=1),
        )
        of_teacher *= self.temperature**2
        return self.alpha * of_labels + (1 - self.alpha) * of_teacher

    def call(self, x):
        return self.student(x)


class SupervisedContrastiveLoss(keras.losses.Loss):
    """Wants each row to be similar to the rows of its class among all rows of the batch."""

    def __init__(self, temperature=0.5, name=None):
        super().__init__(name=name)
        self.temperature = temperature

    def call(self, labels, features):
        features = unit(features)
        logits = ops.matmul(features, ops.transpose(features)) / self.temperature
        labels = ops.reshape(labels, (-1, 1))
        same = ops.cast(ops.equal(labels, ops.transpose(labels)), "float32")
        same /= ops.sum(same, axis=1, keepdims=True)
        return ops.mean(ops.categorical_crossentropy(same, logits, from_logits=True))


class SupervisedContrastive(keras.Model):
    """An encoder with Keras's own train_step, whose loss gets the rows of all replicas."""

    def __init__(self):
        super().__init__()
        self.gathered, self.encoder = gather(), image_encoder()
        self.built = True

    def call(self, images):
        return self.encoder(images)

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        return super().compute_loss(x, self.gathered(y), self.gathered(y_pred), sample_weight)


class MaskedAutoencoder(keras.Model):
    """Images of 4 patches: the encoder sees 2 of them, and the decoder predicts the other 2."""

    def __init__(self):
        super().__init__()
        self.patch_layer = keras.Sequential(
            [keras.Input((4, 4, 1)), layers.Conv2D(4, 2, strides=2), layers.Reshape((4, 4))]
        )
        self.positions = layers.Embedding(4, 4)
        self.positions.build()
        self.mask_token = self.add_weight(shape=(1, 1, 4), name="mask_token")
        self.encoder = keras.Sequential([keras.Input((2, 4)), layers.Dense(4, "tanh")])
        self.decoder = keras.Sequential(
            [keras.Input((4, 4)), layers.Flatten(), layers.Dense(16), layers.Reshape((4, 4))]
        )
        self.built = True

    def patches(self, images):
        parts = tf.image.extract_patches(
            images, [1, 2, 2, 1], [1, 2, 2, 1], [1, 1, 1, 1], padding="VALID"
        )
        return tf.reshape(parts, [-1, 4, 4])

    def calculate_loss(self, images, order):
        masked, seen = order[:, :2], order[:, 2:]
        embedded = self.patch_layer(images) + self.positions(tf.range(4))
        encoded = self.encoder(tf.gather(embedded, seen, axis=1, batch_dims=1))
        tokens = self.mask_token + tf.gather(self.positions(tf.range(4)), masked)
        decoded = self.decoder(tf.concat([encoded, tokens], axis=1))
        patches = tf.gather(self.patches(images), masked, axis=1, batch_dims=1)
        outputs = tf.gather(decoded, masked, axis=1, batch_dims=1)
        return self.compute_loss(y=patches, y_pred=outputs), patches, outputs

    def train_step(self, data):
        images, order = data
        with tf.GradientTape() as tape:
            loss, patches, outputs = self.calculate_loss(images, order)
        trained = [
            self.patch_layer.trainable_variables,
            [*self.positions.trainable_variables, self.mask_token],
            self.encoder.trainable_variables,
            self.decoder.trainable_variables,
        ]
        pairs = []
        for gradients, variables in zip(tape.gradient(loss, trained), trained, strict=True):
            pairs += zip(gradients, variables, strict=True)
        self.optimizer.apply_gradients(pairs)
        return updated(self.metrics, loss, patches, outputs)


def of_mse() -> dict:
    return {"optimizer": keras.optimizers.SGD(0.1, momentum=0.5), "loss": "mse", "metrics": ["mae"]}


PROGRAMS = [
    Program(
        "SimCLR",
        "keras.io vision/semisupervised_simclr; Chen et al. 2020, arXiv:2002.05709",
        SimCLR,
        simclr_data,
        lambda: {
            "contrastive_optimizer": keras.optimizers.SGD(0.1),
            "probe_optimizer": keras.optimizers.SGD(0.2),
        },
    ),
    Program(
        "SimCLR, loss by row",
        "keras.io vision/semisupervised_simclr, whose loss is a vector",
        SimCLRByRow,
        simclr_data,
        lambda: {
            "contrastive_optimizer": keras.optimizers.SGD(0.02),
            "probe_optimizer": keras.optimizers.SGD(0.2),
        },
    ),
    Program(
        "BYOL",
        "Grill et al. 2020, arXiv:2006.07733",
        BYOL,
        two_views,
        lambda: {"optimizer": keras.optimizers.SGD(0.1)},
    ),
    Program(
        "MoCo",
        "He et al. 2019, arXiv:1911.05722",
        MoCo,
        two_views,
        lambda: {"optimizer": keras.optimizers.SGD(0.1)},
    ),
    Program(
        "Barlow twins",
        "keras.io vision/barlow_twins; Zbontar et al. 2021, arXiv:2103.03230",
        BarlowTwins,
        two_views,
        lambda: {"optimizer": keras.optimizers.SGD(0.05), "loss": BarlowLoss()},
    ),
    Program(
        "Siamese with triplet loss",
        "keras.io vision/siamese_network",
        Siamese,
        lambda: (normal(0, 24, 4), normal(1, 24, 4), normal(2, 24, 4)),
        lambda: {"optimizer": keras.optimizers.SGD(0.01)},
    ),
    Program(
        "knowledge distillation",
        "keras.io vision/knowledge_distillation; Hinton et al. 2015, arXiv:1503.02531",
        lambda: Distiller(network(4, 3, 4), network(4, 3, 8)),
        lambda: (normal(0, 24, 4), numbers(1, 3, 24)),
        lambda: {
            "optimizer": keras.optimizers.Adam(0.01),
            "metrics": [keras.metrics.SparseCategoricalAccuracy()],
            "student_loss_fn": keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            "distillation_loss_fn": keras.losses.KLDivergence(),
        },
    ),
    Program(
        "supervised contrastive",
        "keras.io vision/supervised-contrastive-learning; Khosla et al. 2020, arXiv:2004.11362",
        SupervisedContrastive,
        lambda: (normal(0, 24, 4, 4, 1), numbers(1, 3, 24)),
        lambda: {"optimizer": keras.optimizers.SGD(0.1), "loss": SupervisedContrastiveLoss()},
    ),
    Program(
        "masked autoencoder",
        "keras.io vision/masked_image_modeling; He et al. 2021, arXiv:2111.06377",
        MaskedAutoencoder,
        lambda: (normal(0, 24, 4, 4, 1), normal(1, 24, 4).argsort(axis=1).astype("int32")),
        of_mse,
    ),
]
