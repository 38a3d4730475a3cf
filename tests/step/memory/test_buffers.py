"""The memory of a traced function: its kernels, what they write, and what is held at a time."""

import numpy as np
import pytest
import tensorflow as tf

from tfaccel.keras_internals.graph_copies import give_input
from tfaccel.keras_internals.xla_gradients import optimization_barrier
from tfaccel.step.memory.buffers import UnknownSizeError, peak_bytes

ROWS, WIDTH = 64, 256
SIZE = 4 * ROWS * WIDTH  # bytes of an activation
WEIGHTS = np.ones((WIDTH, WIDTH), np.float32)
SPEC = tf.TensorSpec((ROWS, WIDTH), tf.float32)


def peak(function, *specs, xla=True, on_gpu=True):
    """The peak in units of an activation, without the weights, which are constants."""
    traced = tf.function(function, autograph=False).get_concrete_function(*specs or (SPEC,))
    return peak_bytes(traced.graph, traced.graph.outputs, xla=xla, on_gpu=on_gpu) / SIZE


def product(x):
    return tf.linalg.matmul(x, WEIGHTS)


@pytest.mark.parametrize(("number", "expected"), [(1, 1), (2, 2), (5, 2)])
def test_of_a_chain_of_products_two_are_in_memory(number, expected):
    def chain(x):
        for _ in range(number):
            x = product(x)
        return x

    assert peak(chain) == expected


def test_what_is_read_later_stays():
    def skip(x):
        first = x = product(x)
        for _ in range(4):
            x = product(x)
        return product(x) + product(first)

    assert peak(skip) == 3


def test_elements_are_computed_where_they_are_read_and_in_place():
    assert peak(lambda x: tf.reduce_sum(tf.exp(product(x) * 2) + 1, axis=1)) == 1 + 4 * ROWS / SIZE
    assert peak(lambda x: product(tf.nn.relu(product(x)))) == 2  # the ReLU is in its input's place
    # Without XLA the same, as TensorFlow's kernels are in place, too; but a cast has another size.
    half = lambda x: tf.reduce_sum(tf.cast(tf.cast(product(x), tf.float16), tf.float32))  # noqa: E731
    assert peak(half) < 1.1
    assert peak(half, xla=False) == 1.5


def test_what_several_would_compute_from_much_is_written():
    """Four tensors are held for one reader of their sum; for several their sum is held."""

    def summed(x, number):
        total = product(x) + product(x + 1) + product(x + 2) + product(x + 3)
        early = [tf.reduce_sum(total * (each + 2)) for each in range(number - 1)]
        return [*early, tf.reduce_sum(total * product(product(x * 2)))]

    few, many = (peak(lambda x, number=number: summed(x, number)) for number in (1, 4))
    assert few == pytest.approx(6, abs=0.01)
    assert many == pytest.approx(5, abs=0.01)


def test_the_same_operation_is_computed_once():
    def twice(x):
        x = product(x)
        return product(x[::2]), product(x[::2])

    def others(x):
        x = product(x)
        return product(x[::2]), product(x[1::2])

    assert peak(twice) < peak(others)


def test_views_take_no_memory():
    def viewed(x):
        x = tf.reshape(tf.identity(product(x)), (WIDTH, ROWS))
        return tf.identity_n([tf.stop_gradient(x), x])[0]

    assert peak(viewed) == 1


def test_a_barrier_keeps_the_order():
    """What is computed again behind a barrier is not held before it."""

    def again(x):
        first = product(x)
        last = product(product(first))
        held, gradient = optimization_barrier(x, last)
        return product(held) + product(gradient)

    assert peak(again) == 3


def test_gradients_hold_what_they_read():
    weights = [tf.Variable(tf.zeros((WIDTH, WIDTH))) for _ in range(6)]

    def step(x):
        with tf.GradientTape() as tape:
            for each in weights:
                x = tf.nn.relu(tf.linalg.matmul(x, each))
            loss = tf.reduce_sum(x)
        for each, gradient in zip(weights, tape.gradient(loss, weights), strict=True):
            each.assign_sub(gradient)

    # The activations of all layers; and of the last one a gradient, and that of its weights.
    of_weights = WIDTH / ROWS
    assert 6 <= peak(step) <= 6 + 2 + of_weights
    # The gradients of weights are not held until the end, because each is used at once.
    assert peak(step) < 6 + 2 * of_weights


def test_branches_loops_and_calls_count_what_they_need():
    def deep(x):
        return product(product(product(x)))

    inner = tf.function(deep, autograph=False)
    assert peak(lambda x: inner(x)) == 2
    assert peak(lambda x: tf.cond(x[0, 0] > 0, lambda: deep(x), lambda: x)) >= 2
    looped = peak(
        lambda x: tf.while_loop(lambda i, _: i < 3, lambda i, y: (i + 1, deep(y)), (0, x))
    )
    assert 2 <= looped <= 3.1


def test_lists_of_loops_count():
    def listed(x):
        array = tf.TensorArray(tf.float32, 8, element_shape=(ROWS, WIDTH))
        body = lambda i, a: (i + 1, a.write(i, x + tf.cast(i, tf.float32)))  # noqa: E731
        return tf.while_loop(lambda i, _: i < 8, body, (0, array))[1].stack()

    assert peak(listed) >= 8


@pytest.mark.parametrize("on_gpu", [True, False])
def test_xla_for_the_cpu_writes_more(on_gpu):
    def joined(x):
        parts = tf.concat([product(x), product(x + 1)], axis=0)
        return [tf.reduce_sum(parts * 2), tf.reduce_sum(tf.abs(parts))]

    assert peak(joined, on_gpu=on_gpu) == pytest.approx(3 if on_gpu else 4, abs=0.01)


def test_a_size_that_is_not_known_is_said():
    with pytest.raises(UnknownSizeError, match=r"MatMul:0 has the shape \(None, 256\)"):
        peak(product, tf.TensorSpec((None, WIDTH), tf.float32))


def test_a_loop_of_operations_ends():
    """TensorFlow 1's loops are loops of the graph, too."""
    with tf.Graph().as_default() as graph:
        first = tf.identity(tf.ones((256,)))
        second = tf.tanh(first)
        give_input(first.op, 0, second)
    assert peak_bytes(graph, [second], xla=True, on_gpu=True) >= 4 * 256
