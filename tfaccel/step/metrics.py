"""Metrics whose state the replicas may not simply add.

The state of a metric is the sum over its replicas. That suits Keras's own metrics, which count
rows. `Updates` takes care of the others during one replica's pass:

  - A metric with an `update_state` of its own is updated after the pass, with the rows of all
    replicas in the order of one device. So its result is that of one device, whatever it computes.
    A metric made of a function is, too, if the function does not return a value for each row.
  - If a metric with an `update_state` of its own names a rule, `merge_state`, each replica updates
    a state with its own rows, and the states are merged. The rule is "sum", "max" or "min", or a
    method `merge_state(self, metrics)` that merges the states of other metrics into this one.
  - A `keras.metrics.Mean` of a single number, such as a loss, gets the mean over all rows, once.

The merged state, or the one that has all rows, then lies on replica 0, and zeros on all others, so
that the sum over the replicas is again the state.

    updates = Updates(model, replica, weigh=..., has_rows=True, xla=False)
    with updates.kept():
        logs = updates.watching(model.train_step)(batch)
    states = updates.states()         # of all variables of metrics, to be summed over the replicas
    ...
    metrics = updates.settled(sums, updates.gathered(updates.take_sent()))
"""

import contextlib
import dataclasses
import functools
import logging
from collections.abc import Callable, Iterator, Sequence

import keras
import tensorflow as tf

from tfaccel.common.errors import UserError
from tfaccel.keras_internals.model_view import every_metric, own_metrics_of
from tfaccel.keras_internals.reductions import (
    has_own_update,
    mask_of,
    may_mix_rows,
    means_updated_by,
    mixes_rows,
    own_metrics_updated_by,
    results_noted_by,
    with_mask,
)
from tfaccel.keras_internals.replica import Replica
from tfaccel.keras_internals.variables import standing_in, value_of
from tfaccel.step.in_xla import NotInXlaError

log = logging.getLogger("tfaccel")

GATHER, SUM, METHOD = "gather", "sum", "method"
ELEMENTWISE = {"max": tf.reduce_max, "min": tf.reduce_min}


def rule_of(metric: keras.metrics.Metric) -> str:
    """Returns how the states of the replicas become one: GATHER, SUM, METHOD, "max" or "min".

    Raises:
      UserError: `merge_state` of the metric is none of these.
    """
    rule = getattr(metric, "merge_state", None)
    if not has_own_update(metric) or rule == SUM:
        return SUM
    if rule is None:
        return GATHER
    if callable(rule):
        return METHOD
    if rule in ELEMENTWISE:
        return rule
    raise UserError(
        f"the metric {metric.name} has merge_state={rule!r}; expected 'sum', 'max' or 'min', or a "
        "method merge_state(self, metrics); without merge_state it gets the rows of all replicas"
    )


def gathers(model) -> bool:
    """Returns whether the model may have a metric that gets the rows of all replicas.

    Raises:
      UserError: `merge_state` of a metric is no rule.
    """
    rules = [rule_of(each) for each in own_metrics_of(model)]
    others = [each for each in every_metric(model) if may_mix_rows(each) and not _is_own(each)]
    return GATHER in rules or bool(others)


def _is_own(metric) -> bool:
    return isinstance(metric, keras.metrics.Metric) and has_own_update(metric)


# The arguments of `update_state`, as a pass keeps them.


@dataclasses.dataclass(frozen=True)
class _Rows:
    """A tensor that is gathered: its place among those, its dtype, and its mask."""

    index: int
    dtype: tf.DType
    mask: "_Rows | None" = None


@dataclasses.dataclass(frozen=True)
class _Ragged:
    """A ragged tensor: its values and the lengths of its rows."""

    values: "_Rows | _Ragged"
    lengths: _Rows


@dataclasses.dataclass(frozen=True)
class _Number:
    """A single number: its place among those, and that of its weight; no weight for a count."""

    index: int
    weight: int | None
    dtype: tf.DType


@dataclasses.dataclass(frozen=True)
class _Call:
    """One call of `update_state`; `run` takes the arguments."""

    metric: keras.metrics.Metric
    run: Callable
    args: tuple
    kwargs: dict


class Updates:
    """The updates of metrics during one replica's pass, and what they come to after the sum.

    Attributes:
      numbers: numbers that `update_state` got, times the rows of their part of the batch, and these
        rows. They are to be summed over the replicas.
    """

    def __init__(self, model, replica: Replica, *, weigh: Callable, has_rows: bool, xla: bool):
        """Starts a pass.

        Args:
          model: the model, within `as_replica`.
          replica: the replica of the pass.
          weigh: returns the weight of a part of the batch: its rows, in any unit.
          has_rows: False if a row stands in for a batch without rows. It does not count.
          xla: whether XLA compiles the pass.
        """
        self.numbers = []
        self._model, self._replica, self._weigh = model, replica, weigh
        self._has_rows, self._xla = has_rows, xla
        self._graph = tf.compat.v1.get_default_graph()
        self._calls, self._sent, self._rows_per_row = [], [], []
        self._known = {}  # what stands for a tensor that several metrics get, by id, and the tensor
        # (metric, name within its result, value); without the value by log; ids of logged metrics.
        self._results, self._logs, self._logged = [], {}, set()
        # The means of single numbers, with their values before; and the ids of those of rows too.
        self._tracked, self._mixed = {}, set()
        self._is_inside, self._num_rows, self._weight, self._weight_index = False, 0, None, None
        self._of_function = None  # the call of `update_state` of a metric made of a function
        self._merged = []
        if replica.num_replicas > 1:
            own = [each for each in own_metrics_of(model) if rule_of(each) not in (GATHER, SUM)]
            self._merged = [each for each in own if self._is_listed(each)]

    def starts(self) -> dict[int, tf.Tensor]:
        """Lets the states that are merged start anew; returns the variables' values by id.

        The state so far is replica 0's. The others' are merged into it.
        """
        if self._replica.index == 0:
            return {}
        values = {}
        for metric in self._merged:
            metric.reset_state()
            for each in metric.variables:
                values[id(each)] = tf.identity(value_of(each))
        return values

    @contextlib.contextmanager
    def kept(self) -> Iterator[None]:
        """Within the context, updates that need all replicas' rows are kept for `settled`."""
        if self._replica.num_replicas == 1:
            yield
            return
        with (
            own_metrics_updated_by(self._update),
            means_updated_by(self._tracking),
            results_noted_by(self._note_result),
        ):
            yield
        # What was counted of a single number is done again, with the mean over all rows.
        self._calls = [each for each in self._calls if id(each.metric) not in self._mixed]
        for key, (metric, before) in self._tracked.items():
            if key not in self._mixed:
                for variable, value in zip(metric.variables, before, strict=True):
                    variable.assign(value)
        self._tracked, self._known, self._graph, self._weight = {}, {}, None, None

    def watching(self, step: Callable) -> Callable:
        """Returns the step; a call of it is a part of the batch."""

        def run(batch):
            self._weight = self._weigh(batch)
            self._num_rows = next(
                (each.shape[0] for each in tf.nest.flatten(batch) if each is not None), None
            )
            self._weight_index = None
            logs = step(batch)
            self._note_logs(logs)
            self._warn_of_results()
            return logs

        return run

    # While the step is traced.

    def _update(self, metric, own: Callable, args: tuple, kwargs: dict) -> None:
        if not has_own_update(metric):  # of a function: what that returns decides
            self._of_function = metric, own, args, kwargs
            try:
                own(*args, **kwargs)
            finally:
                self._of_function = None
        elif rule_of(metric) != GATHER or not self._is_listed(metric):
            self._run(own, args, kwargs)
        else:
            self._check_place(metric)
            if not metric.variables:  # it makes them at its first update
                self._run(own, args, kwargs)
                metric.reset_state()
            self._keep(metric, own, args, kwargs)

    def _keep(self, metric, own: Callable, args: tuple, kwargs: dict) -> None:
        send = functools.partial(self._send, metric)
        args, kwargs = tf.nest.map_structure(send, (args, kwargs))
        self._calls.append(_Call(metric, own, args, kwargs))

    def _run(self, own: Callable, args: tuple, kwargs: dict) -> None:
        self._is_inside = True
        try:
            own(*args, **kwargs)
        finally:
            self._is_inside = False

    def _is_listed(self, metric) -> bool:
        """Returns whether the metric is one of the model's, which the model resets."""
        listed = {id(each) for each in self._model.metrics_variables}
        return all(id(each) in listed for each in metric.variables)

    def _check_place(self, metric) -> None:
        if tf.compat.v1.get_default_graph() is self._graph:
            return
        if self._xla:
            raise NotInXlaError(
                f"the metric {metric.name} needs the rows of all replicas, in a loop or a branch "
                "of the step; with merge_state it would not"
            )
        raise UserError(
            f"update_state of the metric {metric.name} is called in a branch, loop or tf.function "
            "within the step, where the rows of other replicas cannot reach it; call it outside, "
            "or give the metric merge_state = 'sum', 'max' or 'min', or a method "
            "merge_state(self, metrics)"
        )

    def _send(self, metric, leaf):
        """Keeps an argument of `update_state`; returns what stands for it."""
        if not isinstance(leaf, tf.Tensor | tf.RaggedTensor | tf.SparseTensor):
            return leaf
        if hasattr(leaf, "numpy"):  # made outside the step, so the same on every replica
            return leaf
        if isinstance(leaf, tf.RaggedTensor):
            values = self._send_rows(metric, leaf.values, per_row=False)
            return _Ragged(values, self._send_rows(metric, leaf.row_lengths()))
        if isinstance(leaf, tf.SparseTensor) or leaf.dtype == tf.string:
            kind = "a SparseTensor" if isinstance(leaf, tf.SparseTensor) else "strings"
            raise UserError(
                f"update_state of the metric {metric.name} gets {kind}, which replicas cannot "
                "exchange; expected dense numbers: convert them before, or give the metric "
                "merge_state = 'sum', 'max' or 'min', or a method merge_state(self, metrics)"
            )
        if leaf.shape.rank == 0:
            self._warn_of_number(metric, leaf)
            return self._send_number(leaf)
        if id(leaf) not in self._known:
            self._known[id(leaf)] = self._send_rows(metric, leaf), leaf
        return self._known[id(leaf)][0]

    def _send_rows(self, metric, value, *, per_row: bool = True):
        if isinstance(value, tf.RaggedTensor):
            inner = self._send_rows(metric, value.values, per_row=False)
            return _Ragged(inner, self._send_rows(metric, value.row_lengths(), per_row=False))
        size = value.shape[0]
        if size is None and self._xla:
            raise NotInXlaError(
                f"the metric {metric.name} gets a number of rows that is not known before"
            )
        is_known = per_row and size is not None and self._num_rows
        if is_known and size % self._num_rows:
            raise UserError(
                f"update_state of the metric {metric.name} gets a tensor of shape {value.shape} "
                f"for {self._num_rows} rows; with several replicas its first axis must be rows: "
                "pass rows, or give the metric merge_state = 'sum', 'max' or 'min', or a method "
                "merge_state(self, metrics)"
            )
        mask = mask_of(value)
        mask = None if mask is None else self._send_rows(metric, mask)
        self._rows_per_row.append(size // self._num_rows if is_known else None)
        self._sent.append(tf.cast(value if self._has_rows else value[:0], _sent_as(value.dtype)))
        return _Rows(len(self._sent) - 1, value.dtype, mask)

    def _send_number(self, value: tf.Tensor) -> _Number:
        counts = not value.dtype.is_floating
        dtype = tf.float64 if counts or value.dtype == tf.float64 else tf.float32
        number = tf.cast(value, dtype)
        if not counts and self._weight_index is None:
            self._weight_index = len(self.numbers)
            self.numbers.append(tf.cast(self._weight if self._has_rows else 0.0, tf.float32))
        if counts:
            number = number if self._has_rows else tf.zeros_like(number)
        else:
            weight = tf.cast(self.numbers[self._weight_index], dtype)
            # A weight of 0 gives 0, even for NaN.
            number = tf.where(weight > 0, number * weight, tf.zeros_like(number))
        self.numbers.append(number)
        return _Number(len(self.numbers) - 1, None if counts else self._weight_index, value.dtype)

    def _warn_of_number(self, metric, value: tf.Tensor) -> None:
        if self._replica.local_index > 0:
            return
        taken_as = "a mean over rows" if value.dtype.is_floating else "a count, which is added up"
        log.warning(
            "step: update_state of the metric %s gets one number for all rows. It is taken as %s, "
            "so that several replicas make one. If it is something else, pass the rows",
            metric.name,
            taken_as,
        )

    def _tracking(self, update_state: Callable) -> Callable:
        """Returns `Mean.update_state` that also keeps single numbers."""

        @functools.wraps(update_state)
        def update(metric, values, sample_weight=None):
            if self._needs_all_rows(metric, values):
                self._keep(*self._of_function)
                return None
            if not self._is_inside and self._is_listed(metric):
                self._note_number(metric, tf.convert_to_tensor(values), sample_weight)
            # The step may ask for the result, so it is counted here, too.
            return update_state(metric, values, sample_weight)

        return update

    def _needs_all_rows(self, metric, values) -> bool:
        """Returns whether the values that the function of a metric returned are not those of rows.

        With weights they have to be, as in Keras.
        """
        if self._of_function is None or self._of_function[0] is not metric:
            return False
        _, _, args, kwargs = self._of_function
        arguments = dict(zip(("y_true", "y_pred", "sample_weight"), args, strict=False)) | kwargs
        is_here = tf.compat.v1.get_default_graph() is self._graph
        if arguments.get("sample_weight") is not None or not is_here or not self._is_listed(metric):
            return False
        rank = values.shape.rank
        size = values.shape[0] if rank else None
        other = rank == 0 or (size is not None and size % (self._num_rows or 1))
        return bool(other) or mixes_rows(metric, arguments["y_pred"])

    def _note_number(self, metric, number: tf.Tensor, sample_weight) -> None:
        is_here = tf.compat.v1.get_default_graph() is self._graph
        is_float = keras.backend.is_float_dtype(metric.dtype)
        if number.shape.rank != 0 or sample_weight is not None or not is_here or not is_float:
            self._mixed.add(id(metric))
            return
        if id(metric) not in self._tracked:
            before = [tf.identity(value_of(each)) for each in metric.variables]
            self._tracked[id(metric)] = metric, before
        number = self._send_number(tf.cast(number, metric.dtype))
        self._calls.append(_Call(metric, functools.partial(_count, metric), (number,), {}))

    def _note_result(self, metric, result) -> None:
        for name, value in result.items() if isinstance(result, dict) else [(None, result)]:
            self._results.append((metric, name, value))

    def _note_logs(self, logs: dict) -> None:
        """Notes which logs are results of metrics, whatever their names are."""
        for key, value in logs.items():
            if isinstance(value, dict):
                self._note_logs(value)
            for metric, name, result in self._results:
                if value is result and self._is_listed(metric):
                    self._logged.add(id(metric))
                    self._logs.setdefault(key, (metric, name))

    def _warn_of_results(self) -> None:
        """Warns if the step computes something from a result that lacks its own rows."""
        asked = {id(metric): metric for metric, *_ in self._results}
        asked = {key: metric for key, metric in asked.items() if key not in self._logged}
        self._results = []
        for metric in asked.values() if self._replica.local_index == 0 else ():
            if rule_of(metric) != SUM and self._is_listed(metric):
                log.warning(
                    "step: the step asks for the result of the metric %s and does not log it as it "
                    "is. On several replicas the rows of this step are not in it yet",
                    metric.name,
                )

    # Between the replicas.

    def take_sent(self) -> list[tf.Tensor]:
        """Returns the rows for `settled` to be gathered, and forgets them."""
        sent, self._sent = self._sent, []
        return sent

    def gathered(self, sent: list[tf.Tensor]) -> list[tf.Tensor]:
        """Returns the rows of all replicas, outside XLA."""
        found = [self._replica.all_gather(each) for each in sent]
        for own, each in zip(sent, found, strict=True):
            each.set_shape([None, *own.shape[1:]])
        return found

    def in_place(self, sent: list[tf.Tensor], rows: Sequence[int]) -> list[tf.Tensor]:
        """Returns this replica's rows in their place among zeros: their sum has all rows.

        XLA has no gathering of different numbers of rows.

        Args:
          sent: from `take_sent`.
          rows: the rows of each replica's batch.
        """
        placed = []
        for each, times in zip(sent, self._rows_per_row, strict=True):
            sizes, own = [times * rows for rows in rows], self._replica.index
            ends = [[sum(sizes[:own]), sum(sizes[own + 1 :])]]
            placed.append(tf.pad(each, ends + [[0, 0]] * (each.shape.rank - 1)))
        return placed

    def states(self) -> list[tf.Tensor]:
        """Returns what this replica adds to the sums, for each variable of the metrics.

        The states that are merged lie in their place among zeros: [replicas, ...].
        """
        merged = {id(variable) for metric in self._merged for variable in metric.variables}
        states = []
        for variable in self._model.metrics_variables:
            state = tf.convert_to_tensor(value_of(variable))
            if id(variable) in merged:
                others = [tf.zeros_like(state)] * self._replica.num_replicas
                others[self._replica.index] = state
                state = tf.stack(others)
            states.append(state)
        return states

    # After the sum.

    def settled(
        self, rows: tf.Tensor, sums: list, numbers: list, gathered: list
    ) -> list[tf.Tensor]:
        """Merges states, makes the kept updates, and assigns what this replica holds of each state.

        Args:
          rows: the number of all replicas' rows. If it is 0, all rows are padding.
          sums: the sums of `states`.
          numbers: the sums of `numbers`.
          gathered: the rows of all replicas.

        Returns:
          The values of the metrics' variables.
        """
        variables = {id(each): each for each in self._model.metrics_variables}
        values = dict(zip(variables, sums, strict=True))
        for metric in self._merged:
            keys = [id(each) for each in metric.variables]
            values |= zip(keys, _merged(metric, [values[each] for each in keys]), strict=True)
        updated = {id(each.metric): each.metric for each in self._calls}.values()
        keys = dict.fromkeys(id(variable) for metric in updated for variable in metric.variables)
        for each in keys:
            variables[each].assign(values[each])
        for call in self._calls:
            find = functools.partial(_found, numbers=numbers, gathered=gathered)
            args, kwargs = tf.nest.map_structure(find, (call.args, call.kwargs))
            call.run(*args, **kwargs)
        for each in keys:
            values[each] = tf.where(rows > 0, value_of(variables[each]), values[each])
        keys |= dict.fromkeys(id(variable) for each in self._merged for variable in each.variables)
        for each in keys:
            is_first = self._replica.index == 0
            variables[each].assign(values[each] if is_first else tf.zeros_like(values[each]))
        return list(values.values())

    def results(self, names: set[str]) -> dict[str, tf.Tensor]:
        """Returns those of the named logs that are results of metrics, of the settled states."""
        results = {}
        for key in names & self._logs.keys():
            metric, name = self._logs[key]
            result = metric.result()
            results[key] = tf.convert_to_tensor(result if name is None else result[name])
        return results


def _count(metric, number: tf.Tensor) -> None:
    keras.metrics.Mean.update_state(metric, number)


def _found(leaf, *, numbers: list, gathered: list):
    """Returns the argument that a leaf of a call stands for."""
    if isinstance(leaf, _Number):
        number = numbers[leaf.index]
        if leaf.weight is not None:
            number = tf.math.divide_no_nan(number, tf.cast(numbers[leaf.weight], number.dtype))
        return tf.cast(number, leaf.dtype)
    if isinstance(leaf, _Ragged):
        values, lengths = (
            _found(each, numbers=numbers, gathered=gathered) for each in (leaf.values, leaf.lengths)
        )
        return tf.RaggedTensor.from_row_lengths(values, lengths, validate=False)
    if isinstance(leaf, _Rows):
        rows = tf.cast(gathered[leaf.index], leaf.dtype)
        if leaf.mask is None:
            return rows
        return with_mask(rows, _found(leaf.mask, numbers=numbers, gathered=gathered))
    return leaf


def _merged(metric, states: list[tf.Tensor]) -> list[tf.Tensor]:
    """Returns one state of the replicas' states: of each variable, [replicas, ...]."""
    rule = rule_of(metric)
    if rule in ELEMENTWISE:
        return [ELEMENTWISE[rule](each, axis=0) for each in states]
    variables = metric.variables
    for variable, each in zip(variables, states, strict=True):
        variable.assign(each[0])
    keys = [id(each) for each in variables]
    others = [
        standing_in(metric, dict(zip(keys, [each[index] for each in states], strict=True)))
        for index in range(1, states[0].shape[0])
    ]
    metric.merge_state(others)
    return [tf.identity(value_of(each)) for each in variables]


def _sent_as(dtype: tf.DType) -> tf.DType:
    # Not every collective takes half precision, bool or small integers. float64 holds whole numbers
    # up to 2**53.
    if dtype.is_floating:
        return dtype if dtype.size >= 4 else tf.float32
    return tf.float64
