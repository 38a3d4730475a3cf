"""Operations that a traced function makes once: which they are, and that nothing else changes."""

import collections

import keras
import numpy as np
import pytest
import tensorflow as tf

from tfaccel.keras_internals.shared_operations import integers_shared, scalars_shared


def types_of(function, *arguments):
    """How often each type of operation is in the function, with those of its branches."""
    graph = function.get_concrete_function(*arguments).graph
    graphs = [graph, *(each.graph for each in graph._functions.values())]
    return collections.Counter(op.type for each in graphs for op in each.get_operations())


def test_equal_integers_are_one_constant():
    def run(x):
        with integers_shared():
            y = tf.transpose(tf.reshape(x, [6]) + tf.reshape(2 * x, [6]))
            return y, tf.reduce_sum(x, 1) + tf.reduce_sum(x, 1), tf.constant(1.5) + tf.constant(1.5)

    function = tf.function(run, autograph=False)
    x = tf.reshape(tf.range(6.0), [2, 3])
    y, sums, three = function(x)
    np.testing.assert_array_equal(y, 3 * np.arange(6.0))
    np.testing.assert_array_equal(sums, [6, 24])
    assert three == 3
    # The shape, the axis, both 1.5, 2, and the order of the transposition, which has three.
    assert types_of(function, x)["Const"] <= 8
    made = function.get_concrete_function(x).graph.get_operations()
    values = [op.get_attr("value").float_val for op in made if op.type == "Const"]
    assert sum(list(each) == [1.5] for each in values) == 2  # each may be an input of a gradient


def test_gradients_of_equal_floating_constants_are_their_own():
    @tf.function(autograph=False)
    def run():
        with integers_shared(), tf.GradientTape() as tape:
            a, b = tf.constant(2.0), tf.constant(2.0)
            tape.watch([a, b])
            return tape.gradient(a**3 * b, [a, b])

    np.testing.assert_allclose(run(), [24, 8])


@pytest.mark.parametrize("xla", [False, True])
def test_a_variable_is_read_again_after_it_changed(xla):
    rate, weight, other = (tf.Variable(each) for each in (0.5, [1.0, 2.0], [4.0, 8.0]))

    @tf.function(jit_compile=xla, autograph=False)
    def run():
        with scalars_shared():
            for each in (weight, other):
                each.assign_sub(each * (rate * 2))
                each.assign_add(each + (rate * 2))
            rate.assign(0.25)
            weight.assign_add(tf.ones(2) * (rate * 2))
            return rate * 2

    with tf.device("CPU:0"):
        assert run() == 0.5
    np.testing.assert_array_equal(weight, [1.5, 1.5])
    np.testing.assert_array_equal(other, [1, 1])
    counts = types_of(run)
    assert counts["Mul"] == 3 + 1 + 1  # with arrays, of the first rate, of the second
    assert counts["ReadVariableOp"] == 2 + 2 * 2  # the rate, and each array, before and after


def test_what_waits_for_others_is_its_own():
    @tf.function(autograph=False)
    def run(x):
        with scalars_shared():
            a = tf.constant(1) + tf.cast(x, tf.int32)
            with tf.control_dependencies([tf.raw_ops.NoOp()]):
                b = tf.constant(1) + tf.cast(x, tf.int32)
            c = tf.cond(x > 0, lambda: tf.constant(1) + tf.cast(x, tf.int32), lambda: 0)
            return a, b, c

    assert [int(each) for each in run(tf.constant(2.0))] == [3, 3, 3]
    assert types_of(run, tf.constant(2.0))["Cast"] == 3


@pytest.mark.parametrize(
    "make",
    [
        lambda: keras.optimizers.AdamW(1e-2, weight_decay=0.1, global_clipnorm=1.0),
        lambda: keras.optimizers.Nadam(keras.optimizers.schedules.CosineDecay(1e-2, 5)),
        lambda: keras.optimizers.SGD(1e-2, momentum=0.9, nesterov=True, use_ema=True),
        lambda: keras.optimizers.Adam(1e-2, amsgrad=True, gradient_accumulation_steps=2),
        lambda: keras.optimizers.Ftrl(1e-2),
        lambda: keras.optimizers.Lamb(1e-2),
    ],
    ids=["AdamW", "Nadam", "SGD", "Adam", "Ftrl", "Lamb"],
)
def test_updates_are_keras_own(make):
    """To the bit, after four steps, with fewer operations."""
    shapes = [(3, 4), (4,), (), (4, 2)]

    def trained(*, shares):
        variables = [keras.Variable(np.full(each, 0.5), dtype="float32") for each in shapes]
        optimizer = make()
        optimizer.build(variables)

        @tf.function(autograph=False)
        def step(*gradients):
            with scalars_shared() if shares else tf.name_scope("plain"):
                optimizer.apply(list(gradients), variables)

        rng = np.random.default_rng(0)
        for _ in range(4):
            gradients = [tf.constant(rng.normal(size=each), tf.float32) for each in shapes]
            step(*gradients)
        states = [each.numpy() for each in (*variables, *optimizer.variables)]
        return states, sum(types_of(step, *gradients).values())

    (ours, number), (wanted, of_keras) = trained(shares=True), trained(shares=False)
    for each, other in zip(ours, wanted, strict=True):
        np.testing.assert_array_equal(each, other)
    assert number < 0.95 * of_keras
