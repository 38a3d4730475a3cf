"""GELU as a traced step has it against float64."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from outputs_and_gradients import with_gradients

from tfaccel.keras_internals.gelu import gelu
from tfaccel.keras_internals.layer_paths import layer_paths

X = np.concatenate([np.linspace(-12, 12, 4001), [-1e4, 0.0, 1e4]])


def exact(x, approximate):
    """In float64. TensorFlow's own rounds its constants to float32."""
    if approximate:
        return 0.5 * x * (1 + tf.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))
    return 0.5 * x * (1 + tf.math.erf(x * np.sqrt(0.5)))


def in_float64(function, x):
    """The function's outputs and gradients, computed in the dtype of x."""
    return [tf.cast(each, tf.float64).numpy() for each in with_gradients(function, x)]


@pytest.mark.parametrize("approximate", [False, True])
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [("float64", 1e-12), ("float32", 1e-5), ("float16", 2e-3)]
)
def test_alike_float64(dtype, tolerance, approximate):
    x = tf.constant(X, dtype)
    found = in_float64(lambda x: gelu(x, approximate), x)
    wide = tf.cast(x, tf.float64)
    wanted = in_float64(lambda x: exact(x, approximate), wide)
    for each, other in zip(found[:2], wanted[:2], strict=True):
        np.testing.assert_allclose(each, other, rtol=tolerance, atol=tolerance)
    if dtype != "float16":
        np.testing.assert_allclose(found[2], wanted[2], atol=tolerance * 10)


def test_no_error_larger_than_tensorflows():
    x = tf.constant(X[np.abs(X) < 20], tf.bfloat16)
    wide = tf.cast(x, tf.float64)
    wanted = in_float64(lambda x: exact(x, False), wide)
    own = in_float64(lambda x: gelu(x, False), x)
    theirs = in_float64(lambda x: tf.nn.gelu(x, approximate=False), x)
    for index in (0, 1):
        error = np.abs(own[index] - wanted[index]).max()
        assert error <= np.abs(theirs[index] - wanted[index]).max()


def test_a_step_has_it():
    layer = keras.layers.Dense(3, activation="gelu")
    layer.build((2, 4))

    @tf.function(autograph=False)
    def run(x):
        with layer_paths(xla=True, all_reduce=None):
            return layer(x)

    x = np.random.default_rng(0).normal(size=(2, 4)).astype("float32")
    np.testing.assert_allclose(run(x), layer(x), rtol=1e-6, atol=1e-6)
    graph = run.get_concrete_function(x).graph
    assert "IdentityN" in {each.type for each in graph.get_operations()}  # of a custom gradient
