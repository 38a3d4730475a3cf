"""Steps that do more than one update of all weights by one optimizer.

They change gradients, weights or other variables before, between and after updates.
"""
# ruff: noqa: B905  (people write `zip` without `strict`)

import keras
import tensorflow as tf
from keras import layers, ops
from programs.losses import NUM_ROWS, pairs, sgd
from programs.program import Program, gather, network, normal, numbers


class OneNetwork(keras.Model):
    """A small network and the tracker of its loss. Each program below has its own step."""

    def __init__(self, **sizes):
        super().__init__()
        self.network = network(**sizes)
        self.loss_tracker = keras.metrics.Mean(name="loss")
        self.built = True

    @property
    def metrics(self):
        return [self.loss_tracker]

    def call(self, x):
        return self.network(x)

    def error(self, x, y):
        return tf.reduce_mean(tf.square(y - self.network(x, training=True)))

    def gradients(self, x, y):
        with tf.GradientTape() as tape:
            loss = self.error(x, y)
        return loss, tape.gradient(loss, self.network.trainable_variables)

    def update(self, gradients, loss):
        weights = self.network.trainable_variables
        self.optimizer.apply_gradients(zip(gradients, weights))
        self.loss_tracker.update_state(loss)
        return {"loss": self.loss_tracker.result()}


# Gradients that are changed before the update.


class Centralized(OneNetwork):
    """Takes the mean off the gradient of every kernel."""

    def train_step(self, data):
        loss, gradients = self.gradients(*data)
        central = []
        for each in gradients:
            if len(each.shape) > 1:
                each -= tf.reduce_mean(each, axis=list(range(len(each.shape) - 1)), keepdims=True)
            central.append(each)
        return self.update(central, loss)


class CentralizingRMSprop(keras.optimizers.RMSprop):
    """The same in an optimizer."""

    def apply_gradients(self, grads_and_vars):
        gradients, weights = zip(*grads_and_vars)
        central = [
            each - ops.mean(each, axis=0, keepdims=True) if len(each.shape) > 1 else each
            for each in gradients
        ]
        return super().apply_gradients(zip(central, weights))


class AdaptivelyClipped(OneNetwork):
    """Clips the gradient of each unit by the norm of its weights."""

    def train_step(self, data):
        loss, gradients = self.gradients(*data)
        clipped = []
        for weight, each in zip(self.network.trainable_variables, gradients):
            axis = 0 if len(each.shape) > 1 else None
            of_weight = tf.maximum(tf.norm(weight, axis=axis, keepdims=True), 1e-3)
            norm = tf.maximum(tf.norm(each, axis=axis, keepdims=True), 1e-6)
            limit = 0.1 * of_weight
            clipped.append(tf.where(norm > limit, each * limit / norm, each))
        return self.update(clipped, loss)


class SignSGD(OneNetwork):
    """Uses only the sign of each gradient, and logs the norm."""

    def train_step(self, data):
        loss, gradients = self.gradients(*data)
        logs = self.update([tf.sign(each) for each in gradients], loss)
        return logs | {"gradient_norm": tf.linalg.global_norm(gradients)}


class GradientSurgery(OneNetwork):
    """Two tasks: a gradient loses its part against the other task's. One persistent tape."""

    def train_step(self, data):
        x, y = data
        with tf.GradientTape(persistent=True) as tape:
            answers = self.network(x, training=True)
            losses = [tf.reduce_mean(tf.square(y[:, i] - answers[:, i])) for i in range(2)]
        weights = self.network.trainable_variables
        tasks = [tape.gradient(loss, weights) for loss in losses]
        del tape
        flat = [tf.concat([tf.reshape(each, [-1]) for each in task], 0) for task in tasks]
        dot = tf.minimum(tf.reduce_sum(flat[0] * flat[1]), 0.0)
        gradients = []
        for first, second in zip(*tasks):
            first_left = first - dot / tf.reduce_sum(tf.square(flat[1])) * second
            second_left = second - dot / tf.reduce_sum(tf.square(flat[0])) * first
            gradients.append(first_left + second_left)
        return self.update(gradients, losses[0] + losses[1])


class ByOutputGradients(OneNetwork):
    """Gives the slope of the loss at the answers to the tape itself."""

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            answers = self.network(x, training=True)
        away = answers - y
        slope = 2 * away / tf.cast(tf.size(away), tf.float32)
        weights = self.network.trainable_variables
        gradients = tape.gradient(answers, weights, output_gradients=slope)
        return self.update(gradients, tf.reduce_mean(tf.square(away)))


class ByOwnGradient(OneNetwork):
    """Adversarial domain adaptation: a gradient is reversed on its way to the features."""

    def __init__(self):
        super().__init__()
        self.domain = network(2, 1)

    def train_step(self, data):
        x, y = data

        @tf.custom_gradient
        def reversed_(features):
            return tf.identity(features), lambda slope: -0.5 * slope

        with tf.GradientTape() as tape:
            source, target = self.network(x), self.network(y)
            logits = self.domain(reversed_(tf.concat([source, target], axis=0)))
            is_target = tf.concat([tf.zeros_like(x[:, :1]), tf.ones_like(y[:, :1])], axis=0)
            loss = tf.reduce_mean(
                tf.nn.sigmoid_cross_entropy_with_logits(labels=is_target, logits=logits)
            )
            loss += tf.reduce_mean(tf.square(source - x[:, :2]))
        weights = self.trainable_variables
        self.optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights))
        self.loss_tracker.update_state(loss)
        return {"loss": self.loss_tracker.result()}


# Gradients by the inputs.


class Physics(OneNetwork):
    """The answer's second derivative by x is y: a network that solves an equation."""

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as of_weights:
            with tf.GradientTape() as outer:
                outer.watch(x)
                with tf.GradientTape() as inner:
                    inner.watch(x)
                    answers = self.network(x)
                slope = inner.gradient(answers, x)
            curve = outer.gradient(slope, x)
            loss = tf.reduce_mean(tf.square(curve + answers - y))
        weights = self.network.trainable_variables
        return self.update(of_weights.gradient(loss, weights), loss)


class VirtualAdversary(OneNetwork):
    """Wants the same answer at the input's worst neighbor, without its label."""

    def divergence(self, x, wanted):
        answers = self.network(x, training=True)
        chances = tf.nn.softmax(wanted)
        away = tf.nn.log_softmax(wanted) - tf.nn.log_softmax(answers)
        return tf.reduce_mean(tf.reduce_sum(chances * away, axis=1))

    def train_step(self, data):
        x, noise = data
        with tf.GradientTape() as tape:
            wanted = tf.stop_gradient(self.network(x, training=True))
            away = 0.5 * tf.math.l2_normalize(noise, axis=1)
            with tf.GradientTape() as of_input:
                of_input.watch(away)
                moved = self.divergence(x + away, wanted)
            away = tf.math.l2_normalize(of_input.gradient(moved, away), axis=1)
            loss = self.divergence(x + tf.stop_gradient(away), wanted)
            loss += tf.reduce_mean(tf.square(self.network(x) - x[:, :2]))
        weights = self.network.trainable_variables
        return self.update(tape.gradient(loss, weights), loss)


class PGD(OneNetwork):
    """Trains at inputs that several steps against the loss of the batch have moved."""

    def train_step(self, data):
        x, y = data
        moved = x
        for _ in range(3):
            with tf.GradientTape() as tape:
                tape.watch(moved)
                loss = tf.reduce_sum(tf.square(y - self.network(moved, training=False)))
            moved = moved + 0.1 * tape.gradient(loss, moved)
            moved = x + tf.clip_by_value(moved - x, -0.2, 0.2)
        return self.update(self.gradients(moved, y)[1], self.error(x, y))


class ByBatchSlope(OneNetwork):
    """Moves inputs along the slope of a mean, whose size depends on the rows of the batch."""

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            tape.watch(x)
            loss = self.error(x, y)
        loss, gradients = self.gradients(x + 2.0 * tape.gradient(loss, x), y)
        return self.update(gradients, loss)


# Two passes, and fast weights.


class FastWeights(OneNetwork):
    """One task a batch: its loss after a step of gradient descent. Second order."""

    def answers(self, weights, x):
        kernel, bias, last_kernel, last_bias = weights
        return tf.matmul(tf.tanh(tf.matmul(x, kernel) + bias), last_kernel) + last_bias

    def train_step(self, data):
        x, y = data
        weights = self.network.trainable_variables
        with tf.GradientTape() as tape:
            with tf.GradientTape() as inner:
                loss = tf.reduce_mean(tf.square(self.answers(weights, x["seen"]) - y["seen"]))
            slopes = inner.gradient(loss, weights)
            fast = [each - 0.2 * slope for each, slope in zip(weights, slopes)]
            loss = tf.reduce_mean(tf.square(self.answers(fast, x["asked"]) - y["asked"]))
        return self.update(tape.gradient(loss, weights), loss)


class FirstOrder(FastWeights):
    """The same without the gradient of the gradient."""

    def train_step(self, data):
        x, y = data
        weights = self.network.trainable_variables
        with tf.GradientTape() as inner:
            loss = tf.reduce_mean(tf.square(self.answers(weights, x["seen"]) - y["seen"]))
        slopes = inner.gradient(loss, weights)
        with tf.GradientTape() as tape:
            fast = [each - 0.2 * tf.stop_gradient(slope) for each, slope in zip(weights, slopes)]
            loss = tf.reduce_mean(tf.square(self.answers(fast, x["asked"]) - y["asked"]))
        return self.update(tape.gradient(loss, weights), loss)


def one_task() -> tuple:
    x = {"seen": normal(0, NUM_ROWS, 4), "asked": normal(1, NUM_ROWS, 4)}
    return x, {"seen": normal(2, NUM_ROWS, 2), "asked": normal(3, NUM_ROWS, 2)}


class Extragradient(OneNetwork):
    """Applies the gradient at the weights where a first step would lead."""

    def train_step(self, data):
        weights = self.network.trainable_variables
        before = [tf.identity(each) for each in weights]
        _, gradients = self.gradients(*data)
        for weight, each in zip(weights, gradients):
            weight.assign_sub(0.2 * each)
        loss, gradients = self.gradients(*data)
        for weight, each in zip(weights, before):
            weight.assign(each)
        return self.update(gradients, loss)


class Reptile(OneNetwork):
    """Three updates by the optimizer; the weights then go only a part of the way."""

    def train_step(self, data):
        weights = self.network.trainable_variables
        before = [tf.identity(each) for each in weights]
        for _ in range(3):
            loss, gradients = self.gradients(*data)
            self.optimizer.apply_gradients(zip(gradients, weights))
        for weight, each in zip(weights, before):
            weight.assign(each + 0.3 * (weight - each))
        self.loss_tracker.update_state(loss)
        return {"loss": self.loss_tracker.result()}


class ByHand(OneNetwork):
    """Updates its weights itself, with no optimizer."""

    def train_step(self, data):
        loss, gradients = self.gradients(*data)
        for weight, each in zip(self.network.trainable_variables, gradients):
            weight.assign_sub(0.1 * each)
        self.loss_tracker.update_state(loss)
        return {"loss": self.loss_tracker.result()}


class KerasStepTwice(keras.Sequential):
    """Calls Keras's own step for the batch, and again for its mirror image."""

    def train_step(self, data):
        x, y = data
        super().train_step((x, y))
        return super().train_step((x[:, ::-1], y))


class KerasStepAndAverage(keras.Sequential):
    """Calls Keras's own step, then averages the weights."""

    def build(self, *args):
        super().build(*args)
        self.averages = [
            self.add_weight(shape=each.shape, initializer="zeros", trainable=False)
            for each in self.trainable_weights
        ]

    def train_step(self, data):
        logs = super().train_step(data)
        for average, weight in zip(self.averages, self.trainable_weights):
            average.assign(0.9 * average + 0.1 * weight)
        return logs


class ApplyInKeras3(OneNetwork):
    """As Keras 3 has it: `optimizer.apply(gradients, variables)`."""

    def train_step(self, data):
        loss, gradients = self.gradients(*data)
        self.optimizer.apply(gradients, self.network.trainable_variables)
        self.loss_tracker.update_state(loss)
        return {"loss": self.loss_tracker.result(), "iterations": self.optimizer.iterations + 0}


# One optimizer for a part of the weights at a time.


class Alternating(OneNetwork):
    """Updates the body, then the head, with the new body; both by the same optimizer."""

    def compile(self, optimizer):
        super().compile(optimizer=optimizer)
        self.optimizer.build(self.network.trainable_variables)

    def train_step(self, data):
        x, y = data
        for layer in self.network.layers:
            with tf.GradientTape() as tape:
                loss = self.error(x, y)
            gradients = tape.gradient(loss, layer.trainable_variables)
            self.optimizer.apply_gradients(zip(gradients, layer.trainable_variables))
        self.loss_tracker.update_state(loss)
        return {"loss": self.loss_tracker.result()}


class InTurns(Alternating):
    """Updates the body in even steps and the head in odd ones, by gradients of zero."""

    def __init__(self):
        super().__init__()
        self.steps = self.add_weight(shape=(), initializer="zeros", trainable=False)

    def train_step(self, data):
        loss, gradients = self.gradients(*data)
        is_odd = self.steps % 2.0
        shares = [1.0 - is_odd, 1.0 - is_odd, is_odd, is_odd]
        logs = self.update([each * share for each, share in zip(gradients, shares)], loss)
        self.steps.assign_add(1.0)
        return logs


class ForwardForward(keras.Model):
    """Each layer has its own loss and optimizer, and gets what the updated layer below makes."""

    def __init__(self):
        super().__init__()
        self.parts = [
            keras.Sequential([keras.Input((size,)), layers.Dense(5, "relu")]) for size in (4, 5)
        ]
        self.loss_tracker = keras.metrics.Mean(name="loss")
        self.built = True

    @property
    def metrics(self):
        return [self.loss_tracker]

    def compile(self, make_optimizer):
        super().compile()
        self.optimizers = [make_optimizer() for _ in self.parts]

    def train_step(self, data):
        good, bad = data
        for part, optimizer in zip(self.parts, self.optimizers):
            good, bad = tf.math.l2_normalize(good, 1), tf.math.l2_normalize(bad, 1)
            with tf.GradientTape() as tape:
                of_good = tf.reduce_mean(tf.square(part(good)), axis=1)
                of_bad = tf.reduce_mean(tf.square(part(bad)), axis=1)
                away = tf.concat([0.5 - of_good, of_bad - 0.5], axis=0)
                loss = tf.reduce_mean(tf.math.softplus(away))
            gradients = tape.gradient(loss, part.trainable_weights)
            optimizer.apply_gradients(zip(gradients, part.trainable_weights))
            good, bad = part(good), part(bad)
            self.loss_tracker.update_state(loss)
        return {"loss": self.loss_tracker.result()}


class Temperature(OneNetwork):
    """The policy's entropy is held by a temperature, which has an optimizer of its own."""

    def __init__(self):
        super().__init__()
        self.log_alpha = self.add_weight(shape=(), initializer="zeros", name="log_alpha")

    def compile(self, optimizer, alpha_optimizer):
        super().compile(optimizer=optimizer)
        self.alpha_optimizer = alpha_optimizer

    def train_step(self, data):
        states, values = data
        with tf.GradientTape() as tape:
            log_chances = tf.nn.log_softmax(self.network(states))
            chances = tf.exp(log_chances)
            gain = tf.reduce_sum(chances * (tf.exp(self.log_alpha) * log_chances - values), axis=1)
            loss = tf.reduce_mean(gain)
        weights = self.network.trainable_variables
        self.optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights))

        entropy = -tf.reduce_sum(chances * log_chances, axis=1)
        with tf.GradientTape() as tape:
            alpha_loss = tf.reduce_mean(self.log_alpha * tf.stop_gradient(entropy - 0.4))
        gradient = tape.gradient(alpha_loss, self.log_alpha)
        self.alpha_optimizer.apply_gradients([(gradient, self.log_alpha)])
        self.loss_tracker.update_state(loss)
        return {"loss": self.loss_tracker.result(), "alpha": tf.exp(self.log_alpha)}


# Variables that follow the weights.


class AveragedWeights(OneNetwork):
    """Stochastic weight averaging, from the third step on."""

    def __init__(self):
        super().__init__()
        self.averaged = network()
        self.averaged.trainable = False
        self.count = self.add_weight(shape=(), initializer="zeros", trainable=False)

    def train_step(self, data):
        loss, gradients = self.gradients(*data)
        logs = self.update(gradients, loss)
        self.count.assign_add(1.0)
        num_models = tf.maximum(self.count - 2.0, 1.0)
        for average, new in zip(self.averaged.weights, self.network.weights):
            average.assign(average + (new - average) / num_models)
        return logs


class LookAhead(OneNetwork):
    """After every third update the weights go back a part of the way to the slow weights."""

    def __init__(self):
        super().__init__()
        self.slow = network()
        self.slow.set_weights(self.network.get_weights())
        self.slow.trainable = False

    def train_step(self, data):
        loss, gradients = self.gradients(*data)
        logs = self.update(gradients, loss)
        is_time = tf.equal(self.optimizer.iterations % 3, 0)
        for slow, fast in zip(self.slow.weights, self.network.weights):
            slow.assign(tf.where(is_time, slow + 0.5 * (fast - slow), slow))
            fast.assign(tf.where(is_time, slow, fast))
        return logs


class Plasticity(OneNetwork):
    """Shrinks the weights toward the first ones after each update, without an optimizer's help."""

    def __init__(self):
        super().__init__()
        self.first = [tf.constant(each) for each in self.network.get_weights()]

    def train_step(self, data):
        loss, gradients = self.gradients(*data)
        logs = self.update(gradients, loss)
        for weight, first in zip(self.network.trainable_weights, self.first):
            weight.assign(first + 0.95 * (weight - first))
        return logs


class SelfDistilled(OneNetwork):
    """DINO: a teacher that follows the student; the moving mean of its outputs is taken off."""

    def __init__(self):
        super().__init__()
        self.teacher = network()
        self.teacher.set_weights(self.network.get_weights())
        self.teacher.trainable = False
        self.center = self.add_weight(shape=(1, 2), initializer="zeros", trainable=False)

    def train_step(self, data):
        first, second = data
        teachers = self.teacher(first, training=False)
        wanted = tf.nn.softmax((teachers - self.center) / 0.5)
        with tf.GradientTape() as tape:
            students = tf.nn.log_softmax(self.network(second, training=True))
            loss = -tf.reduce_mean(tf.reduce_sum(wanted * students, axis=1))
        weights = self.network.trainable_variables
        logs = self.update(tape.gradient(loss, weights), loss)
        mean = tf.reduce_mean(teachers, axis=0, keepdims=True)
        self.center.assign(0.8 * self.center + 0.2 * mean)
        for slow, fast in zip(self.teacher.weights, self.network.weights):
            slow.assign(0.9 * slow + 0.1 * fast)
        return logs


class NearestNeighbors(OneNetwork):
    """Each row's positive is its nearest neighbor in a queue of earlier rows' features."""

    def __init__(self):
        super().__init__(outputs=3)
        self.gathered = gather()
        queue = tf.math.l2_normalize(normal(5, 12, 3), axis=1)
        self.queue = keras.Variable(queue, trainable=False, name="queue")

    def nearest(self, features):
        found = tf.argmax(tf.matmul(features, self.queue, transpose_b=True), axis=1)
        neighbors = tf.gather(tf.convert_to_tensor(self.queue), found)
        return features + tf.stop_gradient(neighbors - features)

    def train_step(self, data):
        first, second = data
        with tf.GradientTape() as tape:
            first = tf.math.l2_normalize(self.network(first), axis=1)
            second = tf.math.l2_normalize(self.network(second), axis=1)
            first, second = self.gathered(first), self.gathered(second)
            logits = tf.matmul(self.nearest(first), second, transpose_b=True) / 0.5
            labels = tf.range(tf.shape(logits)[0])
            loss = tf.reduce_mean(
                tf.nn.sparse_softmax_cross_entropy_with_logits(labels=labels, logits=logits)
            )
        logs = self.update(tape.gradient(loss, self.network.trainable_variables), loss)
        keys = tf.stop_gradient(first)
        self.queue.assign(tf.concat([keys, self.queue[: -tf.shape(keys)[0]]], axis=0))
        return logs


class Prototypes(OneNetwork):
    """A moving centroid of each class: the rows' features are drawn to that of their class."""

    def __init__(self):
        super().__init__(outputs=3)
        self.centroids = self.add_weight(shape=(3, 3), initializer="zeros", trainable=False)

    def train_step(self, data):
        x, labels = data
        chosen = tf.one_hot(labels, 3)
        with tf.GradientTape() as tape:
            features = self.network(x, training=True)
            own = tf.gather(tf.convert_to_tensor(self.centroids), labels)
            loss = tf.reduce_mean(tf.reduce_sum(tf.square(features - own), axis=1))
            loss += tf.reduce_mean(
                tf.nn.softmax_cross_entropy_with_logits(labels=chosen, logits=features)
            )
        logs = self.update(tape.gradient(loss, self.network.trainable_variables), loss)
        sums = tf.matmul(chosen, features, transpose_a=True)
        counts = tf.reduce_sum(chosen, axis=0)[:, None]
        means = tf.math.divide_no_nan(sums, counts)
        moved = 0.7 * self.centroids + 0.3 * means
        self.centroids.assign(tf.where(counts > 0, moved, self.centroids))
        return logs


class BalancedTasks(OneNetwork):
    """Divides each task's loss by its moving mean."""

    def __init__(self):
        super().__init__()
        self.means = self.add_weight(shape=(2,), initializer="ones", trainable=False)

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            losses = tf.reduce_mean(tf.square(y - self.network(x, training=True)), axis=0)
            self.means.assign(0.8 * self.means + 0.2 * tf.stop_gradient(losses))
            loss = tf.reduce_sum(losses / self.means)
        weights = self.network.trainable_variables
        return self.update(tape.gradient(loss, weights), loss)


class Baseline(OneNetwork):
    """The policy gradient with a moving mean of returns, and their largest, as state."""

    def __init__(self):
        super().__init__()
        self.mean = self.add_weight(shape=(), initializer="zeros", trainable=False)
        self.largest = self.add_weight(shape=(), initializer="ones", trainable=False)

    def train_step(self, data):
        states, y = data
        returns = y[:, 1]
        self.largest.assign(tf.maximum(self.largest, tf.reduce_max(tf.abs(returns))))
        with tf.GradientTape() as tape:
            chosen = tf.nn.sparse_softmax_cross_entropy_with_logits(
                labels=tf.cast(y[:, 0] > 0, tf.int32), logits=self.network(states)
            )
            loss = tf.reduce_mean(chosen * (returns - self.mean) / self.largest)
        logs = self.update(tape.gradient(loss, self.network.trainable_variables), loss)
        self.mean.assign_add(0.1 * (tf.reduce_mean(returns) - self.mean))
        return logs


class AdaMatch(OneNetwork):
    """Pseudo-labels: their threshold is a share of the batch's mean confidence."""

    def __init__(self):
        super().__init__(outputs=3)

    def train_step(self, data):
        x, labels = data
        with tf.GradientTape() as tape:
            source = self.network(x["source"], training=True)
            weak = tf.nn.softmax(self.network(x["weak"], training=True))
            strong = self.network(x["strong"], training=True)
            of_source = tf.nn.softmax(source)
            ratio = tf.reduce_mean(of_source, axis=0) / tf.reduce_mean(weak, axis=0)
            weak = weak * ratio
            weak = tf.stop_gradient(weak / tf.reduce_sum(weak, axis=1, keepdims=True))
            threshold = 0.9 * tf.reduce_mean(tf.reduce_max(of_source, axis=1))
            mask = tf.cast(tf.reduce_max(weak, axis=1) > threshold, tf.float32)
            loss = tf.reduce_mean(
                tf.nn.sparse_softmax_cross_entropy_with_logits(labels=labels, logits=source)
            )
            away = tf.nn.softmax_cross_entropy_with_logits(labels=weak, logits=strong)
            loss += tf.reduce_mean(away * tf.stop_gradient(mask))
        weights = self.network.trainable_variables
        return self.update(tape.gradient(loss, weights), loss)


def two_domains() -> tuple:
    weak = normal(1, NUM_ROWS, 4) + 0.5
    strong = weak + 0.3 * normal(2, NUM_ROWS, 4)
    x = {"source": normal(0, NUM_ROWS, 4), "weak": weak, "strong": strong}
    return x, numbers(3, 3, NUM_ROWS)


# Keras's own step, with layers and optimizers that keep variables.


def with_spectral_norm() -> keras.Model:
    wrapped = layers.SpectralNormalization(layers.Dense(5, "tanh"))
    return keras.Sequential([keras.Input((4,)), wrapped, layers.Dense(2)])


def constrained() -> keras.Model:
    return network(kernel_constraint=keras.constraints.MaxNorm(0.8))


def sequential(model) -> keras.Model:
    return model([keras.Input((4,)), layers.Dense(5, "tanh"), layers.Dense(2)])


def classes() -> tuple:
    return normal(0, NUM_ROWS, 4), numbers(1, 3, NUM_ROWS)


def two_views(columns: int = 4):
    """Returns a function that makes two noisy copies of the same rows."""
    rows = normal(0, NUM_ROWS, columns)
    noise = 0.3 * normal(1, 2, NUM_ROWS, columns)
    return lambda: (rows + noise[0], rows + noise[1])


def own(name: str, source: str, model, data=None, compile_args=sgd, **settings) -> Program:
    """Returns the program of a model with a step of its own."""
    return Program(name, source, model, data or pairs(), compile_args, **settings)


PROGRAMS = [
    own(
        "gradient centralization",
        "keras.io: Gradient Centralization; Yong et al. 2020, arXiv:2004.01461",
        Centralized,
    ),
    own(
        "gradient centralization, optimizer",
        "keras.io: Gradient Centralization, whose optimizer does it",
        network,
        compile_args=lambda: {"optimizer": CentralizingRMSprop(0.01), "loss": "mse"},
    ),
    own("adaptive gradient clipping", "Brock et al. 2021, arXiv:2102.06171", AdaptivelyClipped),
    own(
        "sign of gradients",
        "Bernstein et al. 2018, arXiv:1802.04434",
        SignSGD,
        compile_args=lambda: sgd(0.01),
    ),
    own("gradient surgery", "Yu et al. 2020, arXiv:2001.06782", GradientSurgery),
    own(
        "output_gradients", "tensorflow.org: advanced automatic differentiation", ByOutputGradients
    ),
    own(
        "domain adversary",
        "Ganin et al. 2015, arXiv:1505.07818",
        ByOwnGradient,
        two_views(),
    ),
    own(
        "physics-informed network",
        "Raissi et al. 2017, arXiv:1711.10561",
        lambda: Physics(inputs=1, outputs=1),
        lambda: (normal(0, NUM_ROWS, 1), normal(1, NUM_ROWS, 1)),
    ),
    own("virtual adversary", "Miyato et al. 2017, arXiv:1704.03976", VirtualAdversary, pairs(4)),
    own("PGD training", "Madry et al. 2017, arXiv:1706.06083", PGD),
    own("slope of the batch's mean", "FGSM training, with the gradient itself", ByBatchSlope),
    own("MAML, a task a batch", "Finn et al. 2017, arXiv:1703.03400", FastWeights, one_task),
    own("first-order MAML", "Nichol et al. 2018, arXiv:1803.02999", FirstOrder, one_task),
    own("extragradient", "Gidel et al. 2018, arXiv:1802.10551", Extragradient),
    own("Reptile", "keras.io: Few-Shot learning with Reptile", Reptile),
    own("update by hand", "tensorflow.org: basic training loops", ByHand),
    own(
        "Keras's step twice",
        "a step that calls super().train_step for two batches",
        lambda: sequential(KerasStepTwice),
        compile_args=lambda: sgd(loss="mse", metrics=["mae"]),
    ),
    own(
        "Keras's step and an average",
        "a step that calls super().train_step, then averages",
        lambda: sequential(KerasStepAndAverage),
        compile_args=lambda: sgd(loss="mse", metrics=["mae"]),
    ),
    own("optimizer.apply", "keras.io: guides/custom_train_step_in_tensorflow", ApplyInKeras3),
    own("alternating parts", "block coordinate descent", Alternating),
    own("parts in turns", "alternating steps of one optimizer", InTurns),
    own(
        "forward-forward",
        "keras.io: Using the Forward-Forward Algorithm; Hinton 2022, arXiv:2212.13345",
        ForwardForward,
        pairs(4),
        lambda: {"make_optimizer": lambda: keras.optimizers.SGD(0.1)},
    ),
    own(
        "soft actor-critic's temperature",
        "Haarnoja et al. 2018, arXiv:1812.05905",
        Temperature,
        compile_args=lambda: {
            "optimizer": keras.optimizers.SGD(0.1),
            "alpha_optimizer": keras.optimizers.SGD(0.2),
        },
    ),
    own("stochastic weight averaging", "Izmailov et al. 2018, arXiv:1803.05407", AveragedWeights),
    own("lookahead", "Zhang et al. 2019, arXiv:1907.08610", LookAhead),
    own("decay toward the first weights", "Kumar et al. 2023, arXiv:2308.11958", Plasticity),
    own("DINO", "Caron et al. 2021, arXiv:2104.14294", SelfDistilled, two_views()),
    own(
        "NNCLR",
        "keras.io: Self-supervised contrastive learning with NNCLR; arXiv:2104.14548",
        NearestNeighbors,
        two_views(),
    ),
    own("class centroids", "Wen et al. 2016, center loss; arXiv:1703.05175", Prototypes, classes),
    own("tasks balanced by moving means", "Liu et al. 2019, arXiv:1803.10704", BalancedTasks),
    own("moving baseline", "Williams 1992, REINFORCE with a baseline", Baseline),
    own(
        "AdaMatch",
        "keras.io: Semi-supervision and domain adaptation with AdaMatch",
        AdaMatch,
        two_domains,
    ),
    own(
        "spectral normalization",
        "Miyato et al. 2018, arXiv:1802.05957",
        with_spectral_norm,
        compile_args=lambda: sgd(loss="mse"),
    ),
    own(
        "weight constraints",
        "keras.io: Layer weight constraints",
        constrained,
        compile_args=lambda: sgd(0.2, loss="mse"),
    ),
    own(
        "optimizer with use_ema",
        "keras.io: Optimizers, use_ema",
        network,
        compile_args=lambda: {
            "optimizer": keras.optimizers.Adam(
                0.01, use_ema=True, ema_momentum=0.8, ema_overwrite_frequency=3
            ),
            "loss": "mse",
        },
    ),
]
