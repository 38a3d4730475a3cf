"""Several steps in one loop that XLA compiles."""

import numpy as np
import pytest
import tensorflow as tf

from tfaccel.step import finite, replica_steps

BATCHES = np.random.default_rng(0).normal(size=(5, 4, 3)).astype("f4")


def model():
    """Returns a small weight, a large one, and a step that trains both."""
    small, large = tf.Variable(tf.ones([3])), tf.Variable(tf.ones([3, 2048]))

    def step(batch):
        rows = tf.reduce_mean(batch * small, axis=0)
        small.assign_sub(0.1 * rows)
        large.assign_sub(0.1 * tf.repeat(rows[:, tf.newaxis], 2048, axis=1))
        is_fine = tf.reduce_all(tf.math.is_finite(tf.concat([small, rows], 0)))
        code = tf.where(is_fine, tf.constant(finite.FINE, tf.int64), finite.WEIGHTS)
        return {"loss": tf.reduce_sum(rows), finite.LOG: code}

    return small, large, step


def in_a_row(step, *, trains):
    def run(rows):
        return replica_steps._in_a_row(
            step, lambda inputs: inputs["rows"], {"rows": rows}, {}, trains=trains
        )

    return tf.function(run, jit_compile=True, autograph=False)


def test_alike_single_steps():
    """The loop gives the weights, the last loss and each code of steps one by one: 1e-6."""
    found_small, found_large, step = model()
    logs = in_a_row(step, trains=True)(tf.constant(BATCHES))
    small, large, step = model()
    codes = [
        (alone := tf.function(step, autograph=False)(tf.constant(each)))[finite.LOG]
        for each in BATCHES
    ]
    np.testing.assert_allclose(logs["loss"], alone["loss"], rtol=1e-6)
    np.testing.assert_array_equal(logs[finite.LOG], codes)
    np.testing.assert_allclose(found_small, small, rtol=1e-6)
    np.testing.assert_allclose(found_large, large, rtol=1e-6)


@pytest.mark.parametrize("trains", [True, False])
def test_small_weights_of_training_wait_for_their_check(trains):
    *_, step = model()
    graph = in_a_row(step, trains=trains).get_concrete_function(tf.constant(BATCHES)).graph
    functions = graph.as_graph_def().library.function
    barriers = [
        node
        for function in functions
        for node in function.node_def
        if node.op == "XlaOptimizationBarrier"
    ]
    operands = [len(each.attr["T"].list.type) for each in barriers]
    assert operands == ([2] if trains else [])  # the small weight and the code


def test_is_small():
    small = [tf.zeros([10**6]), tf.zeros([64, 64]), tf.zeros([])]
    assert all(map(finite.is_small, small))
    assert not finite.is_small(tf.zeros([65, 64]))
