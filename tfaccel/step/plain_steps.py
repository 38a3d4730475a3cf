"""Finds steps of the model's own that need no value of other replicas while they run.

Such a step is plain. It is traced as Keras's own is: each replica computes the step on its own
rows, and gradients, logs and metrics are averaged afterwards. That keeps XLA on CPU replicas and
with several processes, packs all sums in one collective, and lets parts of a batch run one after
the other in the same memory.

    plan, why = analyzed(model, step, replica, batch, in_parts=False, has_padding=False)
    # `why` says why the step is not plain; it is None for a plain step.

Why it is right: a loss of the rows of all replicas is a weighted mean of the replicas' losses if
each loss is a mean over rows, or a sum of such means, each times a number that all replicas have in
common. The same is true of gradients and logs. So each tensor of the step is of a `Kind`. A mean
may be added, scaled, differentiated, applied, returned and counted by a metric. Whatever else is
done with it, such as a square root, needs the mean over the rows of all replicas at its place.
"""

import contextlib
import dataclasses
import enum
from collections.abc import Callable, Iterator

import keras
import numpy as np
import tensorflow as tf

from tfaccel.keras_internals import step_notes
from tfaccel.keras_internals.model_view import (
    every_optimizer,
    loss_means_of,
    optimizers_of,
    variables_of,
)
from tfaccel.keras_internals.reductions import has_own_update, losses_reduced_by
from tfaccel.keras_internals.replica import Replica
from tfaccel.keras_internals.row_operations import is_noticing
from tfaccel.keras_internals.traced import OF_SHAPES, handles_of
from tfaccel.step import metrics as metrics_lib
from tfaccel.step.row_plan import MORE_ROWS, Plan, planned


class Kind(enum.Enum):
    """What a tensor of a step is made of."""

    COMMON = "a value that all replicas have in common"
    OWN = "a value of the replica's own rows"
    MEAN = "a mean over rows"
    SUM = "a sum over rows"
    COUNT = "a number of rows"
    RESULT = "the result of a metric"
    DERIVED = "a value computed from the result of a metric"


_JOINED = (Kind.MEAN, Kind.SUM, Kind.COUNT)  # what a step joins if it is not plain
_OF_METRICS = (Kind.RESULT, Kind.DERIVED)
_COLLECTIVES = ("rank", "local_rank", "num_replicas", "all_reduce", "all_gather", "broadcast")

# Operations that return their first input, in another shape or for another purpose.
_SAME_VALUE = {
    "Identity",
    "StopGradient",
    "PreventGradient",
    "Neg",
    "Reshape",
    "Squeeze",
    "ExpandDims",
    "BroadcastTo",
    "Snapshot",
}
_ADDING = {"Add", "AddV2", "AddN", "Sub", "Pack"}
_SCALING = {"Mul", "MulNoNan"}
_DIVIDING = {"RealDiv", "DivNoNan"}
_REDUCING = {"Sum", "Mean"}
_CALLING = {"PartitionedCall", "StatefulPartitionedCall"}
_READING = {"ReadVariableOp", "ResourceGather", "ResourceGatherNd"}
_ASSIGNING = {"AssignVariableOp", "AssignAddVariableOp", "AssignSubVariableOp"}

# What a size or a number is, from its values in both traces.
_FIXED, _ROWS, _PER_ROW, _OTHER, _UNKNOWN = "fixed", "rows", "per row", "other", "unknown"
_RATIOS = {1: _FIXED, MORE_ROWS: _ROWS, 1 / MORE_ROWS: _PER_ROW}


class _NotPlainError(Exception):
    """Says why a step is not plain."""


@dataclasses.dataclass(frozen=True)
class _Call:
    """A call of an operation that goes through the handler.

    Attributes:
      kind: as the handler names it.
      start: the index of the first sizes that the handler has recorded for it.
      stop: the index behind the last ones.
      output: what it returned.
      divides: whether it divides.
    """

    kind: str
    start: int
    stop: int
    output: tf.Tensor
    divides: bool = False


@dataclasses.dataclass(frozen=True)
class _Gradient:
    """A call of `tape.gradient`.

    Attributes:
      targets: what is differentiated, flat.
      sources: with respect to what, flat.
      has_seed: whether the gradients of the targets are given.
      start: the index of the first sizes that the handler has recorded for it.
      stop: the index behind the last ones.
      outputs: the gradients, flat.
      first: the index of its first operation.
      last: the index behind its last one.
    """

    targets: list
    sources: list
    has_seed: bool
    start: int
    stop: int
    outputs: list
    first: int
    last: int


@dataclasses.dataclass(frozen=True)
class _Update:
    """A call of a metric's `update_state`: its operations are those from `first` to `last`.

    Attributes:
      is_mean: whether it is `keras.metrics.Mean.update_state`.
      weight: the weight that it got, if it is one number that is known when traced.
    """

    metric: keras.metrics.Metric
    args: tuple
    kwargs: dict
    is_mean: bool
    weight: float | None
    first: int
    last: int


@dataclasses.dataclass(frozen=True)
class _Assignment:
    """An assignment of a Keras variable, behind `index` operations."""

    variable: object
    value: object
    is_users: bool
    index: int
    in_metric: bool


@dataclasses.dataclass(frozen=True)
class _Apply:
    """A call of an optimizer, behind `index` operations."""

    optimizer: object
    gradients: list
    variables: list
    index: int
    is_in_step: bool


class Notes:
    """A handler that passes every call to another one, and notes what the step does."""

    def __init__(self, handler):
        """Takes the handler that records the sizes of a trace."""
        self._handler = handler
        self.graph, self.logs, self.fault = None, {}, None
        self.calls, self.gradients, self.updates, self.results = [], [], [], []
        self.assignments, self.applied, self.reduced_losses = [], [], []
        self._depth = 0

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Within the context, the step is traced into the graph that is the default now."""
        self.graph = tf.compat.v1.get_default_graph()
        with step_notes.noted(self), losses_reduced_by(self._noting_losses):
            yield

    def ends(self, logs: dict) -> None:
        """Takes the logs that the step returned."""
        self.logs = logs

    def apply(self, optimizer, gradients: list, variables: list) -> None:
        """Notes an update of weights, and makes none."""
        place = self._here(), self._is_in_step()
        self.applied.append(_Apply(optimizer, list(gradients), list(variables), *place))

    @property
    def sizes(self) -> list[tuple[str, tuple]]:
        """The kinds and sizes that the handler has recorded, of all calls."""
        return self._handler.calls

    def _here(self) -> int:
        return len(self.graph.get_operations())

    def _is_in_step(self) -> bool:
        """Returns whether the code that runs is in no branch, loop or function of the step."""
        return tf.compat.v1.get_default_graph() is self.graph

    def _faulty(self, fault: str) -> None:
        self.fault = self.fault or fault

    # Operations.

    def _noted(self, kind: str, compute: Callable, **settings):
        start = len(self.sizes)
        output = compute()
        self.calls.append(_Call(kind, start, len(self.sizes), output, **settings))
        return output

    def made(self, op: tf.Operation) -> None:
        """Passes on an operation of the user's code."""
        self._handler.made(op)

    def reduced(self, kind: str, *args):
        """Notes a reduction."""
        return self._noted(kind, lambda: self._handler.reduced(kind, *args))

    def contracted(self, *args):
        """Notes a product."""
        return self._noted("product", lambda: self._handler.contracted(*args))

    def segmented(self, *args):
        """Notes a reduction of groups."""
        return self._noted("segments", lambda: self._handler.segmented(*args))

    def squares(self, *args):
        """Notes a sum of squares."""
        return self._noted("squares", lambda: self._handler.squares(*args))

    def scaled(self, *args, divides: bool):
        """Notes a product with a number, or a division."""
        compute = lambda: self._handler.scaled(*args, divides=divides)  # noqa: E731
        return self._noted("scale", compute, divides=divides)

    def counted(self, *args):
        """Notes a whole number that becomes a float."""
        return self._noted("count", lambda: self._handler.counted(*args))

    def gradient(self, direct: Callable, target, sources, output_gradients):
        """Notes gradients."""
        start, first = len(self.sizes), self._here()
        found = self._handler.gradient(direct, target, sources, output_gradients)
        targets, flat, outputs = map(tf.nest.flatten, (target, sources, found))
        has_seed, stop, last = output_gradients is not None, len(self.sizes), self._here()
        self.gradients.append(_Gradient(targets, flat, has_seed, start, stop, outputs, first, last))
        return found

    def section(self, *args) -> contextlib.AbstractContextManager:
        """Returns a context for a loop, branches or a part of them."""
        return self._handler.section(*args)

    def own_gradients(self) -> contextlib.AbstractContextManager:
        """Returns a context for the user's custom gradients."""
        return self._handler.own_gradients()

    # Collectives.

    def __getattr__(self, name: str):
        """Notes that the step joins the replicas by itself."""
        if name not in _COLLECTIVES:
            raise AttributeError(name)
        self._faulty(f"it uses {name} of the replicas")
        return getattr(self._handler, name)

    # A Noter.

    def assigned(self, variable, value) -> None:
        """Notes an assignment of a Keras variable."""
        if isinstance(value, keras.Variable | tf.Variable):
            value = tf.convert_to_tensor(value)  # reads it here, as the assignment does
        self._handler.assigned(variable, value)
        self.assignments.append(
            _Assignment(variable, value, is_noticing(), self._here(), self._depth > 0)
        )

    def updated(self, own: Callable, metric, args: tuple, kwargs: dict):
        """Notes an update of a metric."""
        if self._depth:
            return own(*args, **kwargs)
        first = self._here()
        with self._in_metric():
            result = own(*args, **kwargs)
        is_mean = getattr(own, "__qualname__", "") == "Mean.update_state"
        is_mean = is_mean and not has_own_update(metric)
        named = dict(zip(("values", "sample_weight"), args, strict=False)) | kwargs
        weight = step_notes.number_of(named.get("sample_weight")) if is_mean else None
        self.updates.append(_Update(metric, args, kwargs, is_mean, weight, first, self._here()))
        return result

    def result(self, own: Callable, metric, args: tuple, kwargs: dict):
        """Notes the result of a metric."""
        if self._depth:
            return own(*args, **kwargs)
        first = self._here()
        with self._in_metric():
            result = own(*args, **kwargs)
        self.results.append((first, self._here()))
        return result

    @contextlib.contextmanager
    def _in_metric(self) -> Iterator[None]:
        self._depth += 1
        try:
            yield
        finally:
            self._depth -= 1

    def has_own_gradient(self) -> None:
        """Notes a gradient that the user's code computes."""
        self._faulty("it uses tf.custom_gradient")

    def accumulates_forward(self) -> None:
        """Notes derivatives in the forward direction."""
        self._faulty("it uses tf.autodiff.ForwardAccumulator")

    def _noting_losses(self, reduce_weighted_values: Callable) -> Callable:
        """Returns Keras's reduction of a loss, and as its attribute one for masks of padding."""

        def reduce(*args, **kwargs):
            return reduce_weighted_values(*args, **kwargs)

        def of_real_rows(*args, **kwargs):
            first, start = self._here(), len(self.sizes)
            loss = reduce_weighted_values(*args, **kwargs)
            stop = len(self.sizes)
            self.reduced_losses.append((first, self._here(), start, stop, loss))
            return loss

        reduce.of_real_rows = of_real_rows
        return reduce


def has_weights(batch) -> bool:
    """Returns whether a batch has sample weights, which are 0 for rows of padding."""
    _, _, weights = keras.utils.unpack_x_y_sample_weight(batch)
    return any(each is not None for each in tf.nest.flatten(weights))


def analyzed(
    model, step: Callable, replica: Replica, batch, *, in_parts: bool, has_padding: bool
) -> tuple[Plan, str | None]:
    """Returns the plan of a step, and why the step is not plain: None if it is.

    Args:
      model: the model, within `as_replica`.
      step: the step, as a function of a batch.
      replica: the replica.
      batch: a nest of the replica's tensors.
      in_parts: whether the batch is taken in parts.
      has_padding: whether rows of the batch may be padding, which Keras's losses leave out.
    """
    traces = []

    def noting(recorder) -> Notes:
        traces.append(Notes(recorder))
        return traces[-1]

    plan = planned(model, step, replica, batch, within=True, watch=noting)
    settings = {"in_parts": in_parts, "has_padding": has_padding}
    if plan.calls is None:
        return plan, "two traces of it do not tell which axes are rows"
    return plan, _why_not_plain(model, *traces, **settings)


def _why_not_plain(
    model, first: Notes, second: Notes, *, in_parts: bool, has_padding: bool
) -> str | None:
    """Returns why a step is not plain, from what its two traces did."""
    weights = [[each.weight for each in notes.updates] for notes in (first, second)]
    constants = _own_constants(first, second)
    if constants is None or len(weights[0]) != len(weights[1]):
        return "its operations depend on the number of rows"
    tags = [
        (kind, tuple(map(_tag, sizes, more)))
        for (kind, sizes), (_, more) in zip(first.sizes, second.sizes, strict=True)
    ]
    counts = [_tag(*each) == _ROWS for each in zip(*weights, strict=True)]
    settings = {"in_parts": in_parts, "has_padding": has_padding}
    try:
        _Check(model, first, tags, counts, constants, **settings).check()
    except _NotPlainError as why:
        return str(why)
    return None


def _tag(size, more) -> str:
    """Returns what a size or a number is, from its values in both traces."""
    if size is None or more is None:
        return _UNKNOWN
    return _FIXED if size == more else _RATIOS.get(more / size if size else None, _OTHER)


def _own_constants(first: Notes, second: Notes) -> set[int] | None:
    """Returns the ids of the first trace's constants that differ in the second.

    Such a constant depends on the number of rows: a shape, for example. Returns None if the traces
    have other operations. (A large constant tensor may be a Fill in one of them.)
    """
    pairs = list(zip(_between(first), _between(second), strict=False))
    if len(_between(first)) != len(_between(second)):
        return None
    found = set()
    for (constants, kind), (others, other_kind) in pairs:
        if kind != other_kind:
            return None
        is_like = [each.type for each in constants] == [each.type for each in others]
        for index, each in enumerate(constants):
            if not is_like or not _equal(each, others[index]):
                found.add(id(each))
    return found


def _between(notes: Notes) -> list[tuple[list, str]]:
    """Returns the constants before each other operation of a trace, and its type."""
    ranges = [(each.first, each.last) for each in notes.gradients]
    found, constants = [], []
    for index, op in enumerate(notes.graph.get_operations()):
        if _is_in(index, ranges):
            continue
        if op.type in ("Const", "Fill"):
            constants.append(op)
        else:
            found.append((constants, op.type))
            constants = []
    return [*found, (constants, "")]


def _equal(one: tf.Operation, other: tf.Operation) -> bool:
    if one.type != "Const":
        return True  # what it is filled with is a constant, too
    if one.outputs[0].shape != other.outputs[0].shape:
        return False
    values = (tf.get_static_value(each.outputs[0]) for each in (one, other))
    return np.array_equal(*values)


class _Check:
    """Goes through the operations of a trace, and raises _NotPlainError at the first fault."""

    def __init__(
        self,
        model,
        notes: Notes,
        tags: list[tuple[str, tuple[str, ...]]],
        counts: list[bool],
        constants: set[int],
        *,
        in_parts: bool,
        has_padding: bool,
    ):
        """Takes what the first trace did, and what the second one tells of it.

        Args:
          model: the model, within `as_replica`.
          notes: the first trace.
          tags: what the sizes are that the handler has recorded.
          counts: for each update of a metric, whether its weight is the number of rows.
          constants: the ids of operations whose constants depend on the number of rows.
          in_parts: whether the batch is taken in parts.
          has_padding: whether rows may be padding.
        """
        self._model, self._notes, self._tags = model, notes, tags
        self._counts, self._in_parts, self._has_padding = counts, in_parts, has_padding
        self._constants = constants
        self._kinds = {}  # by the id of a tensor
        self._calls = {id(each.output): each for each in notes.calls}
        self._graph = notes.graph
        metrics = [each.metric for each in notes.updates]
        listed = [*model.metrics_variables, *(one for each in metrics for one in each.variables)]
        self._of_metrics = {id(each) for each in listed}
        self._metric_handles = handles_of(self._graph, listed)
        by_layers = [each.variable for each in notes.assignments if not each.is_users]
        self._layer_handles = handles_of(self._graph, by_layers)
        # The update changes these, and reads them.
        self._updated = list(model.trainable_variables)
        for each in every_optimizer(model):
            self._updated += [one for inner in optimizers_of(each) for one in inner.variables]
        own = {id(each) for each in self._updated}
        others = [each for each in variables_of(model) if id(each) not in own]
        self._other_handles = handles_of(self._graph, others)
        self._ranges = [(each.first, each.last) for each in notes.updates] + notes.results
        self._losses = {id(loss): (first, last) for first, last, *_, loss in notes.reduced_losses}
        self._loss_ranges = list(self._losses.values())
        self._gradient_ranges = [(each.first, each.last) for each in notes.gradients]

    def check(self) -> None:
        """Checks the whole step."""
        notes = self._notes
        if notes.fault:
            raise _NotPlainError(notes.fault)
        if len(notes.applied) > 1:
            raise _NotPlainError(f"it applies gradients {len(notes.applied)} times")
        self._end = notes.applied[0].index if notes.applied else None
        self._check_calls()
        self._gradients = {id(one): each for each in notes.gradients for one in each.outputs}
        for index, operation in enumerate(step_notes.operations(self._graph)):
            self._check_operation(index, operation)
        for apply in notes.applied:
            self._check_apply(apply)
        for each in notes.assignments:
            self._check_assignment(each)
        for update, counts in zip(notes.updates, self._counts, strict=True):
            self._check_update(update, counts)
        for name, value in notes.logs.items():
            if self._kind(value) in (Kind.SUM, Kind.COUNT, Kind.DERIVED):
                raise _NotPlainError(f"the log {name} is {self._kind(value).value}")

    def _kind(self, tensor) -> Kind:
        if not tf.is_symbolic_tensor(tensor):
            return Kind.COMMON
        return self._kinds.get(id(tensor), Kind.OWN)

    # Calls of the handler.

    def _check_calls(self) -> None:
        """Checks the calls whose tags alone tell that the step is not plain."""
        of_losses = {
            index
            for *_, start, stop, _ in self._notes.reduced_losses
            for index in range(start, stop)
        }
        noted = set(of_losses)
        for call in self._notes.calls:
            noted |= set(range(call.start, call.stop))
            if call.start not in of_losses and self._joins(call):
                self._check_join(call)
        for each in self._notes.gradients:
            noted |= set(range(each.start, each.stop))
            if any(getattr(one, "graph", None) is not self._graph for one in each.targets):
                raise _NotPlainError("it computes gradients in a branch, a loop or a function")
        others = [kind for index, (kind, _) in enumerate(self._tags) if index not in noted]
        others = [each for each in others if each in ("gather", "broadcast")]
        if others:
            raise _NotPlainError(f"it joins the replicas by itself ({others[0]})")

    def _joins(self, call: _Call) -> bool:
        return any(
            tag in (_ROWS, _PER_ROW, _OTHER) or (tag == _UNKNOWN and index == 0)
            for kind, tags in self._tags[call.start : call.stop]
            if kind != "beside"
            for index, tag in enumerate(tags)
        )

    def _check_join(self, call: _Call) -> None:
        """Raises if a value that the step joins can be no part of a mean."""
        if call.output.graph is not self._graph:
            raise _NotPlainError("it reduces rows in a branch, a loop or a function")
        if call.kind not in ("sum", "mean", "scale", "count"):
            raise _NotPlainError(f"it joins rows ({call.kind})")
        (_, tags), *others = self._tags[call.start : call.stop]
        if _OTHER in tags:
            raise _NotPlainError(f"a size or a number depends on the rows ({call.kind})")
        if call.kind == "mean" and _UNKNOWN in tags:
            raise _NotPlainError("it takes the mean of rows that a mask has chosen")
        if any(tag != _FIXED for _, beside in others for tag in beside):
            raise _NotPlainError("it compares all rows of a batch with each other")
        if self._has_padding:
            raise _NotPlainError("it reduces rows by hand, and some may be padding")

    # Operations.

    def _check_operation(self, index: int, operation: step_notes.Operation) -> None:
        op = operation.op
        in_metric = _is_in(index, self._ranges)
        self._check_place(index, operation, in_metric=in_metric)
        if in_metric:
            kind = Kind.RESULT
        elif _is_in(index, self._gradient_ranges):
            kind = Kind.OWN
        elif op.outputs and id(op.outputs[0]) in self._losses:
            kind = Kind.MEAN
        elif _is_in(index, self._loss_ranges):
            if any(self._kind(each) in (*_JOINED, *_OF_METRICS) for each in op.inputs):
                raise _NotPlainError("a loss is of values of the whole batch")
            kind = self._unjoined(operation)
        else:
            kind = self._kind_of(operation)
        for each in op.outputs:
            gradient = self._gradients.get(id(each))
            self._kinds[id(each)] = kind if gradient is None else self._kind_of_gradient(gradient)

    def _check_place(self, index: int, operation: step_notes.Operation, *, in_metric: bool) -> None:
        """Raises if an operation behind the update needs it, or assigns what may differ."""
        op, is_behind = operation.op, self._end is not None and index >= self._end
        known = self._metric_handles | self._other_handles
        if is_behind and any(id(each) not in known for each in operation.resources):
            raise _NotPlainError("it uses a variable of the update behind it")
        if is_behind and operation.has_effects and not operation.resources and not in_metric:
            raise _NotPlainError(f"{op.type} follows the update")
        written = [each for each in operation.written if id(each) not in self._metric_handles]
        if not written:
            return
        if op.type not in _ASSIGNING or self._kind(op.inputs[1]) != Kind.COMMON:
            raise _NotPlainError("it assigns a variable what may differ between the replicas")
        if self._in_parts:
            raise _NotPlainError("it assigns a variable, and accumulation_steps is not 1")

    def _unjoined(self, operation: step_notes.Operation) -> Kind:
        """Returns the kind of an operation without joined inputs."""
        op, kinds = operation.op, [self._kind(each) for each in operation.op.inputs]
        if op.type == "Placeholder":
            is_common = op.outputs[0].dtype == tf.resource
            is_common = is_common or step_notes.has_value_of_its_own(self._graph, op.outputs[0])
            return Kind.COMMON if is_common else Kind.OWN
        if id(op) in self._constants:
            return Kind.OWN
        if operation.is_function or "Random" in op.type:
            return Kind.OWN
        if operation.resources:
            if op.type in _ASSIGNING:
                return Kind.COMMON
            if op.type not in _READING:
                return Kind.OWN
            if any(id(each) in self._metric_handles for each in operation.resources):
                return Kind.RESULT
            if any(id(each) in self._layer_handles for each in operation.resources):
                return Kind.OWN  # by a layer, such as the moving mean of batch norm
        elif operation.has_effects:
            return Kind.OWN
        return Kind.OWN if any(each != Kind.COMMON for each in kinds) else Kind.COMMON

    def _kind_of(self, operation: step_notes.Operation) -> Kind:
        """Returns the kind of an operation of the step."""
        op = operation.op
        kinds = [self._kind(each) for each in op.inputs]
        if any(each in _OF_METRICS for each in kinds):
            if any(each in _JOINED for each in kinds):
                raise _NotPlainError(f"the result of a metric goes into {op.type}")
            return kinds[0] if op.type == "Identity" else Kind.DERIVED
        if op.type in _CALLING:  # what it computes may have been traced before
            raise _NotPlainError("it calls a tf.function")
        if "gradient" in op.name and _is_of_gradients(op.name):
            raise _NotPlainError("it computes gradients without tape.gradient")
        call = self._calls.get(id(op.outputs[0])) if op.outputs else None
        if call is not None and self._joins(call):
            return self._kind_of_join(call, op, kinds)
        if call is not None and call.kind == "count":
            return Kind.COMMON  # a whole number that does not depend on the rows
        if not any(each in _JOINED for each in kinds):
            return self._unjoined(operation)
        if op.type in OF_SHAPES:
            return Kind.OWN if Kind.OWN in kinds else Kind.COMMON
        kind = self._kind_of_linear(op, kinds, is_known=call is not None)
        if kind is None:
            joined = next(each for each in kinds if each in _JOINED)
            raise _NotPlainError(f"{joined.value} goes into {op.type}")
        return kind

    def _kind_of_join(self, call: _Call, op, kinds: list[Kind]) -> Kind:
        """Returns the kind of a value that the step joins over the replicas."""
        if call.kind == "count":
            return Kind.COUNT
        if call.kind == "scale":
            (_, (tag,)) = self._tags[call.start]
            is_first = op.inputs[0].op.type == "Const" and op.inputs[0].shape.rank == 0
            kind = None if call.divides and is_first else kinds[1 if is_first else 0]
            raises = (tag == _ROWS) != call.divides
            found = {(Kind.SUM, False): Kind.MEAN, (Kind.MEAN, True): Kind.SUM}.get((kind, raises))
            if found is None:
                raise _NotPlainError("it scales by the number of rows what is no sum over rows")
            return found
        if any(each in _JOINED for each in kinds):
            raise _NotPlainError(f"a reduction of rows takes {kinds[0].value}")
        return Kind.MEAN if call.kind == "mean" else Kind.SUM

    def _kind_of_linear(self, op, kinds: list[Kind], *, is_known: bool) -> Kind | None:
        """Returns the kind of an operation that is linear in its joined inputs; else None."""
        joined = {each for each in kinds if each in _JOINED}
        if len(joined) > 1 and op.type not in _DIVIDING:
            return None
        kind = kinds[0]
        if op.type in _SAME_VALUE:
            return kind if all(each == Kind.COMMON for each in kinds[1:]) else None
        if op.type == "Cast":
            return kind if op.inputs[0].dtype.is_floating and _dtype(op).is_floating else None
        if op.type in _ADDING or op.type == "SelectV2":
            if op.type == "SelectV2" and kinds[0] != Kind.COMMON:
                return None
            (kind,) = joined
            added = zip(op.inputs, kinds, strict=True)
            added = [each for each in added if each[1] not in _JOINED]
            added = added[1:] if op.type == "SelectV2" else added
            return kind if kind != Kind.COUNT and all(_adds_to(kind, *e) for e in added) else None
        if op.type in _SCALING:
            others = [each for each in kinds if each not in _JOINED]
            return next(iter(joined)) if others == [Kind.COMMON] else None
        if op.type in _DIVIDING:
            pairs = {(Kind.SUM, Kind.COUNT): Kind.MEAN}
            return kind if kinds[1] == Kind.COMMON else pairs.get(tuple(kinds))
        if op.type in _REDUCING and (is_known or op.inputs[0].shape.rank == 0):
            return kind if kind != Kind.COUNT and kinds[1] == Kind.COMMON else None
        return None

    def _kind_of_gradient(self, gradient: _Gradient) -> Kind:
        """Returns what gradients are: means over rows, or a value for each row."""
        targets = gradient.targets
        split = gradient.start + len(targets)
        of_targets, of_sources = (
            self._tags[gradient.start : split],
            self._tags[split : gradient.stop],
        )
        kinds = [self._kind(each) for each in targets]
        is_total = all(each.shape.rank == 0 for each in targets)
        to_weights = all(
            isinstance(each, keras.Variable | tf.Variable) for each in gradient.sources
        )
        if gradient.has_seed or any(each in (Kind.SUM, Kind.COUNT, *_OF_METRICS) for each in kinds):
            raise _NotPlainError("it differentiates what is no mean over rows")
        if is_total and to_weights:
            return Kind.MEAN
        by_row = all(_ROWS in tags for _, tags in (*of_targets, *of_sources))
        if by_row and Kind.MEAN not in kinds:
            return Kind.OWN
        raise _NotPlainError("it uses a gradient that is not of a loss to the weights")

    # What the step gives.

    def _check_apply(self, apply: _Apply) -> None:
        trained = {id(each) for each in self._model.trainable_variables}
        if not apply.is_in_step:
            raise _NotPlainError("it applies gradients in a branch, a loop or a function")
        if apply.optimizer is not self._model.optimizer:
            raise _NotPlainError("it uses another optimizer than the compiled one")
        if any(id(each) not in trained for each in apply.variables):
            raise _NotPlainError("it updates a variable that is not trainable")
        kinds = [self._kind(each) for each in apply.gradients]
        if any(each not in (Kind.MEAN, Kind.COMMON) for each in kinds):
            raise _NotPlainError("it applies other gradients than those of a loss")

    def _check_assignment(self, each: _Assignment) -> None:
        variable, kind = each.variable, self._kind(each.value)
        if each.in_metric:
            return
        if any(variable is one for one in self._updated):
            raise _NotPlainError(f"it assigns {variable.path}, which the update changes or reads")
        if id(variable) in self._of_metrics and not each.is_users:
            return  # tfaccel/step/padding.py, which takes back what padding has counted
        if kind in (*_JOINED, *_OF_METRICS) or (each.is_users and kind != Kind.COMMON):
            raise _NotPlainError(f"it assigns {variable.path} what depends on rows")
        is_seed = variable.dtype == "uint32"
        if each.is_users and self._in_parts and not is_seed:
            raise _NotPlainError(f"it assigns {variable.path}, and accumulation_steps is not 1")

    def _check_update(self, update: _Update, counts: bool) -> None:
        """Raises if a metric gets a joined value and does not take it for a mean over rows."""
        metric = update.metric
        flat = tf.nest.flatten((update.args, update.kwargs))
        tensors = [each for each in flat if self._kind(each) in (*_JOINED, *_OF_METRICS)]
        if not tensors:
            return
        are_means = all(self._kind(each) == Kind.MEAN for each in tensors)
        are_means = are_means and all(each.shape.rank == 0 for each in tensors)
        is_listed = metrics_lib.is_listed(self._model, metric)
        if has_own_update(metric):
            is_fine = metrics_lib.rule_of(metric) == metrics_lib.GATHER and not self._in_parts
        else:
            is_fine = self._weighs_well(update, counts)
        if not (are_means and is_listed and is_fine):
            raise _NotPlainError(f"the metric {metric.name} gets a value of the whole batch")

    def _weighs_well(self, update: _Update, counts: bool) -> bool:
        """Returns whether `Mean.update_state` gets a mean, and as its weight nothing or rows."""
        if not update.is_mean:
            return False
        named = dict(zip(("values", "sample_weight"), update.args, strict=False)) | update.kwargs
        weight = named.get("sample_weight")
        if self._has_padding and any(update.metric is each for each in loss_means_of(self._model)):
            return True  # its weight is the number of rows that are no padding
        if weight is None:
            return not self._in_parts  # each part counts as much, whatever its number of rows
        return counts and not self._has_padding


def _is_in(index: int, ranges: list[tuple[int, int]]) -> bool:
    return any(first <= index < last for first, last in ranges)


def _is_of_gradients(name: str) -> bool:
    """Returns whether TensorFlow made an operation to compute a gradient."""
    return any(each.startswith("gradients") or each == "gradient_tape" for each in name.split("/"))


def _dtype(op) -> tf.DType:
    return op.outputs[0].dtype


def _adds_to(kind: Kind, value: tf.Tensor, own: Kind) -> bool:
    """Returns whether a joined value plus another one is still of its kind."""
    if kind == Kind.SUM:
        return tf.get_static_value(value) == 0 if value.shape.rank == 0 else False
    return own == Kind.COMMON or (own == Kind.OWN and value.shape.rank == 0)
