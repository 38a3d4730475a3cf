"""Notices that a step compares or reorders the rows of a batch without gathering them.

Each replica does so with its own rows alone. So the result is not that of one device, and a person
must know. A plan (tfaccel/step/row_plan.py) traces the step twice, with different numbers of rows:

    seen = [Seen(), Seen()]                     # of each trace; `made` is told of each operation
    found = compared(*seen, own=own)            # [Compared("pairs", "matmul", "model.py:9")]
    say(found, said=set())

An axis that is longer in the second trace has the replica's own rows, unless it was gathered. An
operation compares rows if its result has two such axes, and each of its inputs has one.
"""

import logging
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import tensorflow as tf

from tfaccel.keras_internals.made_operations import line_of
from tfaccel.keras_internals.row_operations import computed
from tfaccel.keras_internals.traced import OF_SHAPES, made_by

log = logging.getLogger("tfaccel")

PAIRS, SORTED, ORDER, KEPT = "pairs", "sorted", "order", "kept"
_SAYS = {
    PAIRS: "the step compares rows of a batch with each other",
    SORTED: "the step sorts, ranks or accumulates the rows of a batch",
    ORDER: "the step changes the order of the rows of a batch",
    KEPT: "the step keeps rows of a batch in a variable",
}
_MEANS = "each replica sees only its own rows, so the result differs from that of one device"
_MEANS_KEPT = (
    "each replica sees only its own rows, and a Keras variable becomes the mean over the replicas"
)
_CURE = "gather the rows first, with tfaccel.collectives.all_gather"

_PRODUCTS = dict.fromkeys(("MatMul", "BatchMatMul", "BatchMatMulV2", "BatchMatMulV3"), "matmul")
_PAIRING = {
    **_PRODUCTS,
    "Einsum": "einsum",
    "Sub": "a difference",
    "SquaredDifference": "a difference",
    "AddV2": "a sum",
    "Mul": "a product",
    "RealDiv": "a quotient",
    "DivNoNan": "a quotient",
    "Maximum": "maximum",
    "Minimum": "minimum",
    "Equal": "==",
    "NotEqual": "!=",
    "Less": "<",
    "LessEqual": "<=",
    "Greater": ">",
    "GreaterEqual": ">=",
    "LogicalAnd": "logical_and",
    "LogicalOr": "logical_or",
}
_SORTING = {
    "TopKV2": "sort or top_k",
    "ArgMax": "argmax",
    "ArgMin": "argmin",
    "Cumsum": "cumsum",
    "Cumprod": "cumprod",
    "CumulativeLogsumexp": "cumulative_logsumexp",
    **dict.fromkeys(("Unique", "UniqueV2", "UniqueWithCounts", "UniqueWithCountsV2"), "unique"),
}
_REORDERING = {
    "ReverseV2": "reverse",
    "Roll": "roll",
    "RandomShuffle": "shuffle",
    "StridedSlice": "a slice",
    "GatherV2": "gather",
    "ConcatV2": "concat",
}
# What puts rows at places of a tensor without rows, or takes single rows out of a batch.
_KEEPING = (
    "ConcatV2",
    "StridedSlice",
    "Slice",
    "GatherV2",
    "ScatterNd",
    "TensorStridedSliceUpdate",
)
_KEEPING += tuple(f"TensorScatter{each}" for each in ("Update", "Add", "Sub", "Max", "Min"))
_ASSIGNING = ("AssignVariableOp", "AssignAddVariableOp", "AssignSubVariableOp")
_SCATTERING = ("ResourceScatterUpdate", "ResourceScatterNdUpdate", "ResourceStridedSliceAssign")
_NOTED = {*_PAIRING, *_SORTING, *_REORDERING, *_KEEPING, *_ASSIGNING, *_SCATTERING}

# Behind these, a value is joined over the replicas. Behind OF_SHAPES, it no longer depends on what
# rows hold.
_JOINED = ("Sum", "Mean", "Max", "Min", "Prod", "All", "Any", "EuclideanNorm", "L2Loss", *_PRODUCTS)
_JOINED += ("Einsum", "EnsureShape")  # in a plan, each gradient is the output of an EnsureShape

# Of an axis: its entries are the replica's own rows, or also have some, or have none.
ROWS, SOME, NONE = 2, 1, 0
Axes = Sequence[int]  # of each axis


class Compared(NamedTuple):
    """Something that a step does with the rows of a batch as a whole.

    Attributes:
      kind: one of the keys of `_SAYS`.
      what: the operation, or the variable.
      line: of the user's code, if it is known.
    """

    kind: str
    what: str
    line: str | None = None

    def __str__(self) -> str:
        """Returns what a person reads."""
        return self.what if self.line is None else f"{self.what}, {self.line}"


UNKNOWN = Compared(PAIRS, "seen in a reduction")


class _Operation(NamedTuple):
    op: tf.Operation
    inputs: list[tuple]  # the shape of each input, () if the rank is not known
    output: tuple


class _Assigned(NamedTuple):
    name: str
    value: tf.Tensor
    line: str | None

    @property
    def shape(self) -> tuple:
        return _shape(self.value)


class Seen:
    """What one trace of a step does that may compare rows."""

    def __init__(self):
        """Begins with nothing."""
        self.operations, self.assigned, self.gathers = [], [], []

    def made(self, op: tf.Operation) -> None:
        """Takes an operation of the user's code."""
        if op.type in _NOTED:
            output = _shape(op.outputs[0]) if op.outputs else ()
            self.operations.append(_Operation(op, list(map(_shape, op.inputs)), output))

    def gathered(self, value: tf.Tensor) -> None:
        """Takes the values of all replicas: what is computed from them is equal on all."""
        self.gathers.append(value.op)

    def assign(self, name: str, value) -> None:
        """Takes an assignment to a Keras variable by the user's code."""
        if tf.is_symbolic_tensor(value):
            self.assigned.append(_Assigned(name, value, line_of(value.op)))


def compared(first: Seen, second: Seen, *, own: Callable[[int, int], int]) -> list[Compared]:
    """Returns what a step does with its own rows. Says so if the traces differ in more than sizes.

    Args:
      first: what the first trace does.
      second: what the second one does, which has more rows and replicas.
      own: what an axis is (`ROWS`, `SOME`, `NONE`) that has these sizes in both traces.
    """
    types = [[each.op.type for each in seen.operations] for seen in (first, second)]
    if types[0] != types[1]:
        log.info("step: not checked for comparing rows; its operations depend on their number")
        return []
    found, kept = [], {}
    for one, other in zip(first.operations, second.operations, strict=True):
        inputs = [_own(*each, own) for each in zip(one.inputs, other.inputs, strict=False)]
        output = _own(one.output, other.output, own)
        kind = kind_of(one.op, inputs, output)
        if kind is not None and _is_of_rows(one.op, kind):
            found.append(Compared(kind, _word(one.op), line_of(one.op)))
        if keeps(one.op, inputs, output):
            kept[id(one.op)] = one.op
    return list(dict.fromkeys([*found, *_kept(first, second, kept, own)]))


def say(found: Sequence[Compared], said: set[str]) -> None:
    """Warns of each kind once, with its operations; `said` has those of earlier warnings."""
    for kind, says in _SAYS.items():
        new = [each for each in found if each.kind == kind and f"{kind}: {each}" not in said]
        if new:
            said.update(f"{kind}: {each}" for each in new)
            told = "; ".join(map(str, new[:3])) + ("; ..." if len(new) > 3 else "")
            means = _MEANS_KEPT if kind == KEPT else _MEANS
            log.warning("step: %s (%s); %s; %s", says, told, means, _CURE)


def may_compare(op: tf.Operation, num_rows: int) -> bool:
    """Returns whether an operation may do something with all rows, by the sizes of its axes."""
    if op.type not in _NOTED or op.type in _ASSIGNING:
        return False
    inputs, output = list(map(_shape, op.inputs)), _shape(op.outputs[0]) if op.outputs else ()
    if op.type in _PAIRING.keys() - {*_PRODUCTS, "Einsum"} and output in inputs:
        return False
    rows = num_rows, 2 * num_rows

    def own(shape: tuple) -> list[int]:
        found = [ROWS if size in rows else NONE for size in shape]
        if op.type not in _PAIRING and ROWS in found:  # rows are probably the first such axis
            found[found.index(ROWS) + 1 :] = [NONE] * (len(found) - found.index(ROWS) - 1)
        return found

    return kind_of(op, list(map(own, inputs)), own(output), is_guess=True) is not None


def kind_of(
    op: tf.Operation, inputs: Sequence[Axes], output: Axes, *, is_guess: bool = False
) -> str | None:
    """Returns what an operation does with own rows; None if it treats each row by itself.

    Args:
      op: the operation.
      inputs: what the axes of its inputs are.
      output: what the axes of its first output are.
      is_guess: whether an axis may be taken for rows because of its size.
    """
    if op.type in _PAIRING:
        with_rows = [_num(each) for each in inputs if any(each)]
        is_new = is_guess or max(with_rows, default=0) == 1
        return PAIRS if _num(output) > 1 and len(with_rows) > 1 and is_new else None
    if op.type in _SORTING:
        return SORTED if _has(inputs[0], _axes(op, len(inputs[0]))) else None
    if op.type not in _REORDERING:
        return None
    if op.type == "ConcatV2":
        axis, parts = _constant(op.inputs[-1]), [each for each in inputs[:-1] if each]
        is_rotated = _has(output, axis) and not any(_has(each, axis) for each in parts)
        return ORDER if is_rotated and not is_guess and len(parts) > 1 else None
    if not _has(inputs[0], _axes(op, len(inputs[0]))):
        return None
    return ORDER if op.type != "GatherV2" or _reorders(op) else None


def keeps(op: tf.Operation, inputs: Sequence[Axes], output: Axes) -> bool:
    """Returns whether an operation puts rows into a tensor without an axis of rows."""
    if op.type in _SCATTERING:
        return any(map(any, inputs))
    return op.type in _KEEPING and any(map(any, inputs)) and not any(output)


def _kept(first: Seen, second: Seen, kept: dict, own: Callable) -> Iterator[Compared]:
    """Yields the variables that get rows."""
    for each in first.operations:
        if each.op.type in _SCATTERING and id(each.op) in kept:
            yield Compared(KEPT, "a variable's entries", line_of(each.op))
    gathers = set(map(id, first.gathers))

    def gets_rows(each: _Assigned, more: _Assigned) -> bool:
        if ROWS in _own(each.shape, more.shape, own):
            return not _depends(each.value, lambda op: id(op) in gathers)
        is_wanted = lambda op: id(op) in kept  # noqa: E731
        is_joined = lambda op: op.type in (*OF_SHAPES, *_JOINED) or id(op) in gathers  # noqa: E731
        return _depends(each.value, is_wanted, stops=is_joined)

    for each, more in zip(_assigned(first), _assigned(second), strict=False):
        if gets_rows(each, more):
            yield Compared(KEPT, each.name, each.line)


def _assigned(seen: Seen) -> list[_Assigned]:
    """Returns the assignments to variables, Keras's and others."""
    others = [each.op for each in seen.operations if each.op.type in _ASSIGNING]
    plain = [_Assigned("a tf.Variable", each.inputs[1], line_of(each)) for each in others]
    return [*seen.assigned, *plain]


def _shape(tensor: tf.Tensor) -> tuple:
    return () if tensor.shape.rank is None else tuple(tensor.shape)


def _own(one: tuple, other: tuple, own: Callable[[int, int], int]) -> Axes:
    """Returns what axes are. What a mask has left of the rows has no known size."""
    if len(one) != len(other):
        return (NONE,) * len(one)
    both = zip(one, other, strict=True)
    return tuple(ROWS if size is None else own(size, more) for size, more in both)


def _num(axes: Axes) -> int:
    return sum(each != NONE for each in axes)


def _has(own: Axes, axes: Sequence[int]) -> bool:
    """Returns whether some axes are rows."""
    return any(-len(own) <= each < len(own) and own[each] == ROWS for each in axes)


def _axes(op: tf.Operation, rank: int) -> list[int]:
    """Returns the axes along which an operation sorts or reorders its first input."""
    if op.type == "TopKV2":
        return [-1]
    if op.type in ("Unique", "UniqueWithCounts", "RandomShuffle"):
        return [0]
    if op.type == "StridedSlice":
        return list(_reversed_axes(op, rank))
    return _constant(op.inputs[2 if op.type in ("Roll", "GatherV2") else 1])


def _constant(tensor: tf.Tensor) -> list[int]:
    known = tf.get_static_value(tensor)
    return [] if known is None else [int(each) for each in np.reshape(known, -1)]


def _reversed_axes(op: tf.Operation, rank: int) -> Iterator[int]:
    steps = _constant(op.inputs[3])
    if min(steps, default=1) >= 0:
        return
    ellipsis, new, shrunk = (
        op.get_attr(f"{each}_mask") for each in ("ellipsis", "new_axis", "shrink_axis")
    )
    num_new = sum(new >> index & 1 for index in range(len(steps)))
    axis = 0
    for index, step in enumerate(steps):
        if ellipsis >> index & 1:
            axis += rank - (len(steps) - num_new - 1)
        elif not new >> index & 1:
            if step < 0 and not shrunk >> index & 1:
                yield axis
            axis += 1


def _reorders(op: tf.Operation) -> bool:
    """Returns whether the indices of a gathering may be those of rows in another order.

    Rows that a mask has chosen keep their order, and so do rows that are repeated. Of indices that
    are computed from other values, those of the rows themselves are meant: an index of tokens, in
    all rows, is usually computed from a place in its own row.
    """
    indices, size = op.inputs[1], op.inputs[0].shape[0]
    if _depends(indices, lambda each: each.type == "Where"):
        return False
    known = computed(indices)
    if known is not None:
        flat = np.reshape(known, -1)
        is_sorted = (np.diff(flat) >= 0).all()
        return not is_sorted and not np.array_equal(flat, np.arange(flat.size) % (size or 1))
    return not _depends(indices, lambda each: each.type in ("Range", "Const") and _counts(each))


def _counts(op: tf.Operation) -> bool:
    """Returns whether an operation returns the numbers 0, 1, 2, ..., or multiples of them."""
    known = computed(op.outputs[0])
    steps = np.diff(np.reshape(known, -1)) if known is not None and known.size > 1 else np.zeros(0)
    return bool(steps.size and steps[0] != 0 and (steps == steps[0]).all())


def _is_of_rows(op: tf.Operation, kind: str) -> bool:
    """Returns whether what is compared depends on the rows, and not only on their number."""
    if kind != PAIRS:
        return _differs(op.inputs[0]) or op.type == "RandomShuffle"
    return sum(map(_differs, op.inputs)) > 1


def _differs(tensor: tf.Tensor) -> bool:
    is_own = lambda op: op.type == "Placeholder" or "Random" in op.type  # noqa: E731
    return _depends(tensor, is_own)


def _depends(
    tensor: tf.Tensor,
    is_wanted: Callable[[tf.Operation], bool],
    *,
    stops: Callable[[tf.Operation], bool] = lambda op: op.type in OF_SHAPES,
) -> bool:
    """Returns whether a tensor is computed from an operation, in its own graph."""

    def values(op: tf.Operation) -> list[tf.Tensor]:
        return [] if stops(op) else [each for each in op.inputs if each.dtype != tf.resource]

    return any(map(is_wanted, made_by(tensor, inputs=values)))


def _word(op: tf.Operation) -> str:
    return (_PAIRING | _SORTING | _REORDERING)[op.type]
