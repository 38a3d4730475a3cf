"""Pooling of the toolkit's own models, against Keras's layer."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from tfaccel.models.pooling import pooled


@pytest.mark.parametrize("shape", [(8, 6, 3), (9, 6, 1), (2, 7, 2), (5, 5, 1)])
@pytest.mark.parametrize("xla", [False, True])
def test_it_is_max_pooling_and_so_is_its_gradient(shape, xla):
    image = keras.Input(shape)
    ours, theirs = keras.Model(image, pooled(image)), keras.layers.MaxPooling2D()
    x = tf.constant(np.random.default_rng(0).normal(size=(4, *shape)), tf.float32)

    def value_and_gradient(function):
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = function(x)
            loss = tf.reduce_sum(y**2)
        return y, tape.gradient(loss, x)

    got = tf.function(lambda: value_and_gradient(ours), jit_compile=xla)()
    for each, expected in zip(got, value_and_gradient(theirs), strict=True):
        np.testing.assert_array_equal(each, expected)


@pytest.mark.parametrize("policy", ["mixed_float16", "mixed_bfloat16"])
def test_it_computes_in_the_dtype_of_what_it_pools(policy):
    keras.config.set_dtype_policy(policy)
    try:
        x = keras.layers.Conv2D(3, 3, padding="same")(keras.Input((4, 4, 1)))
        assert pooled(x).dtype == policy.removeprefix("mixed_")
    finally:
        keras.config.set_dtype_policy("float32")
