"""A ReLU as a traced step has it against Keras's own, and what its gradient makes XLA write."""

import contextlib

import keras
import numpy as np
import pytest
import tensorflow as tf
from outputs_and_gradients import in_xla, traced

layers = keras.layers


def small_model(dtype, readers, norm=True):
    """A batch norm or a sum, a ReLU, and `readers` convolutions that read it, summed."""
    keras.utils.set_random_seed(0)
    settings = {"dtype": dtype}
    x = inputs = keras.Input((6, 5, 4))
    x = layers.BatchNormalization(**settings)(x) if norm else layers.Add(**settings)([x, x])
    x = layers.Activation("relu", **settings)(x)
    each = [layers.Conv2D(8, 3, use_bias=False, **settings)(x) for _ in range(readers)]
    return keras.Model(inputs, layers.Add(**settings)(each) if readers > 1 else each[0])


def values():
    return tf.constant(np.random.default_rng(0).normal(size=(8, 6, 5, 4)), tf.float32)


def num_written(model):
    """How many values XLA is told to write."""
    graph = traced(model, in_xla, xla=True).get_concrete_function(values()).graph
    return [each.type for each in graph.get_operations()].count("XlaOptimizationBarrier")


def assert_as_by_keras(model, tolerance):
    """Compares the outputs and all gradients with those of Keras without XLA."""
    theirs = tf.nest.flatten(traced(model, contextlib.nullcontext, xla=False)(values()))
    received = tf.nest.flatten(traced(model, in_xla, xla=True)(values()))
    for own, other in zip(received, theirs, strict=True):
        other = tf.cast(other, "float32").numpy()
        atol = tolerance * np.abs(other).max()  # bfloat16 has 8 bits
        np.testing.assert_allclose(tf.cast(own, "float32"), other, rtol=tolerance, atol=atol)


# The gradient of a norm with a ReLU reads its inputs twice, each time on its own.
@pytest.mark.parametrize(
    ("settings", "number"),
    [
        (("mixed_bfloat16", 2), 3),
        (("mixed_float16", 3), 3),
        (("mixed_bfloat16", 1), 2),
        (("mixed_bfloat16", 2, False), 0),
        (("float32", 2), 0),
    ],
    ids=["two readers", "three readers", "one reader", "no norm", "float32"],
)
def test_a_sum_of_gradients_is_written(settings, number):
    assert num_written(small_model(*settings)) == number


@pytest.mark.parametrize(("dtype", "tolerance"), [("mixed_bfloat16", 0.03), ("float32", 1e-4)])
def test_the_gradients_are_keras(dtype, tolerance):
    assert_as_by_keras(small_model(dtype, 2), tolerance)


def test_the_gradient_has_a_gradient():
    model = small_model("mixed_bfloat16", 2)

    def penalty(x):
        with tf.GradientTape() as outer:
            outer.watch(x)
            with in_xla(), tf.GradientTape() as inner:
                inner.watch(x)
                loss = tf.reduce_sum(tf.cast(model(x, training=True), "float32") ** 2)
            penalty = tf.reduce_sum(inner.gradient(loss, x) ** 2)
        return outer.gradient(penalty, x)

    assert np.abs(tf.function(penalty, jit_compile=True, autograph=False)(values())).max() > 0


def dense_block(dtype, num_layers):
    """Layers of which each reads the outputs of all before it, as in a DenseNet."""
    keras.utils.set_random_seed(0)
    x = inputs = keras.Input((6, 5, 4))
    for _ in range(num_layers):
        read = layers.BatchNormalization(dtype=dtype)(x)
        read = layers.Activation("relu", dtype=dtype)(read)
        read = layers.Conv2D(2, 3, padding="same", use_bias=False, dtype=dtype)(read)
        x = layers.Concatenate(dtype=dtype)([x, read])
    return keras.Model(inputs, x)


# In half precision, the moments of three concatenations are also written, and the gradient of the
# first norm, whose inputs are no concatenation, reads them twice on its own.
@pytest.mark.parametrize(("dtype", "num_others"), [("mixed_bfloat16", 3 + 2), ("float32", 0)])
def test_the_sum_of_gradients_of_a_concatenation_is_written(dtype, num_others):
    # The last concatenation has one reader.
    assert num_written(dense_block(dtype, 4)) == 3 + num_others


# The eighth concatenation has nine arrays and is written. The tenth has three again.
@pytest.mark.parametrize(("num_layers", "num_concatenations"), [(7, 0), (10, 1)])
def test_a_concatenation_of_more_than_eight_arrays_is_written(num_layers, num_concatenations):
    num_sums = num_layers - 1
    assert num_written(dense_block("float32", num_layers)) == num_sums + num_concatenations


@pytest.mark.parametrize(
    ("dtype", "num_layers", "tolerance"),
    [
        ("mixed_bfloat16", 4, 0.05),
        ("float32", 4, 1e-4),
        pytest.param("float32", 9, 1e-4, marks=pytest.mark.slow),
    ],
)
def test_the_gradients_of_a_dense_block_are_keras(dtype, num_layers, tolerance):
    assert_as_by_keras(dense_block(dtype, num_layers), tolerance)


def test_whole_numbers_are_concatenated_as_by_keras():
    @tf.function(jit_compile=True, autograph=False)
    def run(x):
        with in_xla():
            return keras.ops.concatenate([x, x])

    np.testing.assert_array_equal(run(tf.constant([1, 2])), [1, 2, 1, 2])
