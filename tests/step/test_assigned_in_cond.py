"""A step that assigns untrained variables within `tf.cond` or `tf.while_loop`."""

import contextlib

import keras
import numpy as np
import pytest
import tensorflow as tf
from conftest import strategy_of

from tfaccel.config import StepConfig
from tfaccel.runtime.cluster import Cluster
from tfaccel.step import compile_model
from tfaccel.training import methods

X = np.arange(36, dtype=np.float32).reshape(18, 2) / 40
Y = X[:, :1]


class Counts(keras.Model):
    """Keeps the mean of the rows of every other step, and counts in a loop."""

    def __init__(self):
        super().__init__()
        self.dense = keras.layers.Dense(1, kernel_initializer="ones")
        self.dense.build((None, 2))
        self.steps = self.add_weight(shape=(), dtype="int32", trainable=False, initializer="zeros")
        self.mean = self.add_weight(shape=(2,), trainable=False, initializer="zeros")
        self.loops = self.add_weight(shape=(), dtype="int32", trainable=False, initializer="zeros")
        self.built = True

    def call(self, x):
        return self.dense(x)

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(self(x) - y))
        weights = self.dense.trainable_variables
        self.optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights, strict=True))

        def keep_mean():
            self.mean.assign(0.5 * self.mean + tf.reduce_mean(x, axis=0))

        def count(index):
            self.loops.assign_add(1)
            return index + 1

        tf.cond(tf.equal(self.steps % 2, 0), keep_mean, lambda: None)
        tf.while_loop(lambda index: index < 3, count, [tf.constant(0)])
        self.steps.assign_add(1)
        return {"loss": loss}


def trained(num_replicas, *, xla):
    if num_replicas == 0:
        model = Counts()
        model.compile("sgd", jit_compile=False)
    else:
        strategy = strategy_of(num_replicas)
        with strategy.scope():
            model = Counts()
        compile_model(model, strategy, StepConfig(), xla=xla, optimizer="sgd")
        methods.extend(model, StepConfig(), guard=contextlib.nullcontext, cluster=Cluster())
    model.fit(X, Y, batch_size=6, epochs=1, shuffle=False, verbose=0)
    return [np.array(each) for each in (model.steps, model.mean, model.loops, model.dense.kernel)]


@pytest.mark.parametrize(
    ("num_replicas", "xla"),
    [
        (2, True),
        pytest.param(1, False, marks=pytest.mark.slow),
        pytest.param(1, True, marks=pytest.mark.slow),
        pytest.param(2, False, marks=pytest.mark.slow),
        pytest.param(3, False, marks=pytest.mark.slow),
    ],
)
def test_variables_assigned_in_a_branch_are_those_of_stock_keras(num_replicas, xla):
    wanted = trained(0, xla=False)
    assert (wanted[0], wanted[2]) == (3, 9)
    assert wanted[1].min() > 0.1
    for value, expected in zip(trained(num_replicas, xla=xla), wanted, strict=True):
        np.testing.assert_allclose(value, expected, rtol=1e-5)
