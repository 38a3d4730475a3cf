"""A user's tf.custom_gradient in a step of Keras's own is right on replicas, or is refused."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from conftest import compiled

from tfaccel.common.errors import UserError
from tfaccel.step import functions

RNG = np.random.default_rng(0)
ROWS = RNG.normal(size=(6, 5)).astype("float32")
TARGETS = RNG.normal(size=(6, 1)).astype("float32")


@tf.custom_gradient
def of_batch(x):
    return tf.identity(x), lambda upstream: upstream / tf.norm(upstream)


@tf.custom_gradient
def of_each_row(x):
    def gradient(upstream):
        return upstream / (1e-3 + tf.norm(upstream, axis=-1, keepdims=True))

    return tf.identity(x), gradient


@tf.custom_gradient
def clipped(x):
    return tf.identity(x), lambda upstream: tf.clip_by_value(upstream, -0.02, 0.02)


@tf.custom_gradient
def scaled(x, scale):
    return x * scale, lambda upstream: (upstream * scale, tf.reduce_sum(upstream * x, 0))


class Own(keras.layers.Layer):
    def __init__(self, function):
        super().__init__()
        self.function = function
        self.scale = self.add_weight(shape=(7,), initializer="ones") if function is scaled else None

    def call(self, x):
        return self.function(x) if self.scale is None else self.function(x, self.scale)


def make(function):
    keras.utils.set_random_seed(0)
    layers = [keras.layers.Dense(7), Own(function), keras.layers.Dense(1)]
    return keras.Sequential([keras.Input((5,)), *layers])


def test_a_gradient_that_reduces_over_rows_is_refused():
    model = compiled(lambda: make(of_batch), 2, optimizer="sgd", loss="mse", xla=False)
    with pytest.raises(UserError, match="of_batch reduces over the rows of a batch"):
        model.train_on_batch(ROWS, TARGETS)


@pytest.mark.parametrize("function", [of_each_row, clipped, scaled])
def test_a_gradient_that_keeps_rows_apart_equals_one_device(function):
    model = compiled(lambda: make(function), 2, optimizer="sgd", loss="mse", xla=False)
    stock = make(function)
    stock.compile("sgd", "mse", jit_compile=False)
    model.train_on_batch(ROWS, TARGETS)
    assert model.train_function._step._join == functions.WITHIN
    stock.train_on_batch(ROWS, TARGETS)
    for own, wanted in zip(model.get_weights(), stock.get_weights(), strict=True):
        np.testing.assert_allclose(own, wanted, rtol=1e-4, atol=1e-6)
