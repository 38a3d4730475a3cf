"""Operations that are slow to translate for XLA are translated once for each shape."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers
from outputs_and_gradients import in_xla, traced, with_gradients
from tensorflow.python.ops import op_selector

from tfaccel.keras_internals.lowered_once import rsqrt, square_roots_once

SLOW = {"Sqrt", "Rsqrt", "Relu", "ReluGrad"}  # 5 ms each in TensorFlow 2.21


def operations_of(concrete) -> list[str]:
    """The types of the operations of a function, without those of functions that it calls."""
    return [each.type for each in concrete.graph.get_operations()]


def values(seed=0, shape=(5, 4)):
    return tf.constant(np.random.default_rng(seed).uniform(0.5, 2.0, shape), tf.float32)


def test_rsqrt_and_its_gradients_are_tensorflows():
    @tf.function(jit_compile=True, autograph=False)
    def run(x):
        return with_gradients(rsqrt, x), with_gradients(tf.math.rsqrt, x)

    received, wanted = run(values())
    for own, other in zip(received, wanted, strict=True):
        np.testing.assert_allclose(own, other, rtol=1e-6)


def test_the_program_of_xla_is_that_of_the_plain_operation():
    def program(operation):
        run = tf.function(
            lambda x: operation(x) + operation(2 * x), jit_compile=True, autograph=False
        )
        text = run.experimental_get_compiler_ir(values())(stage="optimized_hlo")
        return [text.count(f" {each}(") for each in ("call", "rsqrt", "fusion", "multiply")]

    assert program(rsqrt) == program(tf.math.rsqrt)
    assert program(rsqrt)[0] == 0


def adam_step(optimizer, variables, quick):
    @tf.function(jit_compile=True, autograph=False)
    def run(*gradients):
        if quick:
            with square_roots_once():
                optimizer.apply(gradients, variables)
        else:
            optimizer.apply(gradients, variables)

    return run


def test_the_square_roots_of_an_update_are_translated_once_for_each_shape():
    shapes = [(5, 4), (3,), (5, 4), (5, 4), (3,)]
    gradients = [values(index, shape) for index, shape in enumerate(shapes)]
    trained = []
    for quick in (False, True):
        variables = [keras.Variable(values(9, shape)) for shape in shapes]
        optimizer = keras.optimizers.AdamW(0.1)
        optimizer.build(variables)
        step = adam_step(optimizer, variables, quick)
        for _ in range(3):
            step(*gradients)
        trained.append([each.numpy() for each in variables])
        concrete = step.get_concrete_function(*gradients)
        roots = operations_of(concrete).count("Sqrt")
        assert roots == (0 if quick else 2 * len(shapes))
    # One for a scalar, which depends on the number of the step, and one for each of two shapes.
    called = {
        each.get_attr("f").name
        for each in concrete.graph.get_operations()
        if each.type == "PartitionedCall"
    }
    assert len(called) == 3
    for own, other in zip(*reversed(trained), strict=True):
        np.testing.assert_allclose(own, other, rtol=1e-6)


def test_square_roots_outside_a_traced_function_are_kerass():
    with square_roots_once():
        assert float(keras.ops.sqrt(4.0)) == 2
        assert keras.ops.sqrt(keras.Input((3,))).shape == (None, 3)


@pytest.fixture
def block():
    """Norms and ReLUs in half precision, one after another."""
    x = inputs = keras.Input((6, 5, 4))
    for _ in range(6):
        x = layers.Conv2D(4, 3, padding="same", use_bias=False, dtype="mixed_bfloat16")(x)
        x = layers.BatchNormalization(dtype="mixed_bfloat16")(x)
        x = layers.Activation("relu", dtype="mixed_bfloat16")(x)
    return keras.Model(inputs, x)


def test_a_norm_and_a_relu_have_no_slow_operation(block):
    concrete = traced(block, in_xla, xla=True).get_concrete_function(values(shape=(8, 6, 5, 4)))
    assert not SLOW & set(operations_of(concrete))


def test_tensorflow_does_not_look_through_the_whole_step_for_a_gradient(block, monkeypatch):
    """It looks for variables among all operations before what is no argument of a function."""
    direct, lengths = op_selector.get_backward_walk_ops, []

    def noting(*args, **settings):
        found = direct(*args, **settings)
        lengths.append(len(found))
        return found

    monkeypatch.setattr(op_selector, "get_backward_walk_ops", noting)
    traced(block, in_xla, xla=True).get_concrete_function(values(shape=(8, 6, 5, 4)))
    assert len(lengths) >= 6  # the square roots; gradients that tapes record need no search
    assert max(lengths) < 20
