"""The bias of a key's layer, without which an attention is the same."""

import cudnn_stand_in
import keras
import numpy as np
import pytest
import tensorflow as tf
import triton_stand_in
from keras import layers

from tfaccel.keras_internals.layer_paths import layer_paths
from tfaccel.step.attention import dropout, flash
from tfaccel.step.attention.choose import Attentions
from tfaccel.step.layer_norm.choose import LayerNorms

TOLERANCE = 3e-2  # of the largest value, in bfloat16


@pytest.fixture(autouse=True)
def stand_ins(monkeypatch):
    monkeypatch.setattr(flash, "call_module", cudnn_stand_in.call_module)
    monkeypatch.setattr(dropout, "call_module", triton_stand_in.call_module)


def attention(**settings):
    """Returns a layer with weights of one size, also of its biases."""
    layer = layers.MultiHeadAttention(4, 8, dtype="mixed_bfloat16", **settings)
    layer.build((2, 6, 16), (2, 6, 16))
    draw = np.random.default_rng(0)
    for each in layer.trainable_weights:
        each.assign(draw.normal(0, 0.5, each.shape))
    return layer


X = tf.constant(np.random.default_rng(1).normal(size=(2, 6, 16)), tf.bfloat16)
SEEN = np.arange(6) < np.array([[4], [6]])


def found(function, weights, *, quick, x=X):
    """Returns what `function` of x returns, the gradients of x and the weights, and the graph."""
    kernels = {"attention": Attentions(), "norm_kernels": LayerNorms()} if quick else {}

    @tf.function(autograph=False)
    def run(x):
        with (
            layer_paths(xla=True, all_reduce=None, **kernels),
            tf.GradientTape() as tape,
        ):
            tape.watch(x)
            y = function(x)
            value = tf.reduce_sum(tf.cast(y, tf.float32) ** 2)
        return y, tape.gradient(value, [x, *(each.value for each in weights)])

    function_of_x = run.get_concrete_function(x)
    y, gradients = function_of_x(x)
    kinds = [op.type for op in function_of_x.graph.get_operations()]
    return [tf.cast(each, tf.float64).numpy() for each in (y, *gradients)], kinds


def check(function, weights, *, zero):
    """The output and the gradients are those without kernels; that of the weight `zero` is 0."""
    (mine, kinds), (wanted, _) = (found(function, weights, quick=each) for each in (True, False))
    size = max(np.abs(each).max() for each in wanted[2:])
    for weight, each, other in zip([None, None, *weights], mine, wanted, strict=True):
        if zero is not None and weight is zero:
            assert not each.any()
            assert np.abs(other).max() < 1e-2 * size  # what rounding leaves
        else:
            np.testing.assert_allclose(each, other, rtol=0, atol=TOLERANCE * np.abs(other).max())
    return kinds


CALLS = {
    "no mask": {},
    "causal": {"use_causal_mask": True},
    "a mask": {"attention_mask": SEEN[:, None] & np.tri(6, dtype=bool)},
}


@pytest.mark.parametrize("call", CALLS)
def test_layers(call):
    layer = attention()
    bias = layer._key_dense.bias
    kinds = check(lambda x: layer(x, x, **CALLS[call]), layer.trainable_weights, zero=bias)
    assert kinds.count("BiasAddGrad") == 3  # of the query, the value and the output


def test_dropout(monkeypatch):
    layer = attention(dropout=0.5)
    weights = layer.trainable_weights
    at = [each is layer._key_dense.bias for each in weights].index(True)
    seen = []
    for has_bias in (True, False):
        layer._dropout_layer.seed_generator.state.assign([1, 2])
        if not has_bias:
            layer._key_dense.bias.assign(tf.zeros((4, 8)))
        (y, *gradients), kinds = found(lambda x: layer(x, x, training=True), weights, quick=True)
        assert kinds.count("BiasAddGrad") == 3
        assert not gradients[1 + at].any()
        seen.append(y)
    np.testing.assert_array_equal(*seen)


def projected(x, layer):
    return [each(x) for each in (layer._query_dense, layer._key_dense, layer._value_dense)]


def test_a_key_that_something_else_reads():
    """The gradient of its bias is that of the other reader."""
    layer = attention()

    def function(x):
        query, key, value = projected(x, layer)
        return keras.ops.dot_product_attention(query, key, value) + tf.sin(key)

    kinds = check(function, [layer._key_dense.kernel, layer._key_dense.bias], zero=None)
    assert kinds.count("BiasAddGrad") == 3


@pytest.mark.parametrize("kind", ["rotated", "scaled", "with a bias of the rows"])
def test_keys_whose_bias_stays(kind):
    """What is computed between the bias and the softmax may depend on the row."""
    layer = attention()
    draw = np.random.default_rng(2)
    table = tf.constant(draw.normal(size=(6, 4, 8)), tf.bfloat16)
    of_rows = tf.constant(draw.normal(size=(16, 32)), tf.bfloat16)
    row_bias = tf.constant(draw.normal(size=(6 * 32)), tf.bfloat16)

    def function(x):
        query, key, value = projected(x, layer)
        if kind == "rotated":
            key = tf.roll(key, 1, axis=-1) * table
        elif kind == "scaled":
            key = key * table
        else:
            product = tf.reshape(tf.matmul(tf.reshape(x, [12, 16]), of_rows), [2, 6 * 32])
            key = tf.reshape(tf.nn.bias_add(product, row_bias), [2, 6, 4, 8])
        return keras.ops.dot_product_attention(query, key, value)

    check(function, [layer._query_dense.kernel, layer._value_dense.bias], zero=None)
