"""A step that raises leaves nothing behind: a right step that is traced afterwards trains."""

import contextlib

import keras
import numpy as np
import pytest
import tensorflow as tf
from conftest import strategy_of

from tfaccel.config import StepConfig
from tfaccel.keras_internals.symbolic_build import _trace_once
from tfaccel.runtime.cluster import Cluster
from tfaccel.step import compile_model
from tfaccel.training import methods


class FailedError(Exception):
    """What the step raises."""


def fail(*_):
    raise FailedError


RAISES = {
    "map_fn": lambda x: tf.map_fn(fail, x),
    "scan": lambda x: tf.scan(fail, x),
    "foldl": lambda x: tf.foldl(fail, x),
    "while_loop": lambda x: tf.while_loop(lambda i: i < 3, fail, [tf.constant(0)]),
    "cond": lambda x: tf.cond(x[0, 0] > 0, fail, fail),
}


class Steps(keras.Model):
    """Raises an error within a function of TensorFlow, until `raises` is None."""

    def __init__(self, raises):
        super().__init__()
        self.raises, self.dense = raises, keras.layers.Dense(1)

    def call(self, x):
        return self.dense(x)

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(self(x) - y))
            if self.raises is not None:
                self.raises(x)
        weights = self.dense.trainable_variables
        self.optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights, strict=True))
        return {"loss": loss}


def compiled(raises):
    strategy = strategy_of(1)
    with strategy.scope():
        model = Steps(raises)
    compile_model(model, strategy, StepConfig(), xla=False, optimizer="sgd")
    methods.extend(model, StepConfig(), guard=contextlib.nullcontext, cluster=Cluster())
    return model


def leaves_all_as_it_was():
    assert tf.compat.v1.get_variable_scope().caching_device is None
    assert not tf.distribute.has_strategy()
    with strategy_of(1).scope():
        keras.Variable(1.0)
    x = np.ones((6, 2), np.float32)
    model = compiled(None)
    assert model.fit(x, x[:, :1], batch_size=6, verbose=0).history["loss"][0] >= 0


@pytest.mark.parametrize(
    "raises",
    [
        pytest.param(each, id=name, marks=[] if name == "map_fn" else pytest.mark.slow)
        for name, each in RAISES.items()
    ],
)
def test_a_trace_that_fails_leaves_nothing_behind(raises):
    _trace_once(compiled(raises), (tf.zeros([6, 2]), tf.zeros([6, 1])))
    leaves_all_as_it_was()


def test_a_step_that_fails_in_fit_leaves_nothing_behind():
    x = np.ones((6, 2), np.float32)
    with pytest.raises(FailedError):
        compiled(RAISES["map_fn"]).fit(x, x[:, :1], batch_size=6, verbose=0)
    leaves_all_as_it_was()


def test_a_layer_may_be_built_within_a_map():
    x = np.ones((6, 2), np.float32)
    inner = keras.layers.Dense(1, kernel_initializer="ones")
    model = compiled(lambda x: tf.map_fn(lambda row: inner(row[None])[0], x))
    model.inner = inner
    model.fit(x, x[:, :1], batch_size=6, verbose=0)
    np.testing.assert_array_equal(inner.kernel, [[1], [1]])
