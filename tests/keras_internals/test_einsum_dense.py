"""`EinsumDense` as a traced step has it against Keras's own, on the same inputs."""

import contextlib

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

from tfaccel.keras_internals.einsum_dense import _num_summed
from tfaccel.keras_internals.layer_paths import layer_paths

CASES = {
    "query": ("abc,cde->abde", (None, 3, 4), "de", (2, 5, 6)),
    "output": ("abcd,cde->abe", (None, 6), "e", (2, 5, 3, 4)),
    "dense": ("abc,cd->abd", (None, 7), "d", (2, 5, 6)),
    "no bias": ("abc,cd->abd", (None, 7), None, (2, 5, 6)),
    "part of a bias": ("abc,cde->abde", (None, 3, 4), "e", (2, 5, 6)),
    "bias of rows": ("abc,cd->abd", (5, 7), "bd", (2, 5, 6)),
    "other": ("abc,bd->acd", (6, 7), None, (2, 5, 6)),
    "ellipsis": ("...x,xy->...y", (5, 7), "y", (2, 5, 6)),
}


def trained(layer, x, paths):
    @tf.function(jit_compile=True, autograph=False)
    def run(x):
        with paths, tf.GradientTape() as tape:
            tape.watch(x)
            outputs = layer(x, training=True)
            weights = tf.sin(tf.reshape(tf.range(tf.size(outputs), dtype="float32"), outputs.shape))
            loss = tf.reduce_sum(weights * outputs)
        return outputs, *tape.gradient(loss, [x, *(each.value for each in layer.weights)])

    return [each.numpy() for each in run(x)]


@pytest.mark.parametrize("case", CASES)
def test_alike(case):
    equation, shape, bias_axes, x_shape = CASES[case]
    keras.utils.set_random_seed(0)
    layer = layers.EinsumDense(
        equation, shape, bias_axes=bias_axes, activation="tanh", bias_initializer="glorot_uniform"
    )
    x = tf.constant(np.random.default_rng(0).normal(size=x_shape), tf.float32)
    layer(x)
    wanted = trained(layer, x, contextlib.nullcontext())
    found = trained(layer, x, layer_paths(xla=True, all_reduce=None))
    assert len(found) == len(wanted) == 2 + len(layer.weights)
    for each, other in zip(found, wanted, strict=True):
        np.testing.assert_allclose(each, other, rtol=1e-5, atol=1e-5)


def test_lora_and_unknown_rows():
    layer = layers.EinsumDense("abc,cde->abde", (None, 3, 4), bias_axes="de")
    layer.build((None, None, 6))
    layer.enable_lora(2, a_initializer="normal", b_initializer="normal")

    @tf.function(input_signature=[tf.TensorSpec((None, None, 6))], autograph=False)
    def run(x):
        with layer_paths(xla=True, all_reduce=None):
            return layer(x)

    x = np.random.default_rng(0).normal(size=(2, 5, 6)).astype("float32")
    np.testing.assert_allclose(run(x), layer(x), rtol=1e-5, atol=1e-5)
    operations = {each.type for each in run.get_concrete_function().graph.get_operations()}
    assert "Einsum" not in operations


@pytest.mark.parametrize(
    ("equation", "num"),
    [
        ("abc,cde->abde", 1),
        ("abcd,cde->abe", 2),
        ("ab,bc->ac", 1),
        ("abc,bd->acd", None),
        ("abc,cd->adb", None),
        ("abcd,dce->abe", None),
        ("abc,acd->abd", None),
        ("...x,xy->...y", None),
        ("ab,cd->abcd", None),
    ],
)
def test_which_are_products(equation, num):
    assert _num_summed(equation) == num
