"""Tells from two traces of a step which of its values cover rows.

    plan = planned(model, step, replica, batch, within=True)   # runs nothing

The second trace has twice as many rows and seven times as many replicas as the first. An axis that
is twice as long has this replica's rows. An axis that is 14 times as long has rows that were
gathered from all replicas. An axis of the same length has no rows. Numbers are recognized in the
same way, so `loss / x.shape[0]` divides by the rows of all replicas, and `loss / (x.shape[0] - 1)`
by one less.
"""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import tensorflow as tf

from tfaccel.common.run_log import summary
from tfaccel.common.tables import cleaned
from tfaccel.keras_internals import row_operations
from tfaccel.keras_internals.never_run import never_run, placeholders, spec_of
from tfaccel.keras_internals.recording import JoinsRowsError, recorded
from tfaccel.keras_internals.replica import Replica
from tfaccel.keras_internals.stateful import any_rows
from tfaccel.keras_internals.unwound import unwound
from tfaccel.step import compared_rows
from tfaccel.step.planned_calls import END, Call, begin, end_of
from tfaccel.step.row_handler import ALL, OWN, SAME, Handler, handled_by

# The second trace of a plan, as multiples of the first. With 7 times the replicas, a number such as
# rows - 1 is not taken for one of replicas.
MORE_ROWS, MORE_REPLICAS = 2, 7

# What an axis or a number is, by the ratio of its sizes in the two traces of a plan.
_BY_RATIO = {1: SAME, MORE_ROWS: OWN, MORE_ROWS * MORE_REPLICAS: ALL}
NUMBERS = ("count", "scale")
_NOT_JOINED = ("count", "scale", "beside", "target", "source", "gather")  # kinds of calls


class OfRows(NamedTuple):
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
      compared: where the step compares or reorders the replica's own rows.
    """

    calls: list[Call] | None
    reduces_itself: bool
    joins: bool
    gathers: bool
    compared: list[compared_rows.Compared]


class _Recorder(Handler):
    """Records the sizes of operations, and joins nothing: what it traces never runs."""

    def __init__(self, replica: Replica, num_replicas: int, connected: list | None = None):
        """Takes which gradients exist, in order of the calls, as an earlier trace found it."""
        super().__init__(replica, num_replicas, reduces_rows=True)
        self.calls, self.reduces_itself = [], False
        self.seen = compared_rows.Seen()
        self.connected, self._known = [], None if connected is None else iter(connected)

    def watching(self) -> contextlib.AbstractContextManager:
        """Returns a context in which the step is traced."""
        return contextlib.nullcontext()

    def apply(self, optimizer, gradients: list, variables: list) -> None:
        """Updates nothing."""

    def ends(self, logs: dict) -> None:
        """Takes the logs of the step, and needs none."""

    def made(self, op: tf.Operation) -> None:
        """Notes an operation of the user's code."""
        self.seen.made(op)

    def assigned(self, variable, value) -> None:
        """Notes an assignment of a Keras variable."""
        if row_operations.is_noticing():
            self.seen.assign(variable.path, value)

    def tags(self, kind: str, sizes: Sequence) -> tuple[str, ...]:
        self.calls.append((kind, tuple(sizes)))
        return (SAME,) * len(sizes)

    def sum(self, value: tf.Tensor) -> tf.Tensor:
        return tf.identity(value)

    def all_gather(self, value, axis: int = 0) -> tf.Tensor:
        value = tf.convert_to_tensor(value)
        self.tags("gather", [value.shape[axis]])
        whole = tf.concat([value] * self.num_replicas, axis)
        self.seen.gathered(whole)
        return whole

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
            self.tags("target", shape_of(each))
        flat = tf.nest.flatten(sources)
        for each in flat:
            self.tags("source", shape_of(each) if isinstance(each, tf.Tensor) else ())
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
                    # A queue need not hold so many rows.
                    row_operations.unassigned(tell=recorder.assigned),
                    handled_by(handler, model),
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
    calls, found = None, []
    kinds = [[kind for kind, _ in each.calls] for each in recorders]
    if len(recorders) == 2 and kinds[0] == kinds[1]:
        pairs = zip(recorders[0].calls, recorders[1].calls, strict=True)
        part = functools.partial(_of_rows, rows=_rows_of(specs), num_replicas=replica.num_replicas)
        calls = [
            Call(kind, (part(*sizes, *more),) if kind in NUMBERS else _tags(sizes, more), sizes)
            for (kind, sizes), (_, more) in pairs
        ]
        calls = _without_loops_over_rows(calls, found)
        of_axis = functools.partial(
            _own_rows, rows=_rows_of(specs), num_replicas=replica.num_replicas
        )
        found += compared_rows.compared(*[each.seen for each in recorders], own=of_axis)
    elif within and (recorders or tf.executing_eagerly()):  # else the step itself cannot be traced
        by_size(fault)
    joins = calls is None or any(OWN in tags for kind, tags in calls if _joins(kind))
    gathers = any(kind == "gather" for kind, _ in first.calls)
    joins |= first.reduces_itself or gathers or any(kind == "broadcast" for kind, _ in first.calls)
    return Plan(calls, first.reduces_itself, joins, gathers, found)


def _without_loops_over_rows(calls: list, found: list) -> list:
    """Returns the calls but those in a loop with a round for each row, such as `tf.map_fn`.

    What such a round computes belongs to one row, so nothing of it is joined. If it compares the
    row with all rows, `found` gets that.
    """
    kept, index = [], 0
    while index < len(calls):
        kept.append(calls[index])
        if calls[index] == (begin("loop"), (OWN,)):
            end = end_of(calls, index)
            if any(OWN in tags for kind, tags in calls[index + 1 : end] if _joins(kind)):
                found.append(compared_rows.UNKNOWN)
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


def _own_rows(size: int, more: int, *, rows: int, num_replicas: int) -> int:
    """Returns what an axis is that has these sizes in the traces, for `compared_rows`."""
    if more == MORE_ROWS * size > 0:
        return compared_rows.ROWS
    of_all = rows * num_replicas * (MORE_ROWS * MORE_REPLICAS - 1)
    is_own = more is not None and more > size and more != MORE_ROWS * MORE_REPLICAS * size
    return compared_rows.SOME if is_own and (more - size) % of_all else compared_rows.NONE


def _of_rows(number: float, more: float, *, rows: int, num_replicas: int) -> str | OfRows:
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
        return OfRows(part, is_inverse)
    growth = {  # of each, from the first trace to the second
        OWN: rows * (MORE_ROWS - 1),
        SAME: num_replicas * (MORE_REPLICAS - 1),
        ALL: rows * num_replicas * (MORE_ROWS * MORE_REPLICAS - 1),
    }
    multiples = {what: (more - number) / size for what, size in growth.items()}
    whole = {what: size for what, size in multiples.items() if abs(size - round(size)) < 1e-6}
    is_own = not whole or min(whole, key=lambda what: abs(whole[what])) == OWN
    return OfRows(part, is_inverse) if is_own else SAME


def shape_of(value) -> tuple:
    """Returns the shape of a tensor; () of anything else, and of a tensor of unknown rank."""
    shape = getattr(value, "shape", None)
    return () if shape is None or shape.rank is None else tuple(shape)


def by_size(why: str) -> None:
    """Says that a plan does not know which axes are rows."""
    summary(
        "step: axis 0 of each tensor is taken for rows where its size fits, because two traces of "
        "the step do not tell (%s); the results are wrong if another axis 0 has as many entries as "
        "a replica has rows; then choose another batch size, or one replica",
        why,
    )
