"""GELU by the kernels themselves, beside float64 and beside XLA's."""

import functools

import keras
import numpy as np
import pytest
import tensorflow as tf
from own_kernels_cases import check_training_on_a_gpu

from tfaccel.keras_internals.product_bias import with_bias
from tfaccel.step.gelu.gelu import bias_gelu

pytestmark = pytest.mark.gpu

# Of one rounding to the dtype, and of the polynomial.
TOLERANCE = {tf.bfloat16: 2**-8, tf.float16: 2**-11 + 1e-4}
SHAPES = [(25_216, 3072), (2048, 1536), (1000, 200), (7, 8), (1, 3080), (4, 33, 384)]


def exact(x, approximate):
    if approximate:
        return 0.5 * x * (1 + tf.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))
    return 0.5 * x * (1 + tf.math.erf(x * np.sqrt(0.5)))


def by_kernels(approximate, x, bias):
    return bias_gelu(with_bias(x, bias), x, bias, approximate=approximate)


def with_gradients(function, x, bias, gradient):
    with tf.GradientTape() as tape:
        tape.watch([x, bias])
        y = function(x, bias)
    return [y, *tape.gradient(y, [x, bias], output_gradients=gradient)]


@pytest.mark.parametrize("approximate", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_beside_float64(dtype, shape, approximate):
    draw = np.random.default_rng(0)
    x, bias, gradient = (
        tf.cast(tf.constant(draw.normal(size=each) * 2, tf.float32), dtype)
        for each in (shape, shape[-1:], shape)
    )

    @tf.function(jit_compile=True)
    def run(x, bias, gradient):
        return with_gradients(functools.partial(by_kernels, approximate), x, bias, gradient)

    found = run(x, bias, gradient)
    with tf.device("/cpu:0"):
        wide = [tf.cast(each, tf.float64) for each in (x, bias, gradient)]
        wanted = with_gradients(lambda x, b: exact(x + b, approximate), *wide)
        rows = np.prod(shape[:-1])
        # The last is a sum over the rows.
        for each, other, size in zip(found, wanted, (1, 4, rows**0.5 * 4), strict=True):
            error = np.abs(tf.cast(each, tf.float64) - other) / np.maximum(np.abs(other), size)
            assert error.max() <= TOLERANCE[dtype]


@pytest.mark.parametrize("approximate", [False, True])
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_extreme_numbers(dtype, approximate):
    """Zeros, the largest numbers, and a NaN, which stays where it is."""
    largest = float(dtype.max)
    x = tf.cast(tf.constant([[0.0, -largest, largest, -1e4, 1e4, np.nan, -9.0, 9.0]]), dtype)

    @tf.function(jit_compile=True)
    def run(x, bias, gradient):
        return with_gradients(functools.partial(by_kernels, approximate), x, bias, gradient)

    y, of_x, of_bias = run(x, tf.zeros(8, dtype), tf.ones((1, 8), dtype))
    y, of_x = (tf.cast(each, tf.float32).numpy()[0] for each in (y, of_x))
    wide = tf.cast(x, tf.float32).numpy()[0]
    np.testing.assert_allclose(y, np.maximum(wide, 0), atol=1e-6)
    np.testing.assert_allclose(of_x, np.where(wide == 0, 0.5, wide > 0) + 0 * y, atol=1e-6)
    assert np.isnan(tf.cast(of_bias, tf.float32).numpy()[5])


def classifier():
    inputs = keras.Input((32,))
    hidden = keras.layers.Dense(256, activation="gelu")(inputs)
    hidden = keras.layers.Activation("gelu")(keras.layers.Dense(64)(hidden))
    return keras.Model(inputs, keras.layers.Dense(4, dtype="float32")(hidden))


@pytest.mark.parametrize("precision", ["mixed_bfloat16", "mixed_float16"])
def test_training(precision, caplog):
    draw = np.random.default_rng(0)
    x = draw.normal(size=(512, 32)).astype("f4")
    y = (x @ draw.normal(size=(32, 4))).argmax(1)
    check_training_on_a_gpu(classifier, x, y, precision, "GELU", caplog, rtol=2e-2)
