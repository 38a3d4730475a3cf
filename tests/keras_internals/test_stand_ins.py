"""Stand-ins of variables: XLA compiles a function, and its own variables stay as they are."""

import threading
import time

import numpy as np
import pytest
import tensorflow as tf

from tfaccel.keras_internals.stand_ins import HasOtherStateError, StandIns


def step_of(sizes):
    """Returns a function that XLA compiles, its variables, and arguments."""
    weights = [tf.Variable(tf.ones((size, size))) for size in sizes]
    count = tf.Variable(0, dtype=tf.int64)

    @tf.function(jit_compile=True, autograph=False)
    def step(batch):
        x = batch["x"]
        for each in weights:
            x = tf.tanh(x @ each) @ tf.transpose(each)
            each.assign_add(0.1 * tf.ones_like(each))
        count.assign_add(1)
        return {"loss": tf.reduce_sum(x)}

    return step, [*weights, count], [{"x": tf.ones((4, sizes[0]))}]


def test_the_variables_stay_and_the_program_is_there():
    step, variables, arguments = step_of([8] * 3)
    before = [each.numpy() for each in variables]
    copies = StandIns(step.get_concrete_function(*arguments))
    copies.run(arguments)
    for each, value in zip(variables, before, strict=True):
        np.testing.assert_array_equal(each.numpy(), value)
    step(*arguments)
    assert step.experimental_get_tracing_count() == 1
    np.testing.assert_allclose(variables[0].numpy(), 1.1)
    assert variables[-1].numpy() == 1


def test_the_function_runs_at_once_afterwards():
    step, _, arguments = step_of([16] * 60)
    concrete = step.get_concrete_function(*arguments)
    began = time.monotonic()
    thread = threading.Thread(target=StandIns(concrete).run, args=(arguments,))
    thread.start()
    thread.join()
    compiling, began = time.monotonic() - began, time.monotonic()
    step(*arguments)
    assert time.monotonic() - began < 0.3 * compiling


def test_other_state_is_refused():
    table = tf.lookup.experimental.MutableHashTable(tf.int64, tf.int64, 0)

    @tf.function(autograph=False)
    def step(x):
        table.insert(x, x)
        return x

    with pytest.raises(HasOtherStateError, match="no variable"):
        StandIns(step.get_concrete_function(tf.constant([1], tf.int64)))
