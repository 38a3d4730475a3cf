"""Sums with matrix products as a traced step writes them, beside TensorFlow's."""

import contextlib

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

from tfaccel.keras_internals.layer_paths import layer_paths

SHAPE = (2, 5, 8)


def block(dtype, *, add):
    """Returns a block of a transformer without norms, whose two parts are added by `add`."""
    keras.config.set_dtype_policy(f"mixed_{dtype}" if dtype != "float32" else dtype)
    try:
        x = keras.Input(SHAPE[1:], dtype=dtype)
        bent = layers.Activation("tanh")(x)
        y = add(x, layers.MultiHeadAttention(2, 4)(bent, bent))
        outputs = add(y, layers.Dense(8)(layers.Activation("tanh")(y)))
        model = keras.Model(x, outputs)
    finally:
        keras.config.set_dtype_policy("float32")
    rng = np.random.default_rng(0)
    model.set_weights([rng.normal(0, 0.3, each.shape) for each in model.get_weights()])
    return model


def layer_sum(x, y):
    return layers.Add()([x, y])


def operator(x, y):
    return layers.Lambda(lambda both: both[0] + both[1])([x, y])


def traced(model, x, *, on_gpu, quick=True):
    """Returns the outputs and the gradients of the inputs and the weights, and the function."""
    paths = layer_paths(xla=True, all_reduce=None, on_gpu=on_gpu)

    @tf.function(autograph=False)
    def run(x):
        with paths if quick else contextlib.nullcontext(), tf.GradientTape() as tape:
            tape.watch(x)
            y = model(x, training=True)
            value = tf.reduce_sum(tf.cast(y, tf.float32) ** 2)
            weights = [each.value for each in model.trainable_variables]
            return y, *tape.gradient(value, [x, *weights])

    return run.get_concrete_function(tf.TensorSpec(x.shape, x.dtype))


def sums(function, kind):
    """Returns the sums of tensors of one size: their results' ranks."""
    found = []
    for op in function.graph.get_operations():
        sizes = {each.shape.num_elements() for each in op.inputs}
        if op.type == kind and len(sizes) == 1 and sizes == {np.prod(SHAPE)}:
            found.append(op.outputs[0].shape.rank)
    return found


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("add", [layer_sum, operator])
def test_residuals_are_added_to_products_as_matrices(add, dtype):
    """With another rank than the product's, XLA copies the residual before the product."""
    model, x = block(dtype, add=add), tf.zeros(SHAPE, dtype)
    ranks = sums(traced(model, x, on_gpu=True), "AddV2")
    assert ranks.count(2) >= 2
    assert ranks.count(3) == 0


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_gradients_of_products_are_summed_one_into_the_other(dtype):
    """XLA takes only the first of two products in a sum into which the other can be written."""
    model, x = block(dtype, add=layer_sum), tf.zeros(SHAPE, dtype)
    assert 3 in [
        len(op.inputs)
        for op in traced(model, x, on_gpu=False).graph.get_operations()
        if op.type == "AddN"
    ]
    function = traced(model, x, on_gpu=True)
    of_three = [
        op for op in function.graph.get_operations() if op.type == "AddN" and len(op.inputs) > 2
    ]
    assert not of_three
    nested = [
        op
        for op in function.graph.get_operations()
        if op.type == "AddV2"
        and op.inputs[1].op.type == "AddV2"
        and [each.shape.rank for each in op.inputs] == [2, 2]
    ]
    assert nested


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("add", [layer_sum, operator])
def test_alike_tensorflows_sums(add, dtype):
    model = block(dtype, add=add)
    x = tf.cast(np.random.default_rng(1).normal(size=SHAPE), dtype)
    own = traced(model, x, on_gpu=True)(x)
    plain = traced(model, x, on_gpu=True, quick=False)(x)
    tolerance = {"bfloat16": 4e-2, "float16": 5e-3, "float32": 1e-5}[dtype]
    for found, expected in zip(own, plain, strict=True):
        found, expected = (tf.cast(each, tf.float64).numpy() for each in (found, expected))
        scale = max(np.abs(expected).max(), 1)  # the gradient of the bias of the keys is 0
        np.testing.assert_allclose(found, expected, rtol=0, atol=tolerance * scale)


def other_sums():
    x, square = tf.ones(SHAPE), tf.ones((8, 8))
    product = tf.tensordot(x, square, 1)
    return {
        "of no product": lambda: x + x,
        "with a number": lambda: product + 1.0,
        "with a row": lambda: product + tf.ones(8),
        "with an array": lambda: product + np.ones(SHAPE, np.float32),
        "of matrices": lambda: square @ square + square,
    }


@pytest.mark.parametrize("name", other_sums())
def test_other_sums_stay(name):
    @tf.function(autograph=False)
    def run(*, quick):
        paths = layer_paths(xla=True, all_reduce=None, on_gpu=True)
        with paths if quick else contextlib.nullcontext():
            return other_sums()[name]()

    plain, own = (run.get_concrete_function(quick=quick) for quick in (False, True))
    types = [[op.type for op in each.graph.get_operations()] for each in (plain, own)]
    assert types[0] == types[1]
    np.testing.assert_array_equal(plain(), own())


def test_gradients_of_other_shapes_and_kinds_are_summed_as_before():
    """A batch of unknown size, integers, and rows of an embedding beside a dense gradient."""
    table = tf.Variable(tf.ones((4, 8)))

    @tf.function(autograph=False)
    def run(x):
        paths = layer_paths(xla=True, all_reduce=None, on_gpu=True)
        with paths, tf.GradientTape() as tape:
            tape.watch(x)
            rows = tf.gather(table, [0, 1])
            value = sum(tf.reduce_sum(tf.matmul(x, table, transpose_b=True)) for _ in range(3))
            value += tf.reduce_sum(rows) + tf.reduce_sum(tf.matmul(rows, table, transpose_b=True))
            return tape.gradient(value, [x, table])

    of_x, of_table = run.get_concrete_function(tf.TensorSpec([None, 8]))(tf.ones((3, 8)))
    np.testing.assert_array_equal(of_x, np.full((3, 8), 12.0))
    expected = np.full((4, 8), 3.0 * 3 + 2)
    expected[:2] += 1 + 4
    np.testing.assert_array_equal(tf.convert_to_tensor(of_table), expected)
