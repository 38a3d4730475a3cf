"""Steps that compute with results of metrics: as stock Keras on one device.

The batches have 7, 3 and 1 rows, so replicas and parts differ in size, and some have no row. Sums
of float32 in another order differ by roundings: RTOL allows for some of them.
"""

import functools
import itertools

import keras
import numpy as np
import pytest
import tensorflow as tf
from conftest import compiled
from keras import layers, ops

from tfaccel.config import StepConfig

RTOL = 2e-5
RNG = np.random.default_rng(0)
X = RNG.normal(size=(11, 4)).astype("float32")
Y = (RNG.random((11, 1)) > 0.4).astype("float32")
SIZES = 7, 3, 1


class Fading(keras.metrics.Metric):
    """Needs all rows of a batch."""

    def __init__(self):
        super().__init__(name="fading")
        self.average = self.add_weight(name="average", initializer="ones")

    def reset_state(self):
        self.average.assign(1.0)

    def update_state(self, y_true, y_pred):
        self.average.assign(self.average / 2 + ops.mean(ops.abs(y_true - y_pred)) ** 2)

    def result(self):
        return self.average


class Largest(keras.metrics.Metric):
    """Starts below every value."""

    merge_state = "max"

    def __init__(self):
        super().__init__(name="largest")
        self.best = self.add_weight(name="best", initializer=keras.initializers.Constant(-9.0))

    def reset_state(self):
        self.best.assign(-9.0)

    def update_state(self, y_true, y_pred):
        self.best.assign(ops.maximum(self.best, ops.max(ops.abs(y_true - y_pred))))

    def result(self):
        return self.best + 0


class Moments(Largest):
    """Merges by a method; its result is a dict."""

    def __init__(self):
        super().__init__()
        self.name = "moments"
        self.rows = keras.metrics.Sum()

    def reset_state(self):
        self.best.assign(0.0)
        self.rows.reset_state()

    def update_state(self, y_true, y_pred):
        self.rows.update_state(ops.ones_like(y_true))
        self.best.assign_add(ops.sum((y_true - y_pred) ** 3))

    def merge_state(self, metrics):
        for each in metrics:
            self.rows.update_state(each.rows.result())
            self.best.assign_add(each.best + 0)

    def result(self):
        return {"third": ops.divide_no_nan(self.best, self.rows.result())}


class Deriving(keras.Model):
    """Logs what it computes from results, and trains with a rate that is one."""

    def __init__(self):
        super().__init__()
        keras.utils.set_random_seed(0)
        self.network = keras.Sequential([keras.Input((4,)), layers.Dense(1, "sigmoid")])
        self.built = True
        self.loss_tracker = keras.metrics.Mean(name="loss")
        self.mse = keras.metrics.MeanSquaredError(name="mse")
        self.precision = keras.metrics.Precision(name="precision")
        self.recall = keras.metrics.Recall(name="recall")
        self.own = [Fading(), Largest(), Moments()]

    @property
    def metrics(self):
        return [self.loss_tracker, self.mse, self.precision, self.recall, *self.own]

    def call(self, x):
        return self.network(x)

    def counted(self, y, y_pred):
        for each in (self.mse, self.precision, self.recall, *self.own):
            each.update_state(y, y_pred)
        precision, recall = self.precision.result(), self.recall.result()
        fading, largest, moments = (each.result() for each in self.own)
        return {
            "loss": tf.exp(self.loss_tracker.result()),
            "mse": self.mse.result(),
            "rmse": tf.sqrt(self.mse.result()),
            "f1": 2 * tf.math.divide_no_nan(precision * recall, precision + recall),
            "fading": fading,
            "root": tf.sqrt(fading),
            "square": largest**2,
            "third_root": tf.abs(moments["third"]) ** (1 / 3),
        }

    def train_step(self, data):
        x, y = data[:2]
        with tf.GradientTape() as tape:
            y_pred = self(x, training=True)
            loss = tf.reduce_mean((y - y_pred) ** 2)
        self.loss_tracker.update_state(loss)
        self.optimizer.learning_rate.assign(0.1 + self.loss_tracker.result() ** 2)
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply_gradients(zip(gradients, self.trainable_variables, strict=True))
        return self.counted(y, y_pred)

    def test_step(self, data):
        x, y = data[:2]
        y_pred = self(x)
        self.loss_tracker.update_state(tf.reduce_mean((y - y_pred) ** 2))
        return self.counted(y, y_pred)


class Scored(Deriving):
    """A step of Keras's own; `compute_metrics` adds what it computes from a result."""

    train_step, test_step = keras.Model.train_step, keras.Model.test_step

    @property
    def metrics(self):
        return [self._loss_tracker, self.mse]

    def compute_metrics(self, x, y, y_pred, sample_weight=None):
        self.mse.update_state(y, y_pred)
        results = super().compute_metrics(x, y, y_pred, sample_weight)
        return results | {"rmse": tf.sqrt(results["mse"])}


class Overridden(Scored):
    """`get_metrics_result` adds it; stock Keras's step logs it as it is."""

    compute_metrics = keras.Model.compute_metrics

    def compute_loss(self, x, y, y_pred, sample_weight=None, training=True):
        self.mse.update_state(y, y_pred)
        return super().compute_loss(x, y, y_pred, sample_weight, training)

    def get_metrics_result(self):
        results = super().get_metrics_result()
        return results | {"rmse": tf.sqrt(results["mse"])}


def batches():
    ends = np.cumsum((0, *SIZES))
    return [(X[a:b], Y[a:b]) for a, b in itertools.pairwise(ends)]


def results(model):
    logs = []
    for _ in range(2):
        model.reset_metrics()
        logs += [model.train_on_batch(*each, return_dict=True) for each in batches()]
    model.reset_metrics()
    logs += [model.test_on_batch(*each, return_dict=True) for each in batches()]
    weights = [keras.ops.convert_to_numpy(each) for each in model.trainable_variables]
    return logs, [*weights, float(model.optimizer.learning_rate)]


@functools.cache
def wanted(make):
    model = make()
    model.compile(keras.optimizers.SGD(0.1), loss="mse", run_eagerly=True)
    return results(model)


def assert_as_on_one_device(make, num_replicas, *, parts=1, **settings):
    config = StepConfig(accumulation_steps=parts)
    optimizer = functools.partial(keras.optimizers.SGD, 0.1)
    settings = {"xla": False, "loss": "mse", **settings}
    model = compiled(make, num_replicas, config=config, optimizer=optimizer, **settings)
    logs, weights = results(model)
    for number, (ours, theirs) in enumerate(zip(logs, wanted(make)[0], strict=True)):
        for name, value in theirs.items():
            if (num_replicas, name in ("fading", "root")) == (1, True):
                continue  # one replica updates such a metric part by part (README.md)
            message = f"{name} of step {number}"
            np.testing.assert_allclose(ours[name], value, rtol=RTOL, err_msg=message)
    for ours, theirs in zip(weights, wanted(make)[1], strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=RTOL, atol=RTOL)
    return model


SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    ("num_replicas", "parts"),
    [(2, 1), *(pytest.param(*each, marks=SLOW) for each in [(3, 1), (1, 2), (2, 2), (3, 2)])],
)
def test_own_step(num_replicas, parts):
    assert_as_on_one_device(Deriving, num_replicas, parts=parts)


@pytest.mark.parametrize(
    "make", [pytest.param(Scored, marks=SLOW), pytest.param(Overridden, marks=SLOW)]
)
@pytest.mark.parametrize(("num_replicas", "parts"), [(3, 1), (2, 2)])
def test_step_of_keras(make, num_replicas, parts):
    assert_as_on_one_device(make, num_replicas, parts=parts)


@pytest.mark.parametrize(
    ("make", "num_replicas", "parts"),
    [
        (Scored, 2, 1),
        *(
            pytest.param(*each, marks=SLOW)
            for each in [
                (Deriving, 2, 1),
                (Deriving, 2, 2),
                (Scored, 3, 2),
                (Scored, 1, 2),
                (Overridden, 2, 1),
                (Overridden, 2, 2),
            ]
        ),
    ],
)
def test_eagerly(make, num_replicas, parts):
    assert_as_on_one_device(make, num_replicas, parts=parts, run_eagerly=True)


@pytest.mark.slow
def test_in_one_function(in_one_function):
    assert_as_on_one_device(Deriving, 2, xla=True)
