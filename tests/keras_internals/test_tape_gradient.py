"""Gradients that tapes record, against those of TensorFlow."""

import numpy as np
import pytest
import tensorflow as tf

from tfaccel.keras_internals.tape_gradient import on_tapes


def product_and_square(x, y):
    def gradient(of_product, of_square):
        return of_product * y + of_square * 2 * x, of_product * x

    return (x * y, x * x), gradient


def of_branch(call, x, y):
    return tf.cond(tf.reduce_sum(x) > 0, lambda: tuple(call(x, y)), lambda: (x, y))


@pytest.mark.parametrize(
    "wrap", [lambda call: call, lambda call: tf.function(call, autograph=False)]
)
@pytest.mark.parametrize("in_branch", [False, True])
@pytest.mark.parametrize("persistent", [False, True])
def test_gradients_of_every_order(wrap, in_branch, persistent):
    x, y = tf.constant([0.5, 2.0]), tf.constant([3.0, -1.0])

    def found(of):
        call = of(product_and_square)

        def run(x, y):
            with tf.GradientTape() as outer:
                outer.watch([x, y])
                with tf.GradientTape(persistent=persistent) as inner:
                    inner.watch([x, y])
                    product, square = of_branch(call, x, y) if in_branch else call(x, y)
                    z = product**2 + square * y
                first = inner.gradient(z, [x, y])
            return product, square, *first, *outer.gradient(first, [x, y])

        return wrap(run)(x, y)

    plain = found(lambda function: lambda x, y: function(x, y)[0])
    for ours, wanted in zip(found(on_tapes), plain, strict=True):
        np.testing.assert_allclose(ours, wanted, rtol=1e-6)


def test_it_has_fewer_operations():
    def number(of):
        def run(x, y):
            with tf.GradientTape() as tape:
                tape.watch([x, y])
                z = of(product_and_square)(x, y)[0]
            return tape.gradient(z, [x, y])

        concrete = tf.function(run, autograph=False).get_concrete_function(tf.ones(2), tf.ones(2))
        return len(concrete.graph.get_operations())

    assert number(on_tapes) <= number(tf.custom_gradient) - 5
