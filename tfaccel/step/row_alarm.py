"""Notices that a step of Keras's own may need the rows of all replicas, and ends its trace."""

import contextlib
from collections.abc import Callable, Sequence

import tensorflow as tf

from tfaccel.keras_internals import own_gradients
from tfaccel.keras_internals.recording import JoinsRowsError
from tfaccel.step import compared_rows
from tfaccel.step.row_handler import unnoticed

_BY_ITSELF = "it joins values of the replicas by itself"


class MayJoinError(Exception):
    """A step reduces an axis that may have rows, so only a plan knows what to do."""


class AsksRowsError(Exception):
    """A step gathers values, so that its trace needs the number of rows of each worker's batch."""


class Alarm:
    """A handler that raises an error where a step may need the rows of all replicas.

    Steps of Keras's own seldom do. So they are traced with an alarm first, which costs no plan, and
    again in another way only if it has raised.
    """

    unnoticed = staticmethod(unnoticed)

    def __init__(self, num_rows: int | None):
        """Takes the number of rows of the traced batch; None if a plan joins no reduction."""
        self._num_rows = None if num_rows is None else max(num_rows, 1)

    def _check(self, sizes: Sequence) -> None:
        if self._num_rows is None:
            return
        if any(size is None or (size > 0 and size % self._num_rows == 0) for size in sizes):
            raise MayJoinError

    def made(self, op: tf.Operation) -> None:
        """Raises if an operation of the user's code may compare or reorder rows."""
        if self._num_rows is not None and compared_rows.may_compare(op, self._num_rows):
            raise MayJoinError

    def reduced(self, kind: str, direct: Callable, x, axes: list[int], keep_dims: bool):
        """Raises if one of the axes may have rows."""
        self._check([x.shape[each] for each in axes])
        return direct(x)

    def contracted(self, direct: Callable, summed: list[tuple[tf.Tensor, int]]):
        """Raises if an axis that is summed may have rows."""
        self._check([tensor.shape[axis] for tensor, axis in summed])
        return direct()

    def segmented(self, kind: str, direct: Callable, x):
        """Raises if axis 0 may have rows."""
        self._check(x.shape[:1])
        return direct()

    def squares(self, direct: Callable, x):
        """Raises if an axis may have rows."""
        self._check(x.shape)
        return direct(x)

    def own_gradients(self) -> contextlib.AbstractContextManager:
        """Returns a context that raises where the user's code computes a gradient.

        Here, a gradient arrives as that of the mean of the replica's own rows. What is clipped
        or normalized must be the gradient of the mean of all rows.
        """
        return own_gradients.none_in_step()

    def section(self, kind: str, number: int | None = 0):
        """Returns a context that does nothing."""
        return contextlib.nullcontext()

    def scaled(self, direct: Callable, x, y, *, divides: bool):
        """Computes the operation."""
        return direct(x, y)

    def counted(self, direct: Callable, x, number: int):
        """Computes the operation."""
        return direct()

    def gradient(self, direct: Callable, target, sources, output_gradients):
        """Computes the gradients."""
        return direct(output_gradients)

    @property
    def num_replicas(self):
        """Raises, because the step joins the replicas by itself."""
        raise JoinsRowsError(_BY_ITSELF)

    rank = local_rank = num_replicas

    def all_reduce(self, value, op: str):
        """Raises, because the step joins the replicas by itself."""
        raise JoinsRowsError(_BY_ITSELF)

    def all_gather(self, value, axis: int = 0):
        """Raises, because the step joins the replicas by itself."""
        raise JoinsRowsError(_BY_ITSELF)

    def broadcast(self, value, root_rank: int):
        """Raises, because the step joins the replicas by itself."""
        raise JoinsRowsError(_BY_ITSELF)
