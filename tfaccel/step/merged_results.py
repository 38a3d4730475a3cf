"""Results of metrics that a step computes with, as one device has them at that place in the step.

Each replica holds a part of a metric's state. A log that is the result is computed again after the
step, from the state of all replicas. But a step may also compute with a result: a root of it, a
learning rate, a score of two results. Then the step is traced again, and each `result()` is
computed from the state that the replicas have merged at that place.

    merging = MergedResults(handler, replica, turn=None)
    result = merging.result(updates, metric, metric.result)
"""

import contextlib
from collections.abc import Callable, Iterator

import keras
import tensorflow as tf

from tfaccel.keras_internals.one_replica import reading_as
from tfaccel.keras_internals.recording import JoinsRowsError
from tfaccel.keras_internals.row_operations import assigned, noticing
from tfaccel.keras_internals.variables import value_of


class UsesResultsError(JoinsRowsError):
    """A step computes with the result of a metric, and the replicas' results are not merged."""


class MergedResults:
    """Merges the states of metrics where a step asks for a result."""

    def __init__(self, handler, replica, *, turn: Callable[[], bool] | None):
        """Takes what joins the replicas.

        Args:
          handler: the `Rows` of the step.
          replica: the replica.
          turn: waits for the other parts of the batch, and returns True in one of them. None if
            there is one part.
        """
        self._handler, self._replica, self._turn = handler, replica, turn

    def result(self, updates, metric, compute: Callable):
        """Returns `compute()`, the result of a metric, of the state of all replicas."""
        with noticing(on=False):
            # Each part has made its updates now, of the same variables. One of them gives these.
            is_first = self._turn is None or self._turn()
            variables = _distinct(metric.variables)
            states = updates.merged_now(metric, variables, self, is_first=is_first)
            states = [tf.stop_gradient(each) for each in states]
            with reading_as(variables, states):
                result = compute()
                return tf.nest.map_structure(tf.convert_to_tensor, result)

    # What `Updates.merged_now` needs.

    def totals(self, values: list[tf.Tensor], *, is_first: bool = True) -> list[tf.Tensor]:
        """Returns the sums of the replicas' values. With `is_first` false, zeros are added."""
        numbers = [tf.cast(each, tf.int32) if each.dtype.is_bool else each for each in values]
        numbers = numbers if is_first else [tf.zeros_like(each) for each in numbers]
        sums = self._handler.totals(numbers)
        return [tf.cast(each, own.dtype) for each, own in zip(sums, values, strict=True)]

    def stacked(self, values: list[tf.Tensor], *, is_first: bool) -> list[tf.Tensor]:
        """Returns the replicas' values, [replicas, ...] each."""
        placed = [among_zeros(each, self._replica) for each in values]
        return self.totals(placed, is_first=is_first)

    def mean(self, value: tf.Tensor) -> tf.Tensor:
        """Returns the mean of the replicas' values, weighted by their rows."""
        return self._handler.mean_by_rows(value)

    def gathered(self, rows: tf.Tensor, times: int | None) -> tf.Tensor:
        """Returns the rows of all replicas."""
        return self._handler.all_rows(rows, times)


def among_zeros(value: tf.Tensor, replica) -> tf.Tensor:
    """Returns [replicas, ...]: the replica's value in its place, and zeros elsewhere."""
    places = [tf.zeros_like(value)] * replica.num_replicas
    places[replica.index] = value
    return tf.stack(places)


def states_of(variables: list[keras.Variable]) -> list[tf.Tensor]:
    """Returns the values that variables have at this place."""
    return [tf.identity(value_of(each)) for each in variables]


def _distinct(variables) -> list:
    return list({id(each): each for each in variables}.values())


@contextlib.contextmanager
def put_back(variables: list) -> Iterator[None]:
    """After the context, which may assign the variables, they have the values of before."""
    before = states_of(variables)
    with assigned():
        yield
        for variable, value in zip(variables, before, strict=True):
            variable.assign(value)
