"""Products of many columns with columns of zeros beside Keras's own."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

from tfaccel.keras_internals.layer_paths import layer_paths
from tfaccel.keras_internals.padded_product import with_padding

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


def built(make, dtype):
    keras.config.set_dtype_policy(f"mixed_{dtype}")
    try:
        head = make(COLUMNS)
        head.build((None, 16))
    finally:
        keras.config.set_dtype_policy("float32")
    return head


@pytest.mark.parametrize("make", [dense, TiedHead])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_alike_keras(make, dtype):
    """The output and all gradients: exact, because zeros add nothing; 1e-2 for other orders."""
    head = built(make, dtype)
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


def classified(head):
    """Returns a function of (x, labels): the loss of a head, and its gradients."""
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)

    def run(x, labels, *, on_gpu):
        with layer_paths(xla=True, all_reduce=None, on_gpu=on_gpu), tf.GradientTape() as tape:
            tape.watch(x)
            value = loss(labels, head(x))
        return value, *tape.gradient(value, [x, head.trainable_variables[0].value])

    return run


@pytest.mark.parametrize("label", [COLUMNS - 1, COLUMNS], ids=["a class", "beyond the classes"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_a_loss_reads_the_product_with_its_padding(dtype, label):
    """The loss and gradients are Keras's: 1e-2. A label beyond the classes is NaN, as in XLA."""
    head = built(TiedHead, dtype)
    draw = np.random.default_rng(0)
    x = tf.cast(tf.constant(draw.normal(size=(2, 3, 16))), dtype)
    labels = tf.constant([draw.integers(COLUMNS, size=3).tolist(), [0, 1, label]])
    run = classified(head)
    own, plain = (
        tf.function(
            lambda *a, on_gpu=on_gpu: run(*a, on_gpu=on_gpu), jit_compile=True, autograph=False
        )
        for on_gpu in (True, False)
    )
    operations = own.get_concrete_function(x, labels).graph.get_operations()
    assert not [each for each in operations if each.type == "StridedSliceGrad"]
    for found, wanted in zip(own(x, labels), plain(x, labels), strict=True):
        assert (found.shape, found.dtype) == (wanted.shape, wanted.dtype)
        found, wanted = (tf.cast(each, tf.float64).numpy() for each in (found, wanted))
        assert np.isnan(wanted).any() == (label == COLUMNS)
        np.testing.assert_array_equal(np.isnan(found), np.isnan(wanted))
        largest = np.nan_to_num(np.abs(wanted)).max()
        np.testing.assert_allclose(found, wanted, rtol=1e-2, atol=1e-2 * largest)


def test_padding_is_found_through_casts_and_shapes_alone():
    @tf.function(autograph=False)
    def run(x, matrix):
        with layer_paths(xla=True, all_reduce=None, on_gpu=True):
            cut = keras.ops.matmul(x, matrix)
        same = tf.reshape(tf.cast(cut, tf.float32), [6, COLUMNS])
        others = [
            same * 2,
            tf.reshape(cut, [3, -1]),
            cut[:, :, 1:],
            tf.cast(tf.cast(cut, tf.int32), tf.float32),
            x,
        ]
        assert with_padding(cut).shape == (2, 3, 4104)
        assert with_padding(same).shape == (2, 3, 4104)
        assert with_padding(same).dtype == tf.bfloat16
        assert [with_padding(each) is each for each in others] == [True] * len(others)
        return same

    run(tf.ones((2, 3, 16), tf.bfloat16), tf.ones((16, COLUMNS), tf.bfloat16))
    x = tf.ones((2, 4099))
    assert with_padding(x) is x
