"""The operations of a step whose values may cover rows, and the context that hands them over.

    with handled_by(handler, model):
        logs = step(batch)

A handler is told of every reduction, product, row count, gradient and collective of the step. It
returns what the step gets instead. `Handler` computes all of them from two operations that its
subclasses have: a sum and a gathering over the replicas.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence

import tensorflow as tf

from tfaccel.keras_internals import row_operations
from tfaccel.keras_internals.made_operations import told_of_operations
from tfaccel.keras_internals.model_view import metrics_that_update
from tfaccel.keras_internals.replica import Replica
from tfaccel.runtime import collectives

# What an axis or a number is.
SAME, OWN, ALL = "same", "own rows", "all rows"


def unnoticed() -> contextlib.AbstractContextManager:
    """Returns a context in which a handler computes what the step did not write."""
    return row_operations.noticing(on=False)


class Handler:
    """Computes the operations of a step: a `row_operations.Handler`, and what collectives need."""

    unnoticed = staticmethod(unnoticed)

    def __init__(self, replica: Replica, num_replicas: int, *, reduces_rows: bool):
        """Takes the replica, and whether a reduction over rows covers the rows of all replicas."""
        self.rank, self.local_rank = replica.index, replica.local_index
        self.num_replicas, self.reduces_rows = num_replicas, reduces_rows

    # What differs between recording and computing.

    def tags(self, kind: str, sizes: Sequence) -> tuple[str, ...]:
        """Returns what each size of this call of an operation is."""
        raise NotImplementedError

    def sum(self, value: tf.Tensor) -> tf.Tensor:
        """Returns the sum of the replicas' values, with its gradient."""
        raise NotImplementedError

    def all_gather(self, value, axis: int = 0) -> tf.Tensor:
        """Returns the replicas' values, concatenated in the order of their ranks."""
        raise NotImplementedError

    def rows(self) -> tf.Tensor:
        """Returns the number of rows of all replicas, as a multiple of this replica's."""
        raise NotImplementedError

    def stacked(self, value: tf.Tensor, kind: str) -> tf.Tensor:
        """Returns the replicas' values, [replicas, ...], before a reduction of this kind."""
        raise NotImplementedError

    def own_gradients(self) -> contextlib.AbstractContextManager:
        """Returns a context in which the user's custom gradients are checked, if they run."""
        return contextlib.nullcontext()

    def section(self, kind: str, number: int | None = 0):
        """Returns a context for a loop or branches, or for a part of them."""
        raise NotImplementedError

    def number(self, kind: str, numbers: Sequence[float | None]) -> int | None:
        """Returns the index of the only number that is known when traced; else None."""
        known = [index for index, each in enumerate(numbers) if each is not None]
        return known[0] if len(known) == 1 else None

    # What a handler is told of besides.

    made: Callable[[tf.Operation], None] | None = None  # takes each operation of the user's code

    def compares(self) -> None:
        """Is told that the step compares all rows of the replica with each other."""

    # Reductions.

    def reduced(self, kind: str, direct: Callable, x, axes: list[int], keep_dims: bool):
        """Reduces x over some axes, and over the replicas if one of the axes has rows."""
        over = self.tags(kind, [x.shape[each] for each in axes])
        others = [each for each in range(x.shape.rank) if each not in axes]
        beside = self.tags("beside", [x.shape[each] for each in others])
        if OWN not in over or not self.reduces_rows:
            return direct(x)
        if OWN in beside:
            self.compares()
            return direct(x)
        if kind == "sum":
            return self.sum(direct(x))
        if kind == "mean":
            return self._mean(direct, x, axes, keep_dims)
        if kind == "norm":
            return tf.sqrt(self.sum(tf.square(direct(x))))
        return _REDUCED[kind](self.stacked(direct(x), kind), 0)

    def _mean(self, direct: Callable, x: tf.Tensor, axes: list[int], keep_dims: bool):
        # A mask may have chosen some of the rows. Without a graph, every size is known.
        if tf.executing_eagerly() or None in (x.shape[each] for each in axes):
            count = tf.cast(tf.reduce_prod([tf.shape(x)[each] for each in axes]), x.dtype)
            return self.sum(tf.reduce_sum(x, axes, keep_dims)) / self.sum(count)
        return self.sum(direct(x) / tf.cast(self.rows(), x.dtype))

    def contracted(self, direct: Callable, summed: list[tuple[tf.Tensor, int]]):
        """Computes a product, and sums it over the replicas if it is a sum over rows."""
        tags = self.tags("product", [tensor.shape[axis] for tensor, axis in summed])
        return self.sum(direct()) if OWN in tags and self.reduces_rows else direct()

    def segmented(self, kind: str, direct: Callable, x):
        """Reduces groups of entries along axis 0, and over the replicas if these are rows."""
        groups = direct()
        (before,) = self.tags("segments", [x.shape[0]])
        (after,) = self.tags("beside", [groups.shape[0]])
        if before != OWN or not self.reduces_rows:
            return groups
        if after == OWN:  # with one group a row, or with a number that depends on the rows
            self.compares()
            return groups
        if kind == "sum":
            return self.sum(groups)
        return _REDUCED[kind](self.stacked(groups, kind), 0)

    def squares(self, direct: Callable, x):
        """Returns half the sum of squares, over the replicas if an axis has rows."""
        tags = self.tags("squares", x.shape)
        return self.sum(direct(x)) if OWN in tags and self.reduces_rows else direct(x)

    # Numbers of rows.

    def scaled(self, direct: Callable, x, y, *, divides: bool):
        """Multiplies or divides. A number of own rows becomes the number of all rows."""
        numbers = _number(x), _number(y)
        index = self.number("scale", numbers)
        if index is None:
            return direct(x, y)
        number, other = numbers[index], (y, x)[index]
        of_all = self._of_all_rows("scale", number)
        if of_all is number:
            return direct(x, y)
        of_all = tf.cast(of_all, tf.convert_to_tensor(other).dtype)
        return direct(of_all, y) if index == 0 else direct(x, of_all)

    def counted(self, direct: Callable, x, number: int):
        """Casts a whole number. A number of own rows becomes the number of all rows."""
        count = direct()
        if self.number("count", [number]) is None:
            return count
        of_all = self._of_all_rows("count", number)
        return count if of_all is number else tf.cast(of_all, count.dtype)

    def _of_all_rows(self, kind: str, number: float):
        """Returns a number as one device has it: `number` itself if it depends on no own rows."""
        (part,) = self.tags(kind, [number])
        if part == SAME or not self.reduces_rows:
            return number
        if part.is_inverse:
            return 1 / (1 / number + (self.rows() - 1) * part.size)
        return number + (self.rows() - 1) * part.size

    # Collectives that the step calls.

    def all_reduce(self, value, op: str) -> tf.Tensor:
        """Reduces one value of each replica. `op` is "sum", "mean", "min" or "max"."""
        value = tf.convert_to_tensor(value)
        if op in ("min", "max") and value.dtype.is_bool:
            op = {"min": "all", "max": "any"}[op]
        if op not in ("sum", "mean"):
            return _REDUCED[op](self.stacked(value, op), 0)
        total = self.sum(value)
        return total / tf.cast(self.num_replicas, value.dtype) if op == "mean" else total

    def broadcast(self, value, root_rank: int) -> tf.Tensor:
        """Returns the value of one replica."""
        raise NotImplementedError


_REDUCED = {
    "max": tf.reduce_max,
    "min": tf.reduce_min,
    "prod": tf.reduce_prod,
    "all": tf.reduce_all,
    "any": tf.reduce_any,
}
NEUTRAL = {
    "max": lambda dtype: dtype.min if dtype.is_integer else float("-inf"),
    "min": lambda dtype: dtype.max if dtype.is_integer else float("inf"),
    "prod": lambda _: 1,
    "all": lambda _: True,
    "any": lambda _: False,
}


def _number(value) -> float | None:
    """Returns a float that is known when traced; None for anything else."""
    if isinstance(value, int | float):
        return float(value)
    if not isinstance(value, tf.Tensor) or value.shape.rank != 0 or not value.dtype.is_floating:
        return None
    is_known = not tf.is_symbolic_tensor(value) or value.op.type == "Const"
    return float(tf.get_static_value(value)) if is_known else None


@contextlib.contextmanager
def handled_by(handler, model) -> Iterator[None]:
    """Within the context, the operations of the model's step go through the handler."""
    made = handler.made
    with (
        contextlib.nullcontext() if made is None else told_of_operations(made),
        handler.own_gradients(),
        row_operations.traced_anew(),  # not as another replica's, or as in a plan
        row_operations.operations_by(handler, metrics=metrics_that_update(model)),
        collectives.within_step(handler),
    ):
        yield
