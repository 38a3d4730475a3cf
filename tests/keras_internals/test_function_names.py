"""Names of traced functions: the same whatever the process has made before."""

import re
import threading

import keras
import numpy as np
import pytest
import tensorflow as tf
from tensorflow.python.eager.polymorphic_function import concrete_function

import tfaccel
from tfaccel.keras_internals import function_names as names


@pytest.fixture
def given(monkeypatch):
    """The names that were given, in order, since `names` installed itself."""
    names._install()
    found = []

    def noted(make_name):
        def make(*arguments):
            found.append(make_name(*arguments))
            return found[-1]

        return make

    for module, name in names.NAMERS:
        monkeypatch.setattr(module, name, noted(getattr(module, name)))
    return found


def own(given):
    """Takes the names with own numbers from the list, and of each number the range.

    Ranges differ within one process, where nothing may have the same name twice.
    """
    within = [
        re.sub("[0-9]{11,}", lambda number: str(int(number[0]) % names.NUMBERS_OF_EACH), each)
        for each in given
    ]
    changed = [new for new, each in zip(within, given, strict=True) if new != each]
    given.clear()
    return changed


class Branch(keras.layers.Layer):
    """A branch, which has a gradient."""

    def call(self, x):
        return tf.cond(tf.reduce_sum(x) > 0, lambda: 2 * x, lambda: x)

    def compute_output_shape(self, shape):
        return shape


def fit_and_evaluate(*, evaluates_first=False):
    keras.backend.clear_session()
    run = tfaccel.setup(gpu_ids=(), xla=False)
    with run.scope():
        model = keras.Sequential([keras.Input([2]), keras.layers.Dense(2), Branch()])
    run.compile(model, "sgd", "mse")
    x = np.ones([4, 2], np.float32)
    if evaluates_first:
        model.evaluate(x, x, verbose=0)
    model.fit(x, x, verbose=0)
    model.evaluate(x, x, verbose=0)
    model.predict(x, verbose=0)


def test_names_of_steps_do_not_depend_on_what_was_made_before(given):
    fit_and_evaluate()
    first = own(given)
    assert any("_grad_" in name for name in first)
    tf.constant(0) + tf.constant(1)  # takes numbers of the process's count
    fit_and_evaluate()
    assert own(given) == first


@pytest.mark.slow
def test_names_of_steps_do_not_depend_on_which_is_first(given):
    fit_and_evaluate()
    first = own(given)
    fit_and_evaluate(evaluates_first=True)
    assert sorted(own(given)) == sorted(first)


def number_of_a_name():
    name = concrete_function._inference_name("step")
    return int(name.removeprefix("__inference_step_"))


def test_functions_have_not_the_same_numbers():
    first, second = (names.alike(number_of_a_name, names.own_numbers()) for _ in range(2))
    numbers = [first(), second(), first(), second()]
    assert len({*numbers}) == 4
    assert min(numbers) >= names.NUMBERS_OF_EACH


def test_other_threads_have_the_process_s_count():
    numbers = []

    def both():
        thread = threading.Thread(target=lambda: numbers.append(number_of_a_name()))
        thread.start()
        thread.join()
        numbers.append(number_of_a_name())

    names.alike(both, names.own_numbers())()
    other, own = numbers
    assert own >= names.NUMBERS_OF_EACH > other


def test_an_error_ends_it():
    with pytest.raises(ZeroDivisionError):
        names.alike(lambda: 1 / 0, names.own_numbers())()
    assert number_of_a_name() < names.NUMBERS_OF_EACH
