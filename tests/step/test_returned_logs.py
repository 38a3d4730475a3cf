"""Logs that a `train_step` returns: what stock Keras takes is taken here, on 1 and 2 replicas."""

import contextlib

import keras
import numpy as np
import pytest
import tensorflow as tf
from conftest import strategy_of

from tfaccel.common.errors import UserError
from tfaccel.config import StepConfig
from tfaccel.runtime.cluster import Cluster
from tfaccel.step import compile_model
from tfaccel.training import methods

X = np.arange(12, dtype=np.float32).reshape(6, 2) / 10
Y = X[:, :1]


class Returns(keras.Model):
    """Returns logs of every kind."""

    def __init__(self, logs):
        super().__init__()
        self.logs, self.dense = logs, keras.layers.Dense(1, kernel_initializer="ones")
        self.count = self.add_weight(shape=(), trainable=False, initializer="ones")
        self.own = keras.metrics.Mean(name="mine")
        self.build((None, 2))

    def call(self, x):
        return self.dense(x)

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(self(x) - y))
        weights = self.dense.trainable_variables
        self.optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights, strict=True))
        self.own.update_state(loss + 1)
        return self.logs(self, loss)


def every_kind(model, loss):
    """Returns a log of each kind that is the same on every number of replicas."""
    return {
        "loss": loss,
        "mine": model.own.result(),
        "variable": model.count,
        "rate": model.optimizer.learning_rate,
        "number": 2.5,
        "whole": 3,
        "bool": True,
        "numpy": np.float64(1.5),
        "numpy vector": np.ones(3, np.float32),
        "int64": tf.constant(7, tf.int64),
        "tensor bool": tf.constant(True),
        "nothing": None,
        "text": "hello",
        "nested": {"a": loss * 2, "b": {"c": model.count, "d": None}},
    }


def last_logs(logs, num_replicas, *, xla=False, jit_compile=False):
    """Returns the last epoch's logs; of stock Keras for no replicas."""
    if num_replicas == 0:
        model = Returns(logs)
        model.compile("sgd", jit_compile=jit_compile)
    else:
        strategy = strategy_of(num_replicas)
        with strategy.scope():
            model = Returns(logs)
        compile_model(model, strategy, StepConfig(), xla=xla, optimizer="sgd")
        methods.extend(model, StepConfig(), guard=contextlib.nullcontext, cluster=Cluster())
    history = model.fit(X, Y, batch_size=6, epochs=2, shuffle=False, verbose=0).history
    return {name: values[-1] for name, values in history.items()}


@pytest.mark.parametrize(
    ("num_replicas", "xla"),
    [
        (1, True),
        (2, False),
        pytest.param(1, False, marks=pytest.mark.slow),
        pytest.param(2, True, marks=pytest.mark.slow),
    ],
)
def test_logs_of_every_kind_are_those_of_stock_keras(num_replicas, xla):
    wanted = last_logs(every_kind, 0)
    found = last_logs(every_kind, num_replicas, xla=xla)
    assert wanted["loss"] > 0.01  # a metric's empty mean would be 0
    assert set(wanted) <= set(found)
    for name, value in wanted.items():
        if value is None or name == "text":
            assert found[name] == value, name
        else:
            np.testing.assert_allclose(found[name], value, rtol=1e-5, err_msg=name)


def ragged(model, loss):
    return {"rows": tf.ragged.constant([[1.0], [2.0, 3.0]]) + model.count * 0}


@pytest.mark.slow
@pytest.mark.parametrize("xla", [False, True])
def test_a_ragged_log_is_that_of_stock_keras_on_one_replica(xla):
    np.testing.assert_array_equal(
        last_logs(ragged, 1, xla=xla)["rows"], last_logs(ragged, 0)["rows"]
    )


@pytest.mark.slow
def test_a_log_that_cannot_be_summed_over_replicas_says_so():
    with pytest.raises(UserError, match="the log 'rows', a RaggedTensor of float32"):
        last_logs(ragged, 2)
    with pytest.raises(UserError, match="the log 'text', a tensor of string"):
        last_logs(lambda model, loss: {"text": tf.constant("a")}, 2)
