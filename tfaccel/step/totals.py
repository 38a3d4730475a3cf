"""One replica's pass over its rows, and the totals that it adds to the sums over all replicas.

`make_totals` runs the model's own step on a batch and returns `Totals`. A `Layout` packs them into
a few vectors. The pass changes only the metrics: tfaccel/step/functions.py sums and updates.

    totals = make_totals(model, model.train_step, replica, batch, weigh=..., parts=1, xla=True)
    layout = Layout(totals, gradients_as=None)
    same, spans = layout.unpack(layout.pack(totals))
"""

import contextlib
import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import keras
import tensorflow as tf

from tfaccel.keras_internals import stateful
from tfaccel.keras_internals.layer_paths import layer_paths
from tfaccel.keras_internals.one_replica import own_losses
from tfaccel.keras_internals.recording import Recording, recorded
from tfaccel.keras_internals.replica import Replica
from tfaccel.keras_internals.row_operations import unassigned
from tfaccel.keras_internals.traced import names_of_results
from tfaccel.keras_internals.variables import value_of
from tfaccel.step import parts as parts_lib
from tfaccel.step.merged_results import MergedResults
from tfaccel.step.metric_inputs import Inputs
from tfaccel.step.metrics import Updates
from tfaccel.step.parts import num_rows
from tfaccel.step.remat.choose import Remat
from tfaccel.step.row_handler import handled_by
from tfaccel.step.whole_batch import Rows

# The unit of a row count. A gradient times the replica's rows in this unit stays near the size of
# the gradient, so that float16 can hold it. With 256 rows the sizes are equal; with 2 rows the
# product is 128 times smaller, which can lose precision in float16 without loss scaling. The unit
# is a power of two, so multiplying by it loses no precision.
ROWS_UNIT = 256.0

# If a concatenation for a GPU has more tensors than this, XLA first joins groups of this many, from
# the front, and then joins those with the remaining tensors. Only the remaining tensors are copied
# once (variadic_op_splitter.cc). Joining some here does not help, because XLA flattens that first.
_JOINED_AT_ONCE = 128

# The most bytes of gradients in a vector that goes to other workers: PyTorch's DDP has 25 MiB, too
# (`bucket_cap_mb`). The vector of the last layers is sent while the backward pass still computes
# the first ones.
BUCKET_BYTES = 25 << 20

_SUMMED = ("rows", "gradients", "changes", "logs", "metrics", "metrics_before", "numbers")


class Span(NamedTuple):
    """Gradients of one dtype that are adjacent in a vector, in the model's order.

    Attributes:
      values: the values of all these gradients, [values].
      indices: the index of each in `Totals.gradients`.
      sizes: the number of values of each.
    """

    values: tf.Tensor
    indices: list[int]
    sizes: list[int]


@dataclasses.dataclass
class Totals:
    """The amounts that one replica adds to the sums over all replicas.

    Attributes:
      rows: the number of rows in units of ROWS_UNIT, float32.
      gradients: each gradient of the mean over the rows, times `rows`.
      changes: the change of each untrained variable, such as batch norm's statistics, times `rows`.
        The change of whole numbers and bools, such as random seeds, is replica 0's. The change of
        variables made with aggregation="sum" is not multiplied.
      logs: the logs that the step returned, times `rows`.
      metrics: what the replica adds to the values of the metrics' variables.
      metrics_before: their values before the step.
      gradients_of: the Keras variables of `gradients`.
      changes_of: the Keras variables of `changes`.
      numbers: the numbers that metrics get after the sum.
      updates: makes the metrics' values of the sums.
      kept: (Keras variable, value before) of those whose new values are equal on all replicas.
      results: the names of the logs that are computed from the variables of metrics.
    """

    rows: tf.Tensor
    gradients: list[tf.Tensor]
    changes: list[tf.Tensor]
    logs: dict[str, tf.Tensor]
    metrics: list[tf.Tensor]
    metrics_before: list[tf.Tensor]
    gradients_of: list
    changes_of: list
    numbers: list[tf.Tensor] = dataclasses.field(default_factory=list)
    updates: Updates | None = None
    kept: list = dataclasses.field(default_factory=list)
    results: set[str] = dataclasses.field(default_factory=set)

    def tensors(self) -> list:
        """Returns the values that are summed over replicas, as one nest."""
        return [getattr(self, name) for name in _SUMMED]

    def with_tensors(self, tensors: list) -> "Totals":
        """Returns totals of the same variables with other values."""
        return dataclasses.replace(self, **dict(zip(_SUMMED, tensors, strict=True)))


def make_totals(
    model,
    step,
    replica: Replica,
    batch,
    *,
    weigh: Callable,
    parts: int,
    xla: bool,
    remat: Remat,
    within: bool = False,
    apply: Callable | None = None,
    rows_of: Callable | None = None,
    collectives=None,
    stand_in=None,
) -> Totals:
    """Runs `step` on this replica's rows, in `parts`, and restores all variables but the metrics'.

    If the replica has no rows, one row of weight 0 stands in: `stand_in`, or a row of zeros.

    `rows_of`, a function of (step, batch, num_rows, weight, of_part, collectives), returns the
    handler of the step's operations, or None. `within` says that it joins the values of the step
    over the replicas, and over the parts, where the step computes them. `apply`, a function of
    optimizer, gradients and variables, then updates the weights where the step applies gradients,
    and the totals have no gradients. `remat` says what the backward pass computes again.
    """
    rows, weight = num_rows(batch), weigh(batch)
    if rows == 0:
        # The last batch was partial and ended before this replica.
        batch = _one_row(batch, stand_in)
    metrics_before = {
        id(each): tf.convert_to_tensor(value_of(each)) for each in model.metrics_variables
    }
    settings = {"has_rows": rows > 0, "in_parts": parts > 1, "xla": xla}
    updates = Updates(model, replica, weigh=weigh, **settings)
    starts = metrics_before | updates.starts()
    several, recording, results = replica.num_replicas > 1, Recording(), set()

    @contextlib.contextmanager
    def tracing(part, rows: int, weight, of_part: parts_lib.Part | None = None):
        """Within the context, the step may be traced; yields the function of a part that does."""
        with contextlib.ExitStack() as contexts:
            handler, apply_, turn = None, apply, None
            all_reduce = functools.partial(replica.all_reduce_in_forward, weight=weight)
            if of_part is not None:
                contexts.enter_context(own_losses(model))
                contexts.enter_context(updates.own_part(has_rows=rows > 0))
                if rows == 0:  # the row that stands in does not count
                    contexts.enter_context(unassigned(model.metrics_variables))
                apply_, turn = of_part.once(apply), of_part.is_first_to_go_on
            if rows_of is not None:
                how = {"of_part": of_part, "collectives": collectives}
                handler = rows_of(step, part, num_rows=rows, weight=weight, **how)
            if handler is not None:
                contexts.enter_context(handled_by(handler, model))
                all_reduce = getattr(handler, "sum", None)
            joins = isinstance(handler, Rows)
            is_own = updates.inputs.is_own = handler.is_own if joins else None
            if joins and of_part is not None and tf.executing_eagerly():
                is_own = of_part.is_own
            if joins and handler.merges_results:
                updates.merging = MergedResults(handler, replica, turn=turn)
                updates.before = starts if rows == 0 and of_part is None else {}
            settings = {"apply": apply_, "is_own": is_own, "turn": turn, "joins": joins}
            contexts.enter_context(recorded(model, replica, recording=recording, **settings))
            contexts.enter_context(stateful.own_rows(model, replica, rows))
            summed = all_reduce if several else None
            quick = layer_paths(xla=xla, all_reduce=summed, **replica.layer_kernels)
            contexts.enter_context(quick)
            contexts.enter_context(remat.in_step(xla=xla))
            contexts.enter_context(updates.replaced())
            merges = updates.merging is not None
            with_results = functools.partial(
                _with_results, updates.watching(step), model, results, merges=merges
            )
            yield functools.partial(_part, with_results, recording, updates.inputs)

    if within and parts > 1:

        def part_of(part, part_rows: int, of_part: parts_lib.Part):
            part_rows = part_rows if rows else 0  # the row that stands in does not count
            weight = weigh(part) if part_rows else 0.0
            with tracing(part, part_rows, weight, of_part) as run_part:
                return run_part(part, weight)

        gradients, logs, numbers = parts_lib.side_by_side(part_of, batch, parts)
    else:
        with tracing(batch, rows if parts == 1 else rows // parts, weight) as run_part:
            weighed = lambda part: run_part(part, weigh(part))  # noqa: E731
            in_turn = parts_lib.compiled if xla else parts_lib.traced
            gradients, logs, numbers = in_turn(weighed, batch, parts)
    updates.finish()

    own = {id(each) for each in model.metrics_variables}
    assigned = [each for each in recording.assigned() if id(each[0]) not in own]
    changes = [_change(variable, before, weight, replica) for variable, before in assigned]
    for variable, before in assigned:
        variable.assign(before)
    if rows == 0:
        for variable in model.metrics_variables:
            variable.assign(starts[id(variable)])
        gradients, logs = tf.nest.map_structure(tf.zeros_like, (gradients, logs))
    metrics = [(id(each), tf.convert_to_tensor(value_of(each))) for each in model.metrics_variables]
    return Totals(
        rows=tf.convert_to_tensor(weight, tf.float32),
        gradients=gradients,
        changes=changes,
        logs=logs,
        metrics=updates.states(),
        # A metric that the step makes while it is traced has no earlier value.
        metrics_before=[metrics_before.get(key, value) for key, value in metrics],
        gradients_of=recording.trained,
        changes_of=[variable for variable, _ in assigned],
        numbers=numbers,
        updates=updates,
        kept=[each for each in recording.kept() if id(each[0]) not in own],
        results=results,
    )


def _with_results(step, model, results: set[str], batch, *, merges: bool) -> dict:
    """Runs the step, and adds the names of the logs that are results of metrics to `results`.

    Those are computed again after the step, unless it merges results where it asks for them.
    """
    logs = step(batch)
    if not merges:
        results |= names_of_results(logs, model.metrics_variables)
    return logs


def _part(step, recording: Recording, inputs: Inputs, batch, weight):
    """Returns the gradients, logs and numbers of some rows, times the weight of these rows."""
    logs = step(batch)
    gradients = [_times(each, weight) for each in recording.take_gradients()]
    logs = {name: _times(tf.cast(each, tf.float32), weight) for name, each in logs.items()}
    return gradients, logs, inputs.numbers


def _change(variable, before: tf.Tensor, weight, replica: Replica) -> tf.Tensor:
    """Returns the amount that this replica adds to the change of an untrained variable."""
    change = as_number(value_of(variable)) - as_number(before)
    if variable.aggregation == "sum":  # for example a count of rows
        nothing = isinstance(weight, float) and weight == 0  # the stand-in row does not count
        return tf.zeros_like(change) if nothing else change
    if before.dtype.is_floating:
        return _times(change, weight)
    return change if replica.index == 0 else tf.zeros_like(change)


def as_number(value) -> tf.Tensor:
    """Returns a tensor that can be added and subtracted: a bool becomes 0 or 1."""
    return tf.cast(value, tf.int32) if value.dtype.is_bool else tf.convert_to_tensor(value)


def _times(value: tf.Tensor, weight: float | tf.Tensor) -> tf.Tensor:
    """Returns the value times the weight of its rows. A weight of 0 gives 0, even for NaN."""
    if isinstance(weight, tf.Tensor):
        product = value * tf.cast(weight, value.dtype)
        return tf.where(weight > 0, product, tf.zeros_like(value))
    return value * tf.cast(weight, value.dtype) if weight > 0 else tf.zeros_like(value)


def weight_of(batch, *, padding: bool) -> float | tf.Tensor:
    """Returns the number of rows in units of ROWS_UNIT, as a tensor if some may be `padding`."""
    real = real_rows(batch) if padding and num_rows(batch) else None
    if real is None:
        return num_rows(batch) / ROWS_UNIT
    return tf.reduce_sum(tf.cast(real, tf.float32)) / ROWS_UNIT


def real_rows(batch) -> tf.Tensor | None:
    """Returns [rows] bool, False for padding; None for a batch without sample weights."""
    _, _, weights = keras.utils.unpack_x_y_sample_weight(batch)
    real = [
        tf.reduce_any(tf.not_equal(each, 0), axis=list(range(1, each.shape.rank)))
        for each in tf.nest.flatten(weights)
        if each is not None
    ]
    return functools.reduce(tf.logical_or, real) if real else None


def stand_in_of(batches: Sequence):
    """Returns a row for those of the replicas' batches that have none; None if zeros will do.

    Strings need a real row, because a vocabulary may not have the empty string.
    """
    tensors = [each for each in tf.nest.flatten(batches) if each is not None]
    if all(each.dtype != tf.string for each in tensors):
        return None
    counts = [num_rows(each) for each in batches]
    if all(counts) or not any(counts):
        return None
    return parts_lib.rows_from(
        next(each for each, count in zip(batches, counts, strict=True) if count), 0, 1
    )


def _one_row(batch, stand_in):
    """Returns the row that stands in for a batch without rows; zeros if `stand_in` is None."""
    return tf.nest.map_structure(_one_zero_row, batch) if stand_in is None else stand_in


def _one_zero_row(each):
    """Returns one row of zeros for a tensor, or one empty row; None for None."""
    if isinstance(each, tf.RaggedTensor):
        return tf.RaggedTensor.from_row_splits(each.values[:0], tf.zeros(2, each.row_splits.dtype))
    if isinstance(each, tf.SparseTensor):
        shape = tf.concat([[1], each.dense_shape[1:]], 0)
        nothing = tf.SparseTensor(each.indices[:0], each.values[:0], shape)
        return tf.sparse.reshape(nothing, [1, *each.shape[1:]])  # gives it a static shape
    return None if each is None else tf.zeros((1, *each.shape[1:]), each.dtype)


def outputs_of(function: Callable, batch, stand_in):
    """Returns the function's outputs for a batch that may have no rows."""
    if num_rows(batch) > 0:
        return function(batch)
    outputs = function(_one_row(batch, stand_in))
    return tf.nest.map_structure(lambda each: each[:0], outputs)


class Layout:
    """The order of totals in a few vectors, one per dtype, so that few collectives carry them.

    Each vector has three parts: all that is not a gradient, the smaller gradients, and the largest.
    With buckets, gradients of a dtype that take more than a bucket are in several vectors, those of
    the last layers first. The last of these vectors has all that is not a gradient.
    """

    def __init__(
        self, totals: Totals, *, gradients_as: str | None, bucket_bytes: int | None = None
    ):
        """Decides the order for totals like these.

        Args:
          totals: the totals of any replica; all replicas have the same variables.
          gradients_as: the dtype in which gradients are sent; None for their own dtype.
          bucket_bytes: the most bytes of gradients in a vector, unless one gradient is larger; None
            for all gradients of a dtype in one vector.
        """
        specs = tf.nest.map_structure(
            lambda each: tf.TensorSpec(each.shape, each.dtype), totals.tensors()
        )
        self._totals = totals.with_tensors(specs)  # specs, because tensors belong to another graph
        self._specs = tf.nest.flatten(specs)
        gradients = {id(each): index for index, each in enumerate(self._totals.gradients)}
        self._gradients = [gradients.get(id(each)) for each in self._specs]  # an index, or None
        self._dtypes = [
            sent_as(each.dtype, None if index is None else gradients_as)
            for each, index in zip(self._specs, self._gradients, strict=True)
        ]
        dtypes = sorted(set(self._dtypes), key=str)
        self._vectors = [each for dtype in dtypes for each in self._cut(dtype, bucket_bytes)]

    def pack(self, totals: Totals) -> list[tf.Tensor]:
        """Returns the vectors, in the order in which they are to be summed."""
        flat = [
            tf.reshape(tf.cast(each, dtype), [-1])
            for each, dtype in zip(tf.nest.flatten(totals.tensors()), self._dtypes, strict=True)
        ]
        return [
            tf.concat([flat[index] for index in itertools.chain(*parts)], axis=0)
            for parts in self._vectors
        ]

    def unpack(self, vectors: list[tf.Tensor]) -> tuple[Totals, list[Span]]:
        """Returns the totals in the vectors, and the gradients a second time, uncut."""
        flat, spans = [None] * len(self._specs), []
        for parts, vector in zip(self._vectors, vectors, strict=True):
            members = list(itertools.chain(*parts))
            for index, part in zip(members, tf.split(vector, self._sizes(members)), strict=True):
                spec = self._specs[index]
                flat[index] = tf.cast(tf.reshape(part, spec.shape), spec.dtype)
            spans += self._spans(parts, vector)
        tensors = tf.nest.pack_sequence_as(self._totals.tensors(), flat)
        return self._totals.with_tensors(tensors), spans

    def _spans(self, parts: tuple[list[int], ...], vector: tf.Tensor) -> Iterator[Span]:
        others, *gradients = parts
        start = sum(self._sizes(others))
        for part in gradients:
            for dtype, group in itertools.groupby(part, lambda index: self._specs[index].dtype):
                members = list(group)
                sizes = self._sizes(members)
                values = tf.cast(vector[start : start + sum(sizes)], dtype)
                yield Span(values, [self._gradients[each] for each in members], sizes)
                start += sum(sizes)

    def _cut(self, dtype: tf.DType, bucket_bytes: int | None) -> list[tuple[list[int], ...]]:
        """Returns the parts of each vector of a dtype."""
        others, *gradients = self._parts_of(dtype)
        buckets, num_bytes = [[]], 0
        for index in sorted(itertools.chain(*gradients), reverse=True):
            own_bytes = self._specs[index].shape.num_elements() * dtype.size
            if bucket_bytes and buckets[-1] and num_bytes + own_bytes > bucket_bytes:
                buckets.append([])
                num_bytes = 0
            buckets[-1].insert(0, index)
            num_bytes += own_bytes
        *first, last = buckets
        return (
            [([], each) for each in first] + [(others, last)] if first else [(others, *gradients)]
        )

    def _parts_of(self, dtype: tf.DType) -> tuple[list[int], list[int], list[int]]:
        """Returns the indices of a dtype's tensors in three parts, each in the model's order.

        The last part has as many tensors as XLA copies only once. With all tensors in the model's
        order, XLA copied nearly all of ResNet-50's gradients twice (two H100s, 2026-11-24).
        """
        members = [index for index, each in enumerate(self._dtypes) if each == dtype]
        others = [each for each in members if self._gradients[each] is None]
        gradients = [each for each in members if self._gradients[each] is not None]
        by_size = sorted(gradients, key=lambda index: self._specs[index].shape.num_elements())
        fits = len(members) <= _JOINED_AT_ONCE
        num_large = len(members) if fits else len(members) % _JOINED_AT_ONCE
        num_small = max(0, len(by_size) - num_large)
        return others, sorted(by_size[:num_small]), sorted(by_size[num_small:])

    def _sizes(self, members: list[int]) -> list[int]:
        return [self._specs[index].shape.num_elements() for index in members]


def sent_as(dtype: tf.DType, wanted: str | None) -> tf.DType:
    """Returns the dtype in which a tensor is sent: the wanted one; if None, its own if it can."""
    if wanted:
        return tf.as_dtype(wanted)
    # Collectives accept no bool or small integer; float64 holds whole numbers up to 2**53.
    return dtype if dtype.is_floating else tf.float64
