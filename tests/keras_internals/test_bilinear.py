"""The layer that resizes feature maps, compared with TensorFlow's own operation."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from tfaccel.keras_internals.bilinear import Bilinear

SIZES = [
    ((4, 6), (16, 24)),
    ((3, 5), (7, 11)),
    ((8, 9), (4, 3)),
    ((1, 1), (5, 4)),
    ((6, 6), (6, 6)),
]


@pytest.mark.parametrize(("old", "new"), SIZES)
def test_it_resizes_as_tensorflow_does(old, new):
    images = np.random.default_rng(0).normal(size=(3, *old, 4)).astype(np.float32)
    expected = tf.image.resize(images, new, "bilinear")
    np.testing.assert_allclose(Bilinear(*new)(images), expected, rtol=0, atol=2e-6)


@pytest.mark.parametrize("xla", [False, True])
def test_its_gradient_is_tensorflows_with_and_without_xla(xla):
    draw = np.random.default_rng(0)
    images, weights = draw.normal(size=(2, 3, 5, 2)), draw.normal(size=(2, 8, 9, 2))

    def gradient(resize):
        x, factors = tf.constant(images, tf.float32), tf.constant(weights, tf.float32)
        with tf.GradientTape() as tape:
            tape.watch(x)
            total = tf.reduce_sum(resize(x) * factors)
        return tape.gradient(total, x)

    layer = Bilinear(8, 9)
    ours = tf.function(lambda: gradient(layer), jit_compile=xla, autograph=False)()
    expected = gradient(lambda x: tf.image.resize(x, (8, 9), "bilinear"))
    np.testing.assert_allclose(ours, expected, rtol=0, atol=1e-5)


def test_it_computes_in_the_policys_dtype_and_is_read_again(tmp_path):
    image = keras.Input((3, 5, 2))
    model = keras.Model(image, Bilinear(6, 7, dtype="mixed_bfloat16")(image))
    assert (model.output_shape, model.output.dtype) == ((None, 6, 7, 2), "bfloat16")
    model.save(tmp_path / "model.keras")
    read = keras.models.load_model(tmp_path / "model.keras")
    images = np.random.default_rng(0).normal(size=(2, 3, 5, 2)).astype(np.float32)
    np.testing.assert_array_equal(
        tf.cast(read(images), tf.float32), tf.cast(model(images), tf.float32)
    )
