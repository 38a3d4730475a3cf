"""Metrics and logs of a step in parts, of which each has other rows: as stock Keras on one device.

The batches have 7, 3 and 1 rows. So parts and replicas differ in size, and some have no row. Sums
of float32 in another order differ by roundings: RTOL allows for some of them.
"""

import functools

import keras
import numpy as np
import pytest
import tensorflow as tf
from conftest import compiled
from keras import layers, ops

from tfaccel.config import StepConfig

RTOL = 1e-5
RNG = np.random.default_rng(0)
X = RNG.normal(size=(11, 4)).astype("float32")
Y = (np.arange(11) + RNG.normal(size=11)).astype("float32")[:, None]  # no part is like another
SIZES = 7, 3, 1


class Fading(keras.metrics.Metric):
    """Its own rule of the mean of a batch: the parts of a batch would give another one."""

    def __init__(self):
        super().__init__(name="fading")
        self.average = self.add_weight(name="average", initializer="zeros")

    def update_state(self, y_true, y_pred, sample_weight=None):
        self.average.assign(self.average / 2 + ops.mean(ops.abs(y_true - y_pred)))

    def result(self):
        return self.average + 0.0


class Traced(layers.Layer):
    """A dense layer that tracks one number of its rows, and adds it to the loss."""

    def __init__(self):
        super().__init__()
        self.dense = layers.Dense(1, kernel_initializer="ones")
        self.size = keras.metrics.Mean(name="size")

    def call(self, x):
        y = self.dense(x)
        mean = ops.mean(ops.abs(y))
        self.size.update_state(mean)
        self.add_loss(0.1 * mean)
        return y


class Tracking(keras.Model):
    """A model whose step is Keras's own, with a tracker in `compute_loss`."""

    def __init__(self):
        super().__init__()
        self.traced = Traced()
        self.seen = keras.metrics.Mean(name="seen")

    def call(self, x):
        return self.traced(x)

    def compute_loss(self, *args, **kwargs):
        loss = super().compute_loss(*args, **kwargs)
        self.seen.update_state(loss)
        return loss


class OwnStep(Tracking):
    """A step of its own, whose logs have other names than the metrics."""

    def train_step(self, data):
        x, y, _ = keras.utils.unpack_x_y_sample_weight(data)
        with tf.GradientTape() as tape:
            y_pred = self(x, training=True)
            loss = tf.reduce_mean(tf.square(y - y_pred)) + sum(self.losses)
        weights = self.trainable_variables
        self.optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights, strict=True))
        self.seen.update_state(loss)
        return {"mine": self.seen.result(), "value": loss, **self.more_logs(y, y_pred)}

    def more_logs(self, y, y_pred):
        return {}


class AfterTheUpdate(OwnStep):
    """Its step reads weights after the update, so values are joined within it."""

    def __init__(self):
        super().__init__()
        self.slow = self.add_weight(shape=(4, 1), trainable=False, initializer="zeros")
        self.mae = keras.metrics.MeanAbsoluteError(name="mae")
        self.fading = Fading()

    def more_logs(self, y, y_pred):
        self.slow.assign(0.5 * self.slow + 0.5 * self.traced.dense.kernel)
        self.mae.update_state(y, y_pred)
        self.fading.update_state(y, y_pred)
        return {"error": self.mae.result(), "faded": self.fading.result()}


def trained(model):
    """Returns the logs after each batch, of all batches so far, and the weights."""
    logs, start = [], 0
    for size in SIZES:
        batch = X[start : start + size], Y[start : start + size]
        logs.append(model.train_on_batch(*batch, return_dict=True))
        start += size
    weights = [keras.ops.convert_to_numpy(each) for each in model.weights]
    return {name: [float(each[name]) for each in logs] for name in logs[0]}, weights


def compile_args(kind):
    return {"loss": "mse", "metrics": [Fading(), "mae"]} if kind is Tracking else {}


@functools.cache
def wanted(kind):
    keras.utils.set_random_seed(0)
    model = kind()
    model.compile(keras.optimizers.SGD(0.01), run_eagerly=True, **compile_args(kind))
    return trained(model)


def slow(*case):
    return pytest.param(*case, marks=pytest.mark.slow)


@pytest.mark.parametrize(
    ("kind", "num_replicas", "parts", "xla"),
    [
        (OwnStep, 2, 2, True),
        (AfterTheUpdate, 2, 2, False),
        *(
            slow(kind, *each)
            for kind in (Tracking, OwnStep, AfterTheUpdate)
            for each in [
                (1, 2, False),
                (1, 2, True),
                (2, 1, False),
                (2, 2, False),
                (2, 2, True),
                (2, 3, False),
                (3, 2, False),
                (3, 3, True),
            ]
            if (kind, *each)
            not in [
                (OwnStep, 2, 2, True),
                (AfterTheUpdate, 2, 2, False),
            ]
        ),
    ],
)
def test_trackers_and_logs_are_those_of_the_whole_batch(kind, num_replicas, parts, xla):
    def make():
        keras.utils.set_random_seed(0)
        return kind()

    model = compiled(
        make,
        num_replicas,
        optimizer=keras.optimizers.SGD(0.01),
        xla=xla,
        config=StepConfig(accumulation_steps=parts),
        **compile_args(kind),
    )
    (logs, weights), (wanted_logs, wanted_weights) = trained(model), wanted(kind)
    assert set(wanted_logs) <= set(logs)
    for name, values in wanted_logs.items():
        if name.startswith("fad") and num_replicas == 1:
            continue  # part by part, as the README says
        np.testing.assert_allclose(logs[name], values, rtol=RTOL, err_msg=name)
    for value, expected in zip(weights, wanted_weights, strict=True):
        np.testing.assert_allclose(value, expected, rtol=RTOL, atol=1e-6)
