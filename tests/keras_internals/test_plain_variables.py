"""Plain `tf.Variable`s of a model and its layers: each replica reads and assigns its own."""

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


class Scaled(keras.layers.Dense):
    """Has variables in an attribute, a list and a dict."""

    def __init__(self):
        super().__init__(1, kernel_initializer="ones")
        self.scale = tf.Variable(2.0, trainable=False)
        self.others = [tf.Variable(1.0, trainable=False), {"deep": tf.Variable(3.0)}]

    def call(self, x):
        return super().call(x) * self.scale + self.others[0] * self.others[1]["deep"]


class Counts(keras.Model):
    """Counts its steps in a plain variable, and changes those of its layer."""

    def __init__(self):
        super().__init__()
        self.dense = Scaled()
        self.dense.build((None, 2))
        self.count = tf.Variable(0, trainable=False)
        self.built = True

    def call(self, x):
        return self.dense(x)

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(self(x) - y))
        weights = self.dense.trainable_variables
        self.optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights, strict=True))
        self.count.assign_add(1)
        self.dense.scale.assign(0.5 * self.dense.scale)
        self.dense.others[1]["deep"].assign_sub(1.0)
        return {"loss": loss, "count": self.count}


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
    logs = model.fit(X, X[:, :1], batch_size=6, shuffle=False, verbose=0).history
    plain = [model.count, model.dense.scale, model.dense.others[1]["deep"]]
    found = [logs["loss"][0], logs["count"][0], np.array(model.dense.kernel)]
    for index in range(max(1, num_replicas)):
        each = [value.values[index] if num_replicas else value for value in plain]
        found.append([value.numpy() for value in each])
    return found


@pytest.mark.parametrize(
    ("num_replicas", "xla"),
    [
        (2, True),
        pytest.param(1, True, marks=pytest.mark.slow),
        pytest.param(2, False, marks=pytest.mark.slow),
        pytest.param(3, True, marks=pytest.mark.slow),
    ],
)
def test_a_replica_has_its_own_plain_variables(num_replicas, xla):
    *wanted, plain = trained(0, xla=False)
    assert wanted[1] == 3
    found = trained(num_replicas, xla=xla)
    for value, expected in zip(found, wanted + [plain] * num_replicas, strict=True):
        np.testing.assert_allclose(value, expected, rtol=1e-5)
