"""Products of many columns with columns of zeros beside Keras's own."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

from tfaccel.keras_internals.layer_paths import layer_paths

COLUMNS = 4099


def traced(function, *, on_gpu):
    @tf.function(autograph=False)
    def run(x):
        with layer_paths(xla=True, all_reduce=None, on_gpu=on_gpu), tf.GradientTape() as tape:
            tape.watch(x)
            y = function(x)
            value = tf.reduce_sum(tf.cast(y, tf.float32) ** 2)
            weights = function.trainable_variables
        return y, *tape.gradient(value, [x, *(each.value for each in weights)])

    return run


def widths(run, x):
    """Returns the number of columns of each product in the forward pass."""
    operations = run.get_concrete_function(x).graph.get_operations()
    return {each.outputs[0].shape[-1] for each in operations if each.type == "MatMul"}


class TiedHead(keras.Model):
    def __init__(self, units):
        super().__init__()
        self.tokens = layers.ReversibleEmbedding(units, 16, reverse_dtype=self.compute_dtype)

    def build(self, shape):
        self.tokens.build(None)

    def call(self, x):
        return self.tokens(x, reverse=True)


def dense(units, **settings):
    return layers.Dense(units, **settings)


@pytest.mark.parametrize("make", [dense, TiedHead])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_alike_keras(make, dtype):
    """The output and all gradients: exact, because zeros add nothing; 1e-2 for other orders."""
    keras.config.set_dtype_policy(f"mixed_{dtype}")
    try:
        head = make(COLUMNS)
        head.build((None, 16))
    finally:
        keras.config.set_dtype_policy("float32")
    x = tf.cast(tf.constant(np.random.default_rng(0).normal(size=(2, 3, 16)) / 8), dtype)
    own, plain = (traced(head, on_gpu=each) for each in (True, False))
    assert 4104 in widths(own, x)
    assert 4104 not in widths(plain, x)
    for found, wanted in zip(own(x), plain(x), strict=True):
        assert (found.shape, found.dtype) == (wanted.shape, wanted.dtype)
        found, wanted = (tf.cast(each, tf.float64).numpy() for each in (found, wanted))
        np.testing.assert_allclose(found, wanted, rtol=1e-2, atol=1e-2 * np.abs(wanted).max())


@pytest.mark.parametrize(
    ("units", "policy"), [(4104, "mixed_bfloat16"), (4095, "mixed_bfloat16"), (COLUMNS, "float32")]
)
def test_others_are_kerass(units, policy):
    """Multiples of eight, few columns and float32 have no zeros."""
    head = dense(units, dtype=policy)
    head.build((None, 16))
    x = tf.ones((2, 16), head.compute_dtype)
    assert widths(traced(head, on_gpu=True), x) & {units}
    assert not widths(traced(head, on_gpu=True), x) & {-(-units // 8) * 8} - {units}
