"""Makes a step of the model's own compute, on each replica, what one device computes.

Each replica runs the step on its own rows, so a sum over rows is only a part of the sum that the
step means. While the step is traced within `whole_batch`, every such value is completed where the
step computes it. The code behind it continues with the value of one device:

  - A reduction over rows (a sum, a mean, a product that sums over rows, ...) covers the rows of all
    replicas. A number of rows that the step divides by is the number of all rows.
  - `tape.gradient` with respect to weights returns the gradient of the loss of all rows.
  - `apply_gradients` updates the weights where the step calls it.
  - The collectives of tfaccel and of `tf.distribute` join the replicas.

    plan = planned(model, step, replica, batch)   # traces the step twice, and runs nothing
    rows = Rows(replica, plan, batch, weight=..., reduce=replica.all_reduce)
    with whole_batch(model, rows):
        logs = step(batch)

Which axes of a tensor are rows? The plan knows it from the two traces. The second one has twice as
many rows and seven times as many replicas. An axis that is twice as long has this replica's rows.
An axis that is 14 times as long has rows that were gathered from all replicas. An axis of the same
length has no rows. Numbers are recognized in the same way, so `loss / x.shape[0]` divides by the
rows of all replicas, and `loss / (x.shape[0] - 1)` by one less.

Why the gradients are right: the replicas differentiate J, the sum over replicas of share * loss.
The shares of all replicas add up to 1. The gradient of a sum over replicas is the sum over replicas
of the gradients. If every replica has the loss of all rows, J is that loss. If each has the mean of
its own rows, J is the mean of all rows, because a replica's share is its part of all rows.
"""

import contextlib
import dataclasses
import functools
import logging
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import tensorflow as tf

from tfaccel.common.errors import UserError
from tfaccel.common.run_log import summary
from tfaccel.common.tables import cleaned
from tfaccel.keras_internals import own_gradients, row_operations
from tfaccel.keras_internals.model_view import metrics_that_update
from tfaccel.keras_internals.never_run import never_run, placeholders, spec_of
from tfaccel.keras_internals.recording import JoinsRowsError, recorded
from tfaccel.keras_internals.replica import Replica
from tfaccel.keras_internals.stateful import any_rows
from tfaccel.keras_internals.unwound import unwound
from tfaccel.runtime import collectives
from tfaccel.step.planned_calls import END, Call, PlannedCalls, begin, end_of

log = logging.getLogger("tfaccel")

# The second trace of a plan, as multiples of the first. With 7 times the replicas, a number such as
# rows - 1 is not taken for one of replicas.
MORE_ROWS, MORE_REPLICAS = 2, 7

# What an axis or a number is, by the ratio of its sizes in the two traces of a plan.
SAME, OWN, ALL = "same", "own rows", "all rows"
_BY_RATIO = {1: SAME, MORE_ROWS: OWN, MORE_ROWS * MORE_REPLICAS: ALL}
_NUMBERS = ("count", "scale")
_NOT_JOINED = ("count", "scale", "beside", "target", "source", "gather")  # kinds of calls


class Part(NamedTuple):
    """The part of a number that is proportional to the replica's own rows.

    Attributes:
      size: the part, as in 5 of 5 rows - 1 = 4.
      is_inverse: whether it is a part of 1 / number.
    """

    size: float
    is_inverse: bool = False


@dataclasses.dataclass
class Plan:
    """What two traces of a step tell about the operations that the step calls.

    Attributes:
      calls: for each operation in order, its kind and what each of its sizes is; None if the step
        could not be traced with more rows.
      reduces_itself: whether the step calls all_reduce: it then completes its sums by itself.
      joins: whether a value, other than a gradient, must be joined over the replicas.
      gathers: whether the step gathers values of all replicas.
    """

    calls: list[Call] | None
    reduces_itself: bool
    joins: bool
    gathers: bool


def _unnoticed() -> contextlib.AbstractContextManager:
    """Returns a context in which a handler computes what the step did not write."""
    return row_operations.noticing(on=False)


class _Handler:
    """Computes the operations of a step: a `row_operations.Handler`, and what collectives need."""

    unnoticed = staticmethod(_unnoticed)

    def __init__(self, replica: Replica, num_replicas: int, *, reduces_rows: bool):
        """Takes the replica, and whether a reduction over rows covers the rows of all replicas."""
        self.rank, self.local_rank = replica.index, replica.local_index
        self.num_replicas, self._reduces_rows = num_replicas, reduces_rows

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

    # Reductions.

    def reduced(self, kind: str, direct: Callable, x, axes: list[int], keep_dims: bool):
        """Reduces x over some axes, and over the replicas if one of the axes has rows."""
        over = self.tags(kind, [x.shape[each] for each in axes])
        others = [each for each in range(x.shape.rank) if each not in axes]
        beside = self.tags("beside", [x.shape[each] for each in others])
        if OWN not in over or not self._reduces_rows:
            return direct(x)
        if OWN in beside:
            say_pairs()
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
        return self.sum(direct()) if OWN in tags and self._reduces_rows else direct()

    def segmented(self, kind: str, direct: Callable, x):
        """Reduces groups of entries along axis 0, and over the replicas if these are rows."""
        groups = direct()
        (before,) = self.tags("segments", [x.shape[0]])
        (after,) = self.tags("beside", [groups.shape[0]])
        if before != OWN or not self._reduces_rows:
            return groups
        if after == OWN:  # with one group a row, or with a number that depends on the rows
            say_pairs()
            return groups
        if kind == "sum":
            return self.sum(groups)
        return _REDUCED[kind](self.stacked(groups, kind), 0)

    def squares(self, direct: Callable, x):
        """Returns half the sum of squares, over the replicas if an axis has rows."""
        tags = self.tags("squares", x.shape)
        return self.sum(direct(x)) if OWN in tags and self._reduces_rows else direct(x)

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
        if part == SAME or not self._reduces_rows:
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
_NEUTRAL = {
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
    is_known = hasattr(value, "numpy") or value.op.type == "Const"
    return float(tf.get_static_value(value)) if is_known else None


def say_pairs() -> None:
    """Warns that a step compares rows with each other, which each replica does with its own."""
    if not _said_pairs:
        _said_pairs.append(True)
        log.warning(
            "step: the step compares all rows of a batch with each other, so each replica compares "
            "only its own rows; gather the rows first, with tfaccel.collectives.all_gather"
        )


_said_pairs = []


def _by_size(why: str) -> None:
    """Says that a plan does not know which axes are rows."""
    summary(
        "step: axis 0 of each tensor is taken for rows where its size fits, because two traces of "
        "the step do not tell (%s)",
        why,
    )


class MayJoinError(Exception):
    """A step reduces an axis that may have rows, so only a plan knows what to do."""


class AsksRowsError(Exception):
    """A step gathers values, so that its trace needs the number of rows of each worker's batch."""


class Alarm:
    """A handler that raises an error where a step may need the rows of all replicas.

    It lets a step of Keras's own, which seldom does, be traced as if no step did.
    """

    unnoticed = staticmethod(_unnoticed)

    def __init__(self, num_rows: int | None):
        """Takes the number of rows of the traced batch; None if a plan joins no reduction."""
        self._num_rows = None if num_rows is None else max(num_rows, 1)

    def _check(self, sizes: Sequence) -> None:
        if self._num_rows is None:
            return
        if any(size is None or (size > 0 and size % self._num_rows == 0) for size in sizes):
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
        raise JoinsRowsError

    rank = local_rank = num_replicas

    def all_reduce(self, value, op: str):
        """Raises, because the step joins the replicas by itself."""
        raise JoinsRowsError

    def all_gather(self, value, axis: int = 0):
        """Raises, because the step joins the replicas by itself."""
        raise JoinsRowsError

    def broadcast(self, value, root_rank: int):
        """Raises, because the step joins the replicas by itself."""
        raise JoinsRowsError


# The plan.


class _Recorder(_Handler):
    """Records the sizes of operations, and joins nothing: what it traces never runs."""

    def __init__(self, replica: Replica, num_replicas: int, connected: list | None = None):
        """Takes which gradients exist, in order of the calls, as an earlier trace found it."""
        super().__init__(replica, num_replicas, reduces_rows=True)
        self.calls, self.reduces_itself = [], False
        self.connected, self._known = [], None if connected is None else iter(connected)

    def watching(self) -> contextlib.AbstractContextManager:
        """Returns a context in which the step is traced."""
        return contextlib.nullcontext()

    def apply(self, optimizer, gradients: list, variables: list) -> None:
        """Updates nothing."""

    def ends(self, logs: dict) -> None:
        """Takes the logs of the step, and needs none."""

    def tags(self, kind: str, sizes: Sequence) -> tuple[str, ...]:
        self.calls.append((kind, tuple(sizes)))
        return (SAME,) * len(sizes)

    def sum(self, value: tf.Tensor) -> tf.Tensor:
        return tf.identity(value)

    def all_gather(self, value, axis: int = 0) -> tf.Tensor:
        value = tf.convert_to_tensor(value)
        self.tags("gather", [value.shape[axis]])
        return tf.concat([value] * self.num_replicas, axis)

    def rows(self) -> tf.Tensor:
        return tf.constant(1.0)

    def stacked(self, value: tf.Tensor, kind: str) -> tf.Tensor:
        return tf.stack([value] * self.num_replicas)

    @contextlib.contextmanager
    def section(self, kind: str, number: int | None = 0) -> Iterator[None]:
        self.calls.append((begin(kind), (number,)))
        yield
        self.calls.append((END, ()))

    def all_reduce(self, value, op: str) -> tf.Tensor:
        self.reduces_itself = True
        return tf.identity(value)

    def broadcast(self, value, root_rank: int) -> tf.Tensor:
        self.tags("broadcast", [0])
        return tf.identity(value)

    def gradient(self, direct: Callable, target, sources, output_gradients):
        """Returns the gradients; in a later trace zeros, whose sizes are the same."""
        for each in tf.nest.flatten(target):
            self.tags("target", _shape(each))
        flat = tf.nest.flatten(sources)
        for each in flat:
            self.tags("source", _shape(each) if isinstance(each, tf.Tensor) else ())
        tensors = list(map(tf.convert_to_tensor, flat))
        connected = None if self._known is None else next(self._known, None)
        if connected is None:
            found = tf.nest.flatten(direct(output_gradients))
            connected = [each is not None for each in found]
        else:
            found = [tf.zeros(each.shape, each.dtype) for each in tensors]
        self.connected.append(connected)
        found = [
            tf.ensure_shape(tf.convert_to_tensor(each), of.shape) if exists else None
            for each, of, exists in zip(found, tensors, connected, strict=True)
        ]
        return tf.nest.pack_sequence_as(sources, found)


def planned(
    model,
    step: Callable,
    replica: Replica,
    batch,
    *,
    within: bool,
    watch: Callable[[_Recorder], _Recorder] = lambda recorder: recorder,
) -> Plan:
    """Traces a step twice, with different numbers of rows and replicas; nothing of it runs.

    Args:
      model: the model, within `as_replica`.
      step: the step, as a function of a batch.
      replica: the replica.
      batch: a nest of the replica's tensors.
      within: whether the step is to be traced within `Rows`. If not, the plan only tells whether
        the step joins values: Keras reduces its own losses, and the replicas' means are averaged.
      watch: a function from the handler of each trace to the one that is told of the step: see
        tfaccel/step/plain_steps.py.

    Raises:
      JoinsRowsError: a loss of Keras is no mean over rows, and `within` is false.
    """
    recorders, fault = [], "the operations depend on the number of rows"
    specs = tf.nest.map_structure(spec_of, batch)
    for more_rows, more_replicas in ((1, 1), (MORE_ROWS, MORE_REPLICAS)):
        connected = recorders[0].connected if recorders else None
        recorder = _Recorder(replica, replica.num_replicas * more_replicas, connected)
        handler = watch(recorder)
        try:
            with never_run("plan_of_rows"):
                inputs = placeholders(specs, times=more_rows)
                with (
                    any_rows(model, inputs),
                    unwound(),
                    recorded(model, replica, apply=handler.apply, joins=within),
                    row_operations.unassigned(),  # a queue need not hold so many rows
                    whole_batch(model, handler),
                    handler.watching(),
                ):
                    handler.ends(step(inputs))
        except JoinsRowsError:
            raise
        except Exception as error:
            fault = f"with {more_rows} times the rows: {cleaned(str(error))}"
            break
        recorders.append(recorder)
    first = recorders[0] if recorders else _Recorder(replica, replica.num_replicas)
    calls = None
    kinds = [[kind for kind, _ in each.calls] for each in recorders]
    if len(recorders) == 2 and kinds[0] == kinds[1]:
        pairs = zip(recorders[0].calls, recorders[1].calls, strict=True)
        part = functools.partial(_part, rows=_rows_of(specs), num_replicas=replica.num_replicas)
        calls = [
            Call(kind, (part(*sizes, *more),) if kind in _NUMBERS else _tags(sizes, more), sizes)
            for (kind, sizes), (_, more) in pairs
        ]
        calls = _without_loops_over_rows(calls)
    elif within and (recorders or tf.executing_eagerly()):  # else the step itself cannot be traced
        _by_size(fault)
    joins = calls is None or any(OWN in tags for kind, tags in calls if _joins(kind))
    gathers = any(kind == "gather" for kind, _ in first.calls)
    joins |= first.reduces_itself or gathers or any(kind == "broadcast" for kind, _ in first.calls)
    return Plan(calls, first.reduces_itself, joins, gathers)


def _without_loops_over_rows(calls: list) -> list:
    """Returns the calls but those in a loop with a round for each row, such as `tf.map_fn`.

    What such a round computes belongs to one row, so nothing of it is joined.
    """
    kept, index = [], 0
    while index < len(calls):
        kept.append(calls[index])
        if calls[index] == (begin("loop"), (OWN,)):
            end = end_of(calls, index)
            if any(OWN in tags for kind, tags in calls[index + 1 : end] if _joins(kind)):
                say_pairs()
            index = end - 1
        index += 1
    return kept


def _joins(kind: str) -> bool:
    """Returns whether a call joins values if one of its sizes has own rows."""
    return kind not in (*_NOT_JOINED, END) and not kind.startswith(begin(""))


def _rows_of(specs) -> int:
    """Returns the number of rows of a batch; 1 if it is not known."""
    shapes = [each.shape for each in tf.nest.flatten(specs) if each is not None]
    return next((each[0] for each in shapes if each.rank and each[0]), 1)


def _tags(sizes: tuple, more: tuple) -> tuple[str, ...]:
    """Returns what sizes are, from their values in both traces."""
    if len(sizes) != len(more):
        return (SAME,) * len(sizes)
    return tuple(map(_tag, sizes, more, range(len(sizes))))


def _tag(size, more, index: int) -> str:
    if size is None:  # known only when the step runs, as what a mask leaves of the rows
        return OWN if index == 0 else SAME
    return SAME if not size else _BY_RATIO.get(more / size, SAME)


def _part(number: float, more: float, *, rows: int, num_replicas: int) -> str | Part:
    """Returns which part of a number is proportional to the rows of its trace; or SAME.

    The number is multiple * what + constant, where `what` is the own rows, the replicas, or the
    rows of all. If several would do, it is probably the one with the smallest multiple.
    """
    if number == more:
        return SAME
    is_inverse = 0 < more < number <= 1
    if is_inverse:
        number, more = 1 / number, 1 / more
    part = (more - number) / (MORE_ROWS - 1)
    if part == number:
        return Part(part, is_inverse)
    growth = {  # of each, from the first trace to the second
        OWN: rows * (MORE_ROWS - 1),
        SAME: num_replicas * (MORE_REPLICAS - 1),
        ALL: rows * num_replicas * (MORE_ROWS * MORE_REPLICAS - 1),
    }
    multiples = {what: (more - number) / size for what, size in growth.items()}
    whole = {what: size for what, size in multiples.items() if abs(size - round(size)) < 1e-6}
    is_own = not whole or min(whole, key=lambda what: abs(whole[what])) == OWN
    return Part(part, is_inverse) if is_own else SAME


def _shape(value) -> tuple:
    shape = getattr(value, "shape", None)
    return () if shape is None or shape.rank is None else tuple(shape)


# The replica's rows.


class Rows(_Handler):
    """The rows of one replica, as a part of the rows of all replicas, while a step is traced."""

    def __init__(
        self,
        replica: Replica,
        plan: Plan,
        batch,
        *,
        num_rows: int,
        weight: float | tf.Tensor,
        reduce: Callable[[list[tf.Tensor]], list[tf.Tensor]],
        rows_of_all: Sequence[int] | None,
        reduces_rows: bool = True,
        gradients_as: str | None = None,
        joins_in_loops: bool = False,
    ):
        """Joins the replicas' numbers of rows.

        Args:
          replica: the replica.
          plan: the plan of the step.
          batch: the replica's batch, or the row that stands in if it has none.
          num_rows: the number of rows that the replica has, padding included; may be 0.
          weight: the number of rows that count, in any unit.
          reduce: sums tensors over the replicas.
          rows_of_all: the number of rows of each replica; None if it is known only when the step
            runs.
          reduces_rows: whether a reduction over rows covers the rows of all replicas.
          gradients_as: the dtype in which gradients are sent; None for their own dtype.
          joins_in_loops: whether `reduce` works in a `tf.while_loop`.
        """
        reduces_rows = reduces_rows and not plan.reduces_itself
        super().__init__(replica, replica.num_replicas, reduces_rows=reduces_rows)
        self._reduce_outside, self._gradients_as, self._num_rows = reduce, gradients_as, num_rows
        self._calls, self._by_size = PlannedCalls(plan.calls or ()), plan.calls is None
        self._joins_in_loops, self._sections = joins_in_loops, []
        self._traced = max(num_rows, 1)  # one row stands in for none
        self._rows_of_all = rows_of_all
        own = tf.stack([tf.cast(weight, tf.float32), tf.constant(num_rows, tf.float32)])
        (total,) = reduce([own])
        self._share = tf.math.divide_no_nan(own[0], total[0])
        self._rows = total[1] / self._traced
        self._graph = tf.compat.v1.get_default_graph()
        self._kept = tf.nest.flatten(batch, expand_composites=True)
        self._depends = {id(each): True for each in self._kept}  # on the replica's own rows

    def rows(self) -> tf.Tensor:
        """Returns the number of rows of all replicas, as a multiple of this replica's."""
        return self._rows

    def tags(self, kind: str, sizes: Sequence) -> tuple[str, ...]:
        """Returns what each size of this call is: what the plan says, or its size."""
        if not self._by_size:
            if tf.executing_eagerly():  # numbers of no rows, hidden by another one of this replica
                self._calls.pass_over(kind, lambda own, tags: own in _NUMBERS and tags == (SAME,))
            tags = self._calls.take(kind, len(sizes))
            if tags is not None:
                return tags
            self._leave_plan(kind)
        return tuple(self._tag(kind, *each) for each in enumerate(sizes))

    def number(self, kind: str, numbers: Sequence[float | None]) -> int | None:
        """Returns the index of the number that was known when the plan was traced; else None.

        In Python every number is known. So it is the planned one, by its kind and its value.
        """
        if not tf.executing_eagerly():
            return super().number(kind, numbers)
        if self._by_size:
            is_one = [each is not None and self._tag(kind, 0, each) != SAME for each in numbers]
        else:
            planned = self._calls.following()
            is_one = [
                planned and (planned[0], planned.sizes[:1]) == (kind, (each,)) for each in numbers
            ]
        return max((index for index, each in enumerate(is_one) if each), default=None)

    def _leave_plan(self, kind: str) -> None:
        planned = self._calls.following()
        _by_size(f"{kind} follows where the plan has {planned and planned[0]}")
        self._by_size = True

    @contextlib.contextmanager
    def section(self, kind: str, number: int | None = 0) -> Iterator[None]:
        """Joins nothing in a loop that has a round for each row."""
        with contextlib.ExitStack() as contexts:
            tags = None
            if not self._by_size:
                is_part = kind not in ("loop", "branches")
                tags = contexts.enter_context(self._calls.section(kind, is_part=is_part))
                if tags is None:
                    self._leave_plan(kind)
            is_own = number == self._traced if tags is None else OWN in tags
            if kind == "loop" and is_own:
                contexts.enter_context(row_operations.noticing_nothing())
            self._sections.append(kind)
            yield
            self._sections.pop()

    def _reduce(self, values: list[tf.Tensor]) -> list[tf.Tensor]:
        if "loop" in self._sections and not self._joins_in_loops:
            raise UserError(
                "the step joins values of all replicas in a tf.while_loop or tf.map_fn, where a "
                "replica may not wait for another; use a loop of Python, or compute the values "
                "before it"
            )
        return self._reduce_outside(values)

    def _tag(self, kind: str, index: int, size) -> str:
        """Returns what a size probably is, if the plan does not tell."""
        if kind in _NUMBERS:
            rows = self._traced
            is_inverse = size == 1 / rows and rows > 1
            return Part(rows, is_inverse) if is_inverse or size == rows else SAME
        is_multiple = size is None or (size > 0 and size % self._traced == 0)
        return OWN if index == 0 and is_multiple else SAME

    def own_gradients(self) -> contextlib.AbstractContextManager:
        """Returns a context in which the user's custom gradients may not mix rows."""
        if not self._reduces_rows:
            return contextlib.nullcontext()
        return own_gradients.rows_kept_apart(self._traced)

    # Joins.

    def sum(self, value: tf.Tensor) -> tf.Tensor:
        """Returns the sum of the replicas' values, with its gradient."""
        return self._sums([value])[0]

    def _sums(self, values: list[tf.Tensor]) -> list[tf.Tensor]:
        """Returns the sums of the replicas' values. A replica without rows adds zeros."""

        @tf.custom_gradient
        def summed(*values):
            def gradient(*upstream):
                return self._sums(list(upstream))

            own = values if self._num_rows else [tf.zeros_like(each) for each in values]
            return self._reduce(list(own)), gradient

        return [self._joined(each) for each in summed(*values)]

    def stacked(self, value: tf.Tensor, kind: str) -> tf.Tensor:
        """Returns the replicas' values, [replicas, ...]."""
        if not self._num_rows:
            neutral = tf.cast(_NEUTRAL[kind](value.dtype), value.dtype)
            value = _instead(value, tf.fill(tf.shape(value), neutral))
        return self._joined(self._placed(value[tf.newaxis], 0, [1] * self.num_replicas))

    def all_gather(self, value, axis: int = 0) -> tf.Tensor:
        """Returns the replicas' values, concatenated in the order of their ranks."""
        value = tf.convert_to_tensor(value)
        (tag,) = self.tags("gather", [value.shape[axis]])
        axis %= value.shape.rank
        size = value.shape[axis]
        if tag == OWN and not self._num_rows:  # without the row that stands in
            value = tf.gather(value, tf.zeros([0], tf.int32), axis=axis)
        return self._joined(self._placed(value, axis, self._sizes(value, axis, size, tag)))

    def _sizes(self, value: tf.Tensor, axis: int, size: int | None, tag: str):
        """Returns the size of each replica's value along an axis, a list or a tensor."""
        if size is not None and tag != OWN:
            return [size] * self.num_replicas
        is_known = size is not None and not tf.executing_eagerly()  # no mask has chosen rows
        if is_known and self._rows_of_all is not None:
            return [size * rows // self._traced for rows in self._rows_of_all]
        own = tf.one_hot(self.rank, self.num_replicas, dtype=tf.int64)
        (sizes,) = self._reduce([own * tf.shape(value, tf.int64)[axis]])
        return sizes

    def _placed(self, value: tf.Tensor, axis: int, sizes) -> tf.Tensor:
        """Returns the replicas' values one behind the other: their sum, each at its place.

        A sum is what XLA, TensorFlow and every gradient can do.
        """
        before, behind = _total(sizes[: self.rank]), _total(sizes[self.rank + 1 :])
        paddings = [[0, 0]] * value.shape.rank
        paddings[axis] = [before, behind]
        return self._added(tf.pad(value, paddings))

    def broadcast(self, value, root_rank: int) -> tf.Tensor:
        """Returns the value of one replica."""
        value = tf.convert_to_tensor(value)
        if self.rank != root_rank:
            zeros = tf.zeros_like(value)  # x + -0.0 is x for every float x, -0.0 included
            value = _instead(value, -zeros if value.dtype.is_floating else zeros)
        return self._joined(self._added(value))

    def _added(self, value: tf.Tensor) -> tf.Tensor:
        """Returns the sum of tensors of any dtype, those of replicas without rows included."""
        dtype = value.dtype
        sent = tf.cast(value, tf.int64) if dtype.is_bool or dtype.is_integer else value

        @tf.custom_gradient
        def summed(each):
            return self._reduce([each])[0], lambda upstream: self._reduce([upstream])[0]

        return tf.cast(summed(sent), dtype)

    # Gradients.

    def gradient(self, direct: Callable, target, sources, output_gradients):
        """Returns gradients: of weights, those of the loss of all rows."""
        targets, flat = tf.nest.flatten(target), tf.nest.flatten(sources)
        given = tf.nest.flatten(output_gradients) if output_gradients is not None else [None]
        given = given if len(given) == len(targets) else [None] * len(targets)
        target_tags = [self.tags("target", _shape(each)) for each in targets]
        source_tags = [
            self.tags("source", _shape(each) if isinstance(each, tf.Tensor) else ())
            for each in flat
        ]
        seeds = list(map(self._seed, targets, target_tags, given))
        found = tf.nest.flatten(direct(tf.nest.pack_sequence_as(target, seeds)))
        pairs = list(zip(found, source_tags, strict=True))
        joined = self._of_all([None if OWN in tags else each for each, tags in pairs])
        found = [old if new is None else new for new, old in zip(joined, found, strict=True)]
        return tf.nest.pack_sequence_as(sources, found)

    def _seed(self, target, tags: tuple[str, ...], given):
        """Returns the gradient of J with respect to a target: see the top of the module."""
        if not isinstance(target, tf.Tensor) or not target.dtype.is_floating:
            return given
        seed = tf.ones_like(target) if given is None else given
        if OWN in tags:  # the sum of all rows' values is differentiated, as on one device
            return seed if self._num_rows else tf.zeros_like(seed)
        return seed * tf.cast(self._share, target.dtype)

    def _of_all(self, gradients: list) -> list:
        """Returns the sums over replicas of gradients, in one collective for each dtype."""
        sums = [None] * len(gradients)
        # Slices become dense: a GPU adds up repeated ids in any order, so replicas would differ.
        given = [(index, each) for index, each in enumerate(gradients) if each is not None]
        dense = {index: tf.convert_to_tensor(each) for index, each in given}
        for dtype in sorted({each.dtype for each in dense.values()}, key=str):
            members = [index for index, each in dense.items() if each.dtype == dtype]
            flat = [tf.reshape(dense[index], [-1]) for index in members]
            sent = tf.concat(flat, axis=0)
            (total,) = self._sums([tf.cast(sent, self._gradients_as or dtype)])
            sizes = [dense[index].shape.num_elements() for index in members]
            parts = tf.split(tf.cast(total, dtype), sizes)
            for index, part in zip(members, parts, strict=True):
                sums[index] = self._joined(tf.reshape(part, dense[index].shape))
        return sums

    # Which values are equal on all replicas.

    def _joined(self, value: tf.Tensor) -> tf.Tensor:
        self._depends[id(value)] = False
        self._kept.append(value)
        return value

    def is_own(self, value) -> bool:
        """Returns whether a traced value depends on the replica's own rows or random numbers.

        Such a value differs between the replicas; any other one is equal on all. Without a graph
        this is not known, and the answer is True.
        """
        if tf.executing_eagerly():
            return True
        asked = tf.convert_to_tensor(value)
        waiting = [asked]
        while waiting:
            tensor = waiting[-1]
            inputs = None if id(tensor) in self._depends else self._inputs(tensor)
            if inputs is None or inputs is True:
                self._depends.setdefault(id(tensor), inputs is True)
                waiting.pop()
                continue
            unknown = [each for each in inputs if id(each) not in self._depends]
            if any(self._depends.get(id(each)) for each in inputs) or not unknown:
                self._depends[id(tensor)] = any(self._depends.get(id(each)) for each in inputs)
                waiting.pop()
            else:
                waiting += unknown
            self._kept.append(tensor)
        return self._depends[id(asked)]

    def _inputs(self, tensor: tf.Tensor):
        """Returns the tensors that a tensor is computed from; True if it differs by itself."""
        if hasattr(tensor, "numpy"):
            return []  # a value that is known when traced
        if "Random" in tensor.op.type:
            return True
        if tensor.op.type != "Placeholder":
            return list(tensor.op.inputs)
        graph = tensor.graph
        outer = [own for own, inner in getattr(graph, "captures", ()) if inner is tensor]
        if outer:
            return outer if graph is not self._graph else []
        return [] if graph is self._graph else True


def _instead(value: tf.Tensor, other: tf.Tensor) -> tf.Tensor:
    """Returns another value, with a gradient of zero to `value`.

    All replicas must have the same path of gradients, because the gradient of a sum over replicas
    is one, too.
    """
    return tf.where(tf.zeros_like(value, tf.bool), value, other)


def _total(sizes) -> int | tf.Tensor:
    return tf.reduce_sum(sizes) if tf.is_tensor(sizes) else sum(sizes)


@contextlib.contextmanager
def whole_batch(model, handler: _Handler | Alarm) -> Iterator[None]:
    """Within the context, the operations of the model's step go through the handler."""
    with (
        handler.own_gradients(),
        row_operations.traced_anew(),  # not as another replica's, or as in a plan
        row_operations.operations_by(handler, metrics=metrics_that_update(model)),
        collectives.within_step(handler),
    ):
        yield
