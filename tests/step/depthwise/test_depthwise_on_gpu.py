"""Depthwise convolutions by tfaccel's kernels on a GPU, beside float64 and beside XLA's own."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from own_kernels_cases import check_training_on_a_gpu

from tfaccel.step.depthwise import calls
from tfaccel.step.depthwise.calls import Depthwise
from tfaccel.step.depthwise.depthwise import convolved

pytestmark = pytest.mark.gpu

TOLERANCE = {tf.bfloat16: 2**-8, tf.float16: 2**-11}  # of one rounding
SHAPES = [(2, 14, 14, 96), (3, 9, 8, 8), (1, 7, 7, 768), (2, 56, 30, 24), (1, 8, 113, 72)]


def plain(x, kernel, is_same):
    padding = "SAME" if is_same else "VALID"
    return tf.nn.depthwise_conv2d(x, kernel[..., None], [1] * 4, padding)


@pytest.mark.parametrize("is_same", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("window", calls.WINDOWS)
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_beside_float64(dtype, window, shape, is_same):
    """The output, and the gradients of x and the kernel."""
    of = Depthwise(*shape, window, is_same, dtype)
    draw = np.random.default_rng(0)
    x, kernel, gradient = (
        tf.cast(tf.constant(draw.normal(size=each), tf.float32), dtype)
        for each in (of.shape, of.kernel_shape, of.output_shape)
    )

    def with_gradients(function, x, kernel, gradient):
        with tf.GradientTape() as tape:
            tape.watch([x, kernel])
            y = function(x, kernel)
        return [y, *tape.gradient(y, [x, kernel], output_gradients=gradient)]

    @tf.function(jit_compile=True)
    def run(x, kernel, gradient):
        return with_gradients(lambda x, k: convolved(of, x, k), x, kernel, gradient)

    found = run(x, kernel, gradient)
    with tf.device("/cpu:0"):
        wide = [tf.cast(each, tf.float64) for each in (x, kernel, gradient)]
        wanted = with_gradients(lambda x, k: plain(x, k, is_same), *wide)
        for each, other in zip(found, wanted, strict=True):
            error = np.abs(tf.cast(each, tf.float64) - other).max() / np.abs(other).max()
            assert error <= TOLERANCE[dtype]


def classifier():
    inputs = keras.Input((16, 16, 16))
    hidden = keras.layers.DepthwiseConv2D(5, padding="same")(inputs)
    hidden = keras.layers.SeparableConv2D(32, 3, activation="relu")(hidden)
    hidden = keras.layers.DepthwiseConv2D(7)(hidden)
    hidden = keras.layers.GlobalAveragePooling2D()(hidden)
    return keras.Model(inputs, keras.layers.Dense(4, dtype="float32")(hidden))


@pytest.mark.parametrize("precision", ["mixed_bfloat16", "mixed_float16"])
def test_training(precision, caplog):
    draw = np.random.default_rng(0)
    x = draw.normal(size=(256, 16, 16, 16)).astype("f4")
    y = draw.integers(4, size=256)
    x += np.eye(16)[y][:, None, None] * 2
    what = "depthwise convolutions"
    check_training_on_a_gpu(classifier, x, y, precision, what, caplog, rtol=3e-2)
