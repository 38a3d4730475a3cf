"""Names of traced functions: the same whatever the process has made before."""

import itertools
import threading

import pytest
import tensorflow as tf
from tensorflow.python.eager.polymorphic_function import concrete_function

from tfaccel.step import names


@pytest.fixture
def as_in_a_new_process(monkeypatch):
    return lambda: monkeypatch.setattr(names, "_order", itertools.count(1))


def traced_names():
    """Those of a function with a branch in it, and of that branch."""
    found = []

    @tf.function(autograph=False)
    def step(x):
        inner = tf.function(lambda x: 2 * x, autograph=False).get_concrete_function(x)
        y = tf.cond(x > 0, lambda: inner(x), lambda: x)
        graph = tf.compat.v1.get_default_graph()
        found.extend(each.signature.name for each in graph.as_graph_def().library.function)
        return y

    assert names.alike(step)(tf.constant(1.0)) == 2
    return sorted([*found, step.get_concrete_function(tf.TensorSpec((), tf.float32)).name.decode()])


def test_they_do_not_depend_on_what_was_made_before(as_in_a_new_process):
    as_in_a_new_process()
    first = traced_names()
    assert len(first) == 4
    tf.constant(0) + tf.constant(1)  # takes numbers of the process's count
    as_in_a_new_process()
    assert traced_names() == first


def test_two_functions_have_not_the_same(as_in_a_new_process):
    as_in_a_new_process()
    assert not {*traced_names()} & {*traced_names()}


def number_of_a_name():
    name = concrete_function._inference_name("step")
    return int(name.removeprefix("__inference_step_"))


def test_other_threads_have_the_process_s_count():
    numbers = []

    def both():
        thread = threading.Thread(target=lambda: numbers.append(number_of_a_name()))
        thread.start()
        thread.join()
        numbers.append(number_of_a_name())

    names.alike(both)()
    other, own = numbers
    assert own >= names.NUMBERS_OF_EACH > other


def test_an_error_ends_it():
    with pytest.raises(ZeroDivisionError):
        names.alike(lambda: 1 / 0)()
    assert number_of_a_name() < names.NUMBERS_OF_EACH
