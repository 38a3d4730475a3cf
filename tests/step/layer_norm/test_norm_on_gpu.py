"""Layer normalization by the kernels themselves, beside float64."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from own_kernels_cases import check_training_on_a_gpu

from tfaccel.keras_internals.product_bias import with_bias
from tfaccel.step.layer_norm.norm import normalized, normalized_sum

pytestmark = pytest.mark.gpu

TOLERANCE = {tf.bfloat16: 2**-8, tf.float16: 2**-11}  # of one rounding
SHAPES = [(25_216, 768), (4096, 96), (1000, 200), (7, 8), (1, 3080), (4, 33, 384), (300, 8192)]


def exact(x, gamma, beta, *, epsilon):
    mean, variance = tf.nn.moments(x, -1, keepdims=True)
    return (x - mean) / tf.sqrt(variance + epsilon) * gamma + beta


def with_gradients(function, x, gamma, beta, gradient, epsilon):
    with tf.GradientTape() as tape:
        tape.watch([x, gamma, beta])
        y = function(x, gamma, beta, epsilon=epsilon)
    return [y, *tape.gradient(y, [x, gamma, beta], output_gradients=gradient)]


@pytest.mark.parametrize(("mean", "epsilon"), [(0.0, 1e-6), (30.0, 1e-3)])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_beside_float64(dtype, shape, mean, epsilon):
    draw = np.random.default_rng(0)
    x, gradient = (tf.cast(tf.constant(draw.normal(e, size=shape)), dtype) for e in (mean, 0.0))
    weights = [tf.constant(draw.normal(size=shape[-1]), tf.float32) for _ in range(2)]

    @tf.function(jit_compile=True)
    def run(x, gamma, beta, gradient):
        return with_gradients(normalized, x, gamma, beta, gradient, epsilon)

    found = run(x, *weights, gradient)
    with tf.device("/cpu:0"):
        wide = [tf.cast(each, tf.float64) for each in (x, *weights, gradient)]
        wanted = with_gradients(exact, *wide, epsilon)
        # The moments of x are of float32, so that 30 has an error of 1e-5 at most beside them.
        limits = (TOLERANCE[dtype], TOLERANCE[dtype], 1e-4, 1e-4)
        for each, other, limit in zip(found, wanted, limits, strict=True):
            error = np.abs(tf.cast(each, tf.float64) - other).max() / np.abs(other).max()
            assert error <= limit


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_sum_beside_float64(dtype, shape):
    draw = np.random.default_rng(0)
    residual, product, *of_outputs = (
        tf.cast(tf.constant(draw.normal(size=shape)), dtype) for _ in range(4)
    )
    bias = tf.cast(tf.constant(draw.normal(size=shape[-1])), dtype)
    weights = [tf.constant(draw.normal(size=shape[-1]), tf.float32) for _ in range(2)]

    def found(function, given, of_outputs):
        with tf.GradientTape() as tape:
            tape.watch(given)
            outputs = function(given[:3], *given[3:], epsilon=1e-3)
        return [*outputs, *tape.gradient(outputs, given, output_gradients=of_outputs)]

    def own(terms, gamma, beta, *, epsilon):
        residual, product, bias = terms
        x = residual + with_bias(product, bias)
        return normalized_sum(x, terms, gamma, beta, epsilon=epsilon)

    def plain(terms, gamma, beta, *, epsilon):
        total = sum(terms)
        return total, exact(total, gamma, beta, epsilon=epsilon)

    @tf.function(jit_compile=True)
    def run(given, of_outputs):
        return found(own, given, of_outputs)

    made = run([residual, product, bias, *weights], of_outputs)
    with tf.device("/cpu:0"):
        wide = [tf.cast(each, tf.float64) for each in (residual, product, bias, *weights)]
        wanted = found(plain, wide, [tf.cast(each, tf.float64) for each in of_outputs])
        for each, other in zip(made, wanted, strict=True):
            error = np.abs(tf.cast(each, tf.float64) - other).max() / np.abs(other).max()
            assert error <= 2 * TOLERANCE[dtype]  # the sum is rounded, and what comes of it


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_extreme_numbers(dtype):
    """Rows of one value, of the largest numbers, and with a NaN, which stays in its row."""
    largest = float(dtype.max) / 2
    rows = [[5.0] * 8, [largest, -largest] * 4 if dtype == tf.float16 else [1e9, -1e9] * 4]
    x = tf.cast(tf.constant([*rows, [np.nan, *[1.0] * 7], [0.0] * 8]), dtype)

    @tf.function(jit_compile=True)
    def run(x, gamma, beta, gradient):
        return with_gradients(normalized, x, gamma, beta, gradient, 1e-3)

    y, of_x, _, of_beta = run(x, tf.ones(8), tf.zeros(8), tf.ones((4, 8), dtype))
    y, of_x = (tf.cast(each, tf.float32).numpy() for each in (y, of_x))
    np.testing.assert_allclose(y[[0, 3]], 0, atol=1e-6)
    np.testing.assert_allclose(y[1], [1.0, -1.0] * 4, rtol=2**-7)
    assert np.isnan(y[2]).all()
    np.testing.assert_allclose(of_x[[0, 1, 3]], 0, atol=1e-3)
    np.testing.assert_array_equal(of_beta, np.full(8, 4.0))


def classifier():
    """A pre-norm network of rows, whose sums are computed where they are normalized."""
    inputs = keras.Input((4, 8))
    hidden = keras.layers.Dense(64)(inputs)
    for _ in range(2):
        normed = keras.layers.LayerNormalization(epsilon=1e-6)(hidden)
        hidden = keras.layers.Add()([hidden, keras.layers.Dense(64, activation="gelu")(normed)])
        normed = keras.layers.LayerNormalization()(hidden)
        hidden = keras.layers.Add()([hidden, keras.layers.Dense(64)(normed)])
    hidden = keras.layers.Flatten()(keras.layers.LayerNormalization()(hidden))
    return keras.Model(inputs, keras.layers.Dense(4, dtype="float32")(hidden))


@pytest.mark.parametrize("precision", ["mixed_bfloat16", "mixed_float16"])
def test_training(precision, caplog):
    draw = np.random.default_rng(0)
    x = draw.normal(size=(512, 4, 8)).astype("f4")
    y = (x.reshape(512, 32) @ draw.normal(size=(32, 4))).argmax(1)
    what = "layer normalizations"
    check_training_on_a_gpu(classifier, x, y, precision, what, caplog, rtol=3e-2)
