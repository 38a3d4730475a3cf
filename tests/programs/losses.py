"""Supervised programs whose losses are made of the whole batch: its sums, moments and extremes.

The losses are written as for one device. Only those that compare every row with every other one
gather the rows first.
"""
# ruff: noqa: B905  (people write `zip` without `strict`)

import keras
import numpy as np
import tensorflow as tf
from keras import layers, ops
from programs.program import Program, gather, network, normal, numbers

NUM_ROWS, BATCH_SIZE, NUM_STEPS = 24, 6, 5


class Own(keras.Model):
    """A network, and a step as in Keras's guide, with a loss of the network, x and y."""

    def __init__(self, batch_loss, **settings):
        super().__init__()
        self.network, self.batch_loss = network(**settings), batch_loss
        self.loss_tracker = keras.metrics.Mean(name="loss")
        self.built = True

    @property
    def metrics(self):
        return [self.loss_tracker]

    def call(self, x):
        return self.network(x)

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = self.batch_loss(self.network, x, y)
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply_gradients(zip(gradients, self.trainable_variables))
        self.loss_tracker.update_state(loss)
        return {"loss": self.loss_tracker.result()}


# The mean, in other words.


def by_static_rows(network, x, y):
    return tf.reduce_sum(tf.square(y - network(x))) / x.shape[0]


def by_dynamic_rows(network, x, y):
    return tf.reduce_sum(tf.square(y - network(x))) / tf.cast(tf.shape(x)[0], tf.float32)


def by_constant(network, x, y):
    return tf.reduce_sum(tf.square(y - network(x))) / BATCH_SIZE


def average_loss(network, x, y):
    return tf.nn.compute_average_loss(keras.losses.mean_squared_error(y, network(x)))


def means_of_columns(network, x, y):
    return tf.reduce_sum(tf.reduce_mean(tf.square(y - network(x)), axis=0))


def weighted_by_hand(network, x, y):
    """The weight of a row is its first output."""
    weight = tf.exp(y[:, 0])
    errors = tf.reduce_mean(tf.square(y - network(x)), axis=-1)
    return tf.reduce_sum(weight * errors) / tf.reduce_sum(weight)


def with_own_regularizer(network, x, y):
    loss = tf.reduce_mean(tf.square(y - network(x)))
    return loss + 0.1 * tf.add_n([tf.nn.l2_loss(each) for each in network.trainable_weights])


# Functions of sums.


def rmse(network, x, y):
    return tf.sqrt(tf.reduce_mean(tf.square(y - network(x))))


def largest(network, x, y):
    """Adds the worst row to the mean."""
    errors = tf.reduce_mean(tf.square(y - network(x)), axis=-1)
    return tf.reduce_mean(errors) + tf.reduce_max(errors)


def soft_maximum(network, x, y):
    """Weighs rows with large errors more: the tilted loss."""
    errors = tf.reduce_mean(tf.square(y - network(x)), axis=-1)
    rows = tf.cast(tf.shape(x)[0], tf.float32)
    return (tf.reduce_logsumexp(2.0 * errors) - tf.math.log(rows)) / 2.0


def spread(network, x, y):
    """Wants answers whose standard deviation over the batch is that of y."""
    answers = network(x)
    away = tf.math.reduce_std(answers, axis=0) - tf.math.reduce_std(y, axis=0)
    return tf.reduce_mean(tf.square(y - answers)) + tf.reduce_mean(tf.square(away))


def concordance(network, x, y):
    """One minus the concordance correlation coefficient of each output."""
    answers = network(x)
    means, variances = tf.nn.moments(answers, axes=[0])
    true_means, true_variances = tf.nn.moments(y, axes=[0])
    covariance = tf.reduce_mean((answers - means) * (y - true_means), axis=0)
    total = variances + true_variances + tf.square(means - true_means)
    return tf.reduce_mean(1 - 2 * covariance / total)


def unexplained(network, x, y):
    """One minus the coefficient of determination."""
    residual = tf.reduce_sum(tf.square(y - network(x)))
    return residual / tf.reduce_sum(tf.square(y - tf.reduce_mean(y, axis=0)))


def focal(network, x, y):
    """The focal loss of all boxes, divided by the number of positive boxes."""
    y = tf.cast(y > 0.3, tf.float32)
    entropy = tf.nn.sigmoid_cross_entropy_with_logits(labels=y, logits=network(x))
    right = tf.where(y > 0, tf.sigmoid(network(x)), 1 - tf.sigmoid(network(x)))
    losses = tf.where(y > 0, 0.25, 0.75) * tf.pow(1 - right, 2.0) * entropy
    return tf.math.divide_no_nan(tf.reduce_sum(losses), tf.reduce_sum(y))


def balanced(network, x, y):
    """Weighs the positives by the share of negatives in the batch, and the other way round."""
    y = tf.cast(y > 0.3, tf.float32)
    negatives = tf.reduce_mean(1 - y)
    entropy = tf.nn.sigmoid_cross_entropy_with_logits(labels=y, logits=network(x))
    return tf.reduce_mean(tf.where(y > 0, negatives, 1 - negatives) * entropy)


def entropy_of_mean(network, x, y):
    """Clusters: two copies of a row belong to one cluster, and all clusters are used."""
    first, second = tf.nn.softmax(network(x)), tf.nn.softmax(network(x + 0.1 * y))
    same = -tf.reduce_mean(tf.math.log(tf.reduce_sum(first * second, axis=1)))
    share = tf.reduce_mean(first, axis=0)
    return same + 2.0 * tf.reduce_sum(share * tf.math.log(share))


def mutual_information(network, x, y):
    """The bound of Donsker and Varadhan; the second half of y is of other rows."""
    joint = network(tf.concat([x, y[:, :2]], axis=1))
    apart = network(tf.concat([x, y[:, 2:]], axis=1))
    rows = tf.cast(tf.shape(x)[0], tf.float32)
    partition = tf.reduce_logsumexp(apart) - tf.math.log(rows)
    return partition - tf.reduce_mean(joint)


def normalized_returns(network, x, y):
    """The policy gradient, of advantages whose mean is 0 and whose deviation is 1."""
    actions, returns = tf.cast(y[:, 0] > 0, tf.int32), y[:, 1]
    advantages = returns - tf.reduce_mean(returns)
    advantages /= tf.math.reduce_std(returns) + 1e-6
    chosen = tf.nn.sparse_softmax_cross_entropy_with_logits(labels=actions, logits=network(x))
    return tf.reduce_mean(chosen * advantages)


def clipped_policy(network, x, y):
    """Proximal policy optimization: the ratio of the policies is clipped; with an entropy bonus."""
    log_chances = tf.nn.log_softmax(network(x))
    chosen = tf.reduce_sum(log_chances * tf.one_hot(tf.cast(y[:, 0] > 0, tf.int32), 2), axis=1)
    advantages = (y[:, 1] - tf.reduce_mean(y[:, 1])) / (tf.math.reduce_std(y[:, 1]) + 1e-8)
    ratio = tf.exp(chosen + 0.7)
    clipped = tf.clip_by_value(ratio, 0.8, 1.2)
    loss = -tf.reduce_mean(tf.minimum(ratio * advantages, clipped * advantages))
    return loss + 0.01 * tf.reduce_mean(tf.reduce_sum(tf.exp(log_chances) * log_chances, axis=1))


# Matrices of sums.


def covariance(features):
    """Returns the covariance of columns over the batch."""
    features -= tf.reduce_mean(features, axis=0)
    rows = tf.cast(tf.shape(features)[0], tf.float32)
    return tf.matmul(features, features, transpose_a=True) / (rows - 1)


def vicreg(network, x, y):
    """Variance, invariance and covariance of the features of two views."""
    first, second = network(x), network(x + 0.3 * y)
    loss = 25.0 * tf.reduce_mean(tf.square(first - second))
    for features in (first, second):
        deviation = tf.sqrt(tf.math.reduce_variance(features, axis=0) + 1e-4)
        loss += 25.0 * tf.reduce_mean(tf.nn.relu(1 - deviation))
        away = covariance(features)
        away -= tf.linalg.diag(tf.linalg.diag_part(away))
        loss += tf.reduce_sum(tf.square(away)) / features.shape[1]
    return loss


def barlow(network, x, y):
    """The correlation of the features of two views, as it is written for one device."""
    first, second = network(x), network(x + 0.3 * y)
    rows = tf.cast(tf.shape(first)[0], tf.float32)
    first = (first - tf.reduce_mean(first, axis=0)) / tf.math.reduce_std(first, axis=0)
    second = (second - tf.reduce_mean(second, axis=0)) / tf.math.reduce_std(second, axis=0)
    correlation = tf.matmul(first, second, transpose_a=True) / rows
    away = tf.square(correlation - tf.eye(first.shape[1]))
    return tf.reduce_sum(tf.linalg.diag_part(away)) + 0.1 * tf.reduce_sum(away)


def coral(network, x, y):
    """Wants features of two domains to have the same covariance; y is the other domain."""
    loss = tf.reduce_mean(tf.square(network(x) - x[:, :2]))
    away = covariance(network(x)) - covariance(network(y))
    return loss + tf.reduce_sum(tf.square(away)) / 16.0


# Losses of all pairs of rows gather the rows.


def predictive_coding():
    """Each row's future is to be found among the futures of all rows."""
    gathered = gather()

    def loss(network, x, y):
        past, future = gathered(network(x)), gathered(network(y))
        scores = tf.matmul(past, future, transpose_b=True)
        return tf.reduce_mean(tf.reduce_logsumexp(scores, axis=1) - tf.linalg.diag_part(scores))

    return Own(loss)


def hardest_rows():
    """Trains on the half of the batch with the largest losses."""
    gathered = gather()

    def loss(network, x, y):
        errors = gathered(tf.reduce_mean(tf.square(y - network(x)), axis=-1))
        return tf.reduce_mean(tf.math.top_k(errors, BATCH_SIZE // 2).values)

    return Own(loss)


def survival():
    """The partial likelihood of Cox: the risk set of an event is all rows that end later."""
    gathered = gather()

    def loss(network, x, y):
        risks, times = gathered(network(x)[:, 0]), gathered(y[:, 0])
        events = tf.cast(gathered(y[:, 1]) > -0.5, tf.float32)
        in_set = tf.where(times[None, :] >= times[:, None], 0.0, -1e9)
        partial = tf.reduce_logsumexp(risks[None, :] + in_set, axis=1) - risks
        return tf.reduce_sum(partial * events) / tf.reduce_sum(events)

    return Own(loss)


# Losses in layers.


class MeanPenalty(layers.Layer):
    """Adds the mean square of its inputs to the losses."""

    def call(self, x):
        self.add_loss(0.1 * ops.mean(ops.square(x)))
        return x


class PenaltyByRow(layers.Layer):
    """Adds a vector to the losses: one number for each row."""

    def call(self, x):
        self.add_loss(0.1 * ops.sum(ops.square(x), axis=-1))
        return x


class Switch(layers.Layer):
    """Two experts; the loss is the product of each one's share of rows and of chances."""

    def build(self, shape):
        self.router = layers.Dense(2)
        self.experts = [layers.Dense(3, "tanh"), layers.Dense(3, "tanh")]
        for each in (self.router, *self.experts):
            each.build(shape)

    def call(self, x):
        chances = ops.softmax(self.router(x))
        chosen = ops.one_hot(ops.argmax(chances, axis=-1), 2)
        balance = ops.mean(chosen, axis=0) * ops.mean(chances, axis=0)
        self.add_loss(0.5 * 2 * ops.sum(balance))
        outputs = ops.stack([each(x) for each in self.experts], axis=1)
        return ops.sum((chosen * chances)[:, :, None] * outputs, axis=1)


class MinibatchDeviation(layers.Layer):
    """Appends the mean standard deviation over the batch as one more feature."""

    def call(self, x):
        deviation = ops.mean(ops.sqrt(ops.var(x, axis=0) + 1e-8))
        return ops.concatenate([x, ops.ones_like(x[:, :1]) * deviation], axis=-1)


def around(layer) -> keras.Model:
    """Returns a network with the layer between two others."""
    inputs = keras.Input((4,))
    return keras.Model(inputs, layers.Dense(2)(layer(layers.Dense(3, "tanh")(inputs))))


def with_losses(network, x, y):
    """The loss of a step of one's own, with the losses of the layers."""
    return tf.reduce_mean(tf.square(y - network(x))) + sum(network.losses)


# Masks.


def steps(seed: int = 0) -> np.ndarray:
    """Returns padded sequences of 1 to 5 words: [24, 5] int32, 0 as padding."""
    lengths = numbers(seed + 100, NUM_STEPS, NUM_ROWS) + 1
    words = numbers(seed, 7, NUM_ROWS, NUM_STEPS) + 1
    return np.where(np.arange(NUM_STEPS) < lengths[:, None], words, 0).astype(np.int32)


def tags(classes: int = 3, share: float = 0.4) -> np.ndarray:
    """Returns a class for each step, and -1 for a share of them."""
    kept = normal(3, NUM_ROWS, NUM_STEPS) > share
    return np.where(kept, numbers(2, classes, NUM_ROWS, NUM_STEPS), -1).astype(np.int32)


def two_outputs() -> keras.Model:
    """Returns a network with classes and a number for each step, of which the second has a mask."""
    words = keras.Input((NUM_STEPS,), dtype="int32")
    free = layers.Embedding(8, 3)(words)
    masked = layers.Embedding(8, 3, mask_zero=True)(words)
    return keras.Model(
        words, {"tag": layers.Dense(3, name="tag")(free), "size": layers.Dense(1)(masked)}
    )


def masked_network() -> keras.Model:
    return keras.Sequential(
        [
            keras.Input((NUM_STEPS,), dtype="int32"),
            layers.Embedding(8, 3, mask_zero=True),
            layers.Dense(3),
        ]
    )


class Captioner(keras.Model):
    """Several captions of an image, each with a mask; the losses of all are added in one tape."""

    def __init__(self, num_captions=2):
        super().__init__()
        self.decoder, self.num_captions = masked_network(), num_captions
        self.loss_tracker = keras.metrics.Mean(name="loss")
        self.acc_tracker = keras.metrics.Mean(name="acc")
        self.built = True

    @property
    def metrics(self):
        return [self.loss_tracker, self.acc_tracker]

    def calculate_loss(self, y_true, y_pred, mask):
        loss = self.loss(y_true, y_pred)
        mask = tf.cast(mask, loss.dtype)
        return tf.reduce_sum(loss * mask) / tf.reduce_sum(mask)

    def calculate_accuracy(self, y_true, y_pred, mask):
        right = tf.equal(tf.cast(y_true, tf.int64), tf.argmax(y_pred, axis=2))
        right = tf.cast(tf.logical_and(mask, right), tf.float32)
        return tf.reduce_sum(right) / tf.reduce_sum(tf.cast(mask, tf.float32))

    def train_step(self, batch):
        captions, targets = batch
        batch_loss, batch_acc = 0.0, 0.0
        with tf.GradientTape() as tape:
            for index in range(self.num_captions):
                mask = tf.not_equal(captions[:, index], 0)
                answers = self.decoder(captions[:, index], training=True)
                batch_loss += self.calculate_loss(targets[:, index], answers, mask)
                batch_acc += self.calculate_accuracy(targets[:, index], answers, mask)
        weights = self.decoder.trainable_variables
        self.optimizer.apply_gradients(zip(tape.gradient(batch_loss, weights), weights))
        self.loss_tracker.update_state(batch_loss)
        self.acc_tracker.update_state(batch_acc / float(self.num_captions))
        return {"loss": self.loss_tracker.result(), "acc": self.acc_tracker.result()}


def captioned() -> tuple:
    captions = np.stack([steps(0), steps(1)], axis=1)
    return captions, numbers(5, 3, *captions.shape)


class Unreduced(Own):
    """A loss without reduction, whose mean over the labelled rows the step takes itself."""

    def __init__(self):
        super().__init__(None, outputs=3)
        self.entropy = keras.losses.SparseCategoricalCrossentropy(True, reduction="none")

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            labelled = tf.cast(y >= 0, tf.float32)
            losses = self.entropy(tf.maximum(y, 0), self.network(x, training=True))
            loss = tf.reduce_sum(losses * labelled) / tf.maximum(tf.reduce_sum(labelled), 1.0)
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply_gradients(zip(gradients, self.trainable_variables))
        self.loss_tracker.update_state(losses, sample_weight=labelled)
        return {"loss": self.loss_tracker.result()}


class LabelledOnly(Own):
    """Takes only the rows with labels out of the batch, by `tf.boolean_mask`."""

    def __init__(self):
        super().__init__(None, outputs=3)
        self.entropy = keras.losses.SparseCategoricalCrossentropy(from_logits=True)

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            answers = self.network(x, training=True)
            loss = self.entropy(tf.boolean_mask(y, y >= 0), tf.boolean_mask(answers, y >= 0))
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply_gradients(zip(gradients, self.trainable_variables))
        self.loss_tracker.update_state(loss)
        return {"loss": self.loss_tracker.result()}


def some_labels() -> tuple:
    """Returns rows, and classes of which about a third is missing: -1."""
    return normal(0, NUM_ROWS, 4), np.where(normal(1, NUM_ROWS) > 0.4, -1, numbers(2, 3, NUM_ROWS))


# The programs.


def pairs(outputs: int = 2):
    """Returns a function that makes x and y, to be used as `data`."""
    return lambda: (normal(0, NUM_ROWS, 4), normal(1, NUM_ROWS, outputs))


def sgd(learning_rate: float = 0.05, **others) -> dict:
    return {"optimizer": keras.optimizers.SGD(learning_rate, momentum=0.5), **others}


def ignoring(reduction: str = "sum_over_batch_size") -> keras.losses.Loss:
    return keras.losses.SparseCategoricalCrossentropy(True, ignore_class=-1, reduction=reduction)


def of_loss(name: str, source: str, loss, *, make=None, outputs=2, batch_size=6) -> Program:
    """Returns the program of a loss, with y of so many columns."""
    make = make or (lambda: Own(loss))
    return Program(name, source, make, pairs(outputs), sgd, batch_size=batch_size)


HANDBOOK = "tensorflow.org: custom training with tf.distribute.Strategy"
PROGRAMS = [
    of_loss("sum by x.shape[0]", "keras.io: guides/custom_train_step", by_static_rows),
    of_loss("sum by tf.shape(x)[0]", "tensorflow.org: custom training loops", by_dynamic_rows),
    of_loss(
        "sum by tf.shape(x)[0], uneven",
        "the same, where replicas have different numbers of rows",
        by_dynamic_rows,
        batch_size=7,
    ),
    of_loss("sum by a constant", HANDBOOK + ", with the batch size as a constant", by_constant),
    of_loss("compute_average_loss, default size", HANDBOOK, average_loss),
    of_loss("sum of the columns' means", "multi-task regression", means_of_columns),
    of_loss("weighted mean by hand", "importance sampling, self-normalized", weighted_by_hand),
    of_loss("weight decay by hand", "tf.nn.l2_loss of all weights", with_own_regularizer),
    of_loss("RMSE by hand", "tensorflow.org: regression, with the root of the mean", rmse),
    of_loss("RMSE by hand, uneven", "the same, with 7 rows a step", rmse, batch_size=7),
    of_loss("worst row", "Sagawa et al. 2019, arXiv:1911.08731", largest),
    of_loss("tilted loss", "Li et al. 2020, arXiv:2007.01162", soft_maximum),
    of_loss("standard deviation", "matching of moments, as in feature matching", spread),
    of_loss("concordance correlation", "Lin 1989; losses of affect recognition", concordance),
    of_loss("coefficient of determination", "1 - R2 as a loss", unexplained),
    of_loss(
        "focal loss by positives",
        "keras.io: Object Detection with RetinaNet; Lin et al. 2017, arXiv:1708.02002",
        focal,
    ),
    of_loss("class-balanced by batch", "Xie and Tu 2015, arXiv:1504.06375", balanced),
    of_loss(
        "entropy of the mean",
        "keras.io: Semantic Image Clustering; Van Gansbeke et al. 2020, arXiv:2005.12320",
        entropy_of_mean,
        outputs=4,
    ),
    of_loss(
        "mutual information",
        "Belghazi et al. 2018, arXiv:1801.04062",
        mutual_information,
        outputs=4,
        make=lambda: Own(mutual_information, inputs=6, outputs=1),
    ),
    of_loss("normalized returns", "Williams 1992; keras.io: Actor Critic", normalized_returns),
    of_loss(
        "PPO",
        "keras.io: Proximal Policy Optimization; Schulman et al. 2017, arXiv:1707.06347",
        clipped_policy,
    ),
    of_loss("VICReg", "Bardes et al. 2021, arXiv:2105.04906", vicreg, outputs=4),
    of_loss("Barlow twins, one device's", "keras.io: Barlow Twins", barlow, outputs=4),
    of_loss("deep CORAL", "Sun and Saenko 2016, arXiv:1607.01719", coral, outputs=4),
    Program(
        "contrastive predictive coding",
        "van den Oord et al. 2018, arXiv:1807.03748",
        predictive_coding,
        pairs(4),
        sgd,
    ),
    Program(
        "hardest rows", "Shrivastava et al. 2016, arXiv:1604.03540", hardest_rows, pairs(), sgd
    ),
    Program("survival", "Cox 1972; Katzman et al. 2018, DeepSurv", survival, pairs(), sgd),
    Program(
        "add_loss of a mean",
        "keras.io: Making new layers and models via subclassing",
        lambda: around(MeanPenalty()),
        pairs(),
        lambda: sgd(loss="mse", metrics=["mae"]),
    ),
    Program(
        "add_loss of a vector",
        "keras.io: The base Layer class, add_loss; Keras sums the vector",
        lambda: around(PenaltyByRow()),
        pairs(),
        lambda: sgd(loss="mse", metrics=["mae"]),
    ),
    Program(
        "switch transformer's balance",
        "keras.io: Text classification with Switch Transformer; Fedus et al. 2021",
        lambda: around(Switch()),
        pairs(),
        lambda: sgd(loss="mse"),
    ),
    Program(
        "minibatch standard deviation",
        "keras.io: Face image generation with StyleGAN; Karras et al. 2017, arXiv:1710.10196",
        lambda: around(MinibatchDeviation()),
        pairs(),
        lambda: sgd(loss="mse"),
    ),
    Program(
        "activity regularizer",
        "keras.io: Layer activation regularizers",
        lambda: network(activity_regularizer=keras.regularizers.L2(0.1)),
        pairs(),
        lambda: sgd(loss="mse"),
    ),
    Program(
        "weight regularizers",
        "keras.io: Layer weight regularizers",
        lambda: network(kernel_regularizer="l2", bias_regularizer="l1"),
        pairs(),
        lambda: sgd(loss="mse", metrics=["mae"]),
    ),
    Program(
        "weight regularizers, own step",
        "keras.io: Writing a training loop from scratch",
        lambda: Own(with_losses, kernel_regularizer="l2", bias_regularizer="l1"),
        pairs(),
        sgd,
    ),
    Program(
        "two outputs, two masks",
        "keras.io: guides/training_with_built_in_methods, with ignore_class and mask_zero",
        two_outputs,
        lambda: (steps(), {"tag": tags(), "size": normal(4, NUM_ROWS, NUM_STEPS, 1)}),
        lambda: sgd(loss={"tag": ignoring(), "size": "mse"}, loss_weights={"tag": 2, "size": 0.5}),
    ),
    Program(
        "mask and weights by step",
        "keras.io: guides/understanding_masking_and_padding, with a weight of each step",
        masked_network,
        lambda: (steps(), np.maximum(tags(), 0), np.exp(normal(4, NUM_ROWS, NUM_STEPS))),
        lambda: sgd(
            loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            weighted_metrics=["accuracy"],
        ),
    ),
    Program(
        "ignore_class and class weights",
        "keras.io: Imbalanced classification, with missing labels",
        lambda: network(outputs=3),
        some_labels,
        lambda: sgd(loss=ignoring()),
        fit={"class_weight": {0: 0.3, 1: 2.5, 2: 1.0}},
    ),
    Program(
        "ignore_class and sample weights",
        "keras.losses, with missing labels and a weight of each row",
        lambda: network(outputs=3),
        lambda: (*some_labels(), np.exp(normal(3, NUM_ROWS))),
        lambda: sgd(loss=ignoring()),
    ),
    Program(
        "ignore_class, uneven",
        "the same without weights, where replicas have different numbers of rows",
        lambda: network(outputs=3),
        some_labels,
        lambda: sgd(loss=ignoring()),
        batch_size=7,
    ),
    Program(
        "ignore_class, summed",
        'keras.losses, reduction="sum" with missing labels',
        lambda: network(outputs=3),
        some_labels,
        lambda: sgd(0.02, loss=ignoring("sum")),
    ),
    Program(
        "image captioning",
        "keras.io: Image Captioning",
        Captioner,
        captioned,
        lambda: sgd(
            loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction="none")
        ),
    ),
    Program(
        "no reduction, own mean",
        "tensorflow.org: neural machine translation with attention, loss_function",
        Unreduced,
        some_labels,
        sgd,
    ),
    Program(
        "labelled rows only",
        "semi-supervised learning with tf.boolean_mask",
        LabelledOnly,
        some_labels,
        sgd,
    ),
]
