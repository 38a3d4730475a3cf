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

    updates = Updates(model, replica, weigh=..., has_rows=True, in_parts=False, xla=False)
    with updates.replaced():
        logs = updates.watching(model.train_step)(batch)
    updates.finish()
    states = updates.states()         # of all variables of metrics, to be summed over the replicas
    ...
    gathered = updates.inputs.gathered(updates.inputs.take_sent())
    metrics = updates.settled(rows, sums, sums_of_numbers, gathered)
"""

import contextlib
import dataclasses
import functools
import logging
from collections.abc import Callable, Iterator

import keras
import tensorflow as tf

from tfaccel.common.errors import UserError
from tfaccel.keras_internals import row_operations
from tfaccel.keras_internals.model_view import every_metric, own_metrics_of
from tfaccel.keras_internals.patching import Attributes, swapped, with_entry
from tfaccel.keras_internals.reductions import (
    CALLERS,
    as_weighed_now,
    function_of,
    has_own_update,
    may_mix_rows,
    means_updated_by,
    metric_methods_by,
    mixes_rows,
    own_metrics_updated_by,
    results_noted_by,
)
from tfaccel.keras_internals.replica import Replica
from tfaccel.keras_internals.variables import standing_in, value_of
from tfaccel.step.in_xla import NotInXlaError
from tfaccel.step.merged_results import UsesResultsError, among_zeros, put_back, states_of
from tfaccel.step.metric_inputs import Inputs

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


def is_listed(model, metric: keras.metrics.Metric) -> bool:
    """Returns whether a metric is one of the model's, which the model resets."""
    listed = {id(each) for each in model.metrics_variables}
    return all(id(each) in listed for each in metric.variables)


@dataclasses.dataclass(frozen=True)
class _Call:
    """One call of `update_state`; `run` takes the arguments."""

    metric: keras.metrics.Metric
    run: Callable
    arguments: tuple  # args and kwargs, of what stands for them


class Updates:
    """The updates of metrics during one replica's pass, and what they come to after the sum.

    Attributes:
      inputs: what the updates get, to be exchanged between the replicas.
      merging: merges results where the step asks for them; None if only logs need results.
      before: the values of metrics' variables, by id, that a replica without rows goes on with.
    """

    def __init__(
        self,
        model,
        replica: Replica,
        *,
        weigh: Callable,
        has_rows: bool,
        in_parts: bool,
        xla: bool,
    ):
        """Starts a pass.

        Args:
          model: the model, within `as_replica`.
          replica: the replica of the pass.
          weigh: returns the weight of a part of the batch: its rows, in any unit.
          has_rows: False if a row stands in for a batch without rows. It does not count.
          in_parts: whether the pass takes the batch in parts.
          xla: whether XLA compiles the pass.
        """
        self.inputs = Inputs(replica, has_rows=has_rows, xla=xla)
        self._model, self._replica, self._weigh, self._xla = model, replica, weigh, xla
        self._in_parts = in_parts
        self._graph = self._part_graph = tf.compat.v1.get_default_graph()
        self._calls = []
        # Results so far, as (metric, name within its result, value). The metric is None for what
        # the model's `get_metrics_result` computes. `_logs` has (metric, name) for each log.
        self._results, self._logs = [], {}
        # The means that got single numbers, with their values before the step; and the ids of those
        # that got values of rows, too.
        self._tracked, self._mixed = {}, set()
        self._is_inside, self.merging, self.before = False, None, {}
        self._num_kept = 0  # calls that this part of the batch has kept
        self._added = {}  # (sum, count) of what this part has added to each mean in `_tracked`
        self._excused = {}  # how often Keras itself uses a result, by the result's id
        self._of_function = None  # the call of `update_state` of a metric made of a function
        self._merged = []
        if replica.num_replicas > 1:
            own = [each for each in own_metrics_of(model) if rule_of(each) not in (GATHER, SUM)]
            self._merged = [each for each in own if is_listed(self._model, each)]

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
    def own_part(self, *, has_rows: bool) -> Iterator[None]:
        """Within the context, a part of the batch is traced in turn with others."""
        names = ("_is_inside", "_of_function", "_num_kept", "merging", "_added", "_results")
        own = [(self, each) for each in names]
        with swapped(Attributes(own + self.inputs.of_part())):
            self.inputs.has_rows &= has_rows
            self._added, self._results = {}, []
            yield

    @contextlib.contextmanager
    def replaced(self) -> Iterator[None]:
        """Within the context, updates that need all replicas' rows are kept for `settled`."""
        if self._replica.num_replicas == 1 and not self._in_parts:
            yield
            return
        with contextlib.ExitStack() as contexts:
            if self._in_parts:  # inside the others, which keep the updates of a part without rows
                skipping = metric_methods_by("update_state", self._unless_without_rows, but=CALLERS)
                contexts.enter_context(skipping)
            contexts.enter_context(own_metrics_updated_by(row_operations.unnoticed(self._update)))
            contexts.enter_context(means_updated_by(self._tracking))
            contexts.enter_context(self.noting_results())
            yield

    @contextlib.contextmanager
    def noting_results(self) -> Iterator[None]:
        """Within the context, results are noted that the step asks for."""
        own = self._excusing(self._model.get_metrics_result)
        with (
            results_noted_by(self._result),
            with_entry(vars(self._model), "get_metrics_result", own),
        ):
            yield

    def finish(self) -> None:
        """Ends the pass."""
        # What was counted of a single number is done again, with the mean over all rows.
        self._calls = [each for each in self._calls if id(each.metric) not in self._mixed]
        for key, (metric, before) in self._tracked.items():
            if key not in self._mixed:
                for variable, value in zip(metric.variables, before, strict=True):
                    variable.assign(value)
        # Lets go of the graph.
        self._tracked, self._graph, self._part_graph = {}, None, None
        self.merging, self.before, self._added, self._excused = None, {}, {}, {}

    def watching(self, step: Callable) -> Callable:
        """Returns the step; a call of it is a part of the batch."""

        def run(batch):
            rows = (each.shape[0] for each in tf.nest.flatten(batch) if each is not None)
            self._results = []
            self._num_kept, self._part_graph = 0, tf.compat.v1.get_default_graph()
            self.inputs.begin_part(next(rows, None), self._weigh(batch))
            logs = step(batch)
            self._check_uses(logs)
            self._note_logs(logs)
            self._results = []  # lets go of the graph
            return logs

        return run

    # While the step is traced.

    def _unless_without_rows(self, own: Callable, metric, args: tuple, kwargs: dict) -> None:
        is_in_pass = self._part_graph is not None
        if not is_in_pass or self.inputs.has_rows or not metric.variables:
            own(*args, **kwargs)

    def _update(self, metric, own: Callable, args: tuple, kwargs: dict) -> None:
        if not has_own_update(metric):  # of a function: what that returns decides
            self._of_function, self._function = (metric, own, args, kwargs), function_of(metric)
            try:
                own(*args, **kwargs)
            finally:
                self._of_function = None
        elif (
            self._replica.num_replicas == 1
            or rule_of(metric) != GATHER
            or not is_listed(self._model, metric)
        ):
            self._run(own, args, kwargs)
        else:
            self._check_place(metric)
            if not metric.variables:  # it makes them at its first update
                self._run(own, args, kwargs)
                metric.reset_state()
            self._keep(metric, own, args, kwargs)

    def _keep(self, metric, own: Callable, args: tuple, kwargs: dict) -> None:
        own = as_weighed_now(own)
        self._append(_Call(metric, own, self.inputs.kept(metric, (args, kwargs))))

    def _append(self, call: _Call) -> None:
        """Keeps a call: the same call in another part has been given the rows of that part."""
        if self._num_kept == len(self._calls):
            self._calls.append(call)
        elif self._calls[self._num_kept].metric is not call.metric:
            raise UserError(
                f"a part of a batch updates the metric {call.metric.name} where another part "
                f"updates {self._calls[self._num_kept].metric.name}; with accumulation_steps the "
                "step must make the same updates for any number of rows"
            )
        self._num_kept += 1

    def _run(self, own: Callable, args: tuple, kwargs: dict) -> None:
        self._is_inside = True
        try:
            own(*args, **kwargs)
        finally:
            self._is_inside = False

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

    def _tracking(self, update_state: Callable) -> Callable:
        """Returns `Mean.update_state` that also keeps single numbers."""

        @functools.wraps(update_state)
        def update(metric, values, sample_weight=None):
            with row_operations.noticing(on=False):
                if self._needs_all_rows(metric, values):
                    self._keep(*self._of_function)
                    return None
                if not self._is_inside and is_listed(self._model, metric):
                    self._note_number(metric, tf.convert_to_tensor(values), sample_weight)
            # The step may ask for the result, so it is counted here, too.
            return update_state(metric, values, sample_weight)

        return update

    def _needs_all_rows(self, metric, values) -> bool:
        """Returns whether the values that the function of a metric returned are not those of rows.

        With weights they have to be, as in Keras. In a part of the batch they are taken for a mean.
        """
        if self._of_function is None or self._of_function[0] is not metric or self._in_parts:
            return False
        _, _, args, kwargs = self._of_function
        arguments = dict(zip(("y_true", "y_pred", "sample_weight"), args, strict=False)) | kwargs
        if arguments.pop("sample_weight", None) is not None or not is_listed(self._model, metric):
            return False
        # It must not depend on the number of rows: all replicas have to decide alike.
        if values.shape.rank != 0 and not mixes_rows(metric, self._function, **arguments):
            return False
        return tf.compat.v1.get_default_graph() is self._graph

    def _note_number(self, metric, number: tf.Tensor, sample_weight) -> None:
        is_here = tf.compat.v1.get_default_graph() is self._part_graph
        is_float = keras.backend.is_float_dtype(metric.dtype)
        if number.shape.rank != 0 or sample_weight is not None or not is_here or not is_float:
            self._mixed.add(id(metric))
            return
        if id(metric) not in self._tracked:
            before = [tf.identity(value_of(each)) for each in metric.variables]
            self._tracked[id(metric)] = metric, before
        number = tf.cast(number, metric.dtype)
        total, count = self._added.get(id(metric), (0, 0))
        self._added[id(metric)] = total + number, count + 1
        number = self.inputs.kept_number(number)
        self._append(_Call(metric, functools.partial(_count, metric), ((number,), {})))

    def _result(self, metric, compute: Callable):
        if self._is_inside or not is_listed(self._model, metric):
            return compute()
        if self.merging is not None:
            return self.merging.result(self, metric, compute)
        result = compute()
        for name, value in result.items() if isinstance(result, dict) else [(None, result)]:
            self._results.append((metric, name, value))
        return result

    def _excusing(self, get_metrics_result: Callable) -> Callable:
        """Returns the model's function, which may compute with results: it is called again."""

        @functools.wraps(get_metrics_result)
        def get():
            first = len(self._results)
            results = get_metrics_result()
            if self.merging is None:
                known = {id(value) for *_, value in self._results[first:]}
                others = [(None, *each) for each in results.items() if id(each[1]) not in known]
                self._results += others
                for *_, value in filter(_is_symbolic, self._results[first:]):
                    self._excused[id(value)] = len(value.consumers())
            return results

        return get

    def _check_uses(self, logs: dict) -> None:
        """Raises if the step computes something from a result, which lacks the others' rows."""
        for metric, name, value in filter(_is_symbolic, self._results):
            is_used = len(value.consumers()) > self._excused.get(id(value), 0)
            if metric is None:  # of the model's `get_metrics_result`
                is_used |= any(each is value for key, each in logs.items() if key != name)
            if is_used:
                what = "results" if metric is None else f"the result of the metric {metric.name}"
                raise UsesResultsError(f"the step computes with {what}")

    def merged_now(self, metric, variables: list, merging, *, is_first: bool) -> list[tf.Tensor]:
        """Returns the states of a metric's variables, of what all replicas have counted so far."""
        states = [self.before.get(id(each), value_of(each)) for each in variables]
        states = [tf.convert_to_tensor(each) for each in states]
        if metric in self._merged:
            stacked = merging.stacked(states, is_first=is_first)
            with put_back(variables):
                return _merged(metric, stacked)
        if id(metric) in self._tracked and id(metric) not in self._mixed:
            _, before = self._tracked[id(metric)]
            total, count, *others = merging.totals(before, is_first=is_first)
            added, times = self._added.get(id(metric), (tf.zeros_like(total), 0))
            return [total + merging.mean(added), count + tf.cast(times, count.dtype), *others]
        sums = merging.totals(states, is_first=is_first)
        calls = [each for each in self._calls[: self._num_kept] if each.metric is metric]
        if not calls:
            return sums
        numbers = merging.totals(self.inputs.numbers) if self.inputs.numbers else []
        gathered = self.inputs.gathered_now(merging)
        with put_back(variables):
            for variable, each in zip(variables, sums, strict=True):
                variable.assign(each)
            for call in calls:
                args, kwargs = self.inputs.found(call.arguments, numbers=numbers, gathered=gathered)
                self._run(call.run, args, kwargs)
            return states_of(variables)

    def _note_logs(self, logs: dict) -> None:
        """Notes which logs are results of metrics, whatever their names are."""
        for key, value in logs.items():
            if isinstance(value, dict):
                self._note_logs(value)
            for metric, name, result in self._results:
                if value is result and metric is not None:
                    self._logs.setdefault(key, (metric, name))

    # Between the replicas.

    def states(self) -> list[tf.Tensor]:
        """Returns what this replica adds to the sums, for each variable of the metrics.

        The states that are merged lie in their place among zeros: [replicas, ...].
        """
        merged = {id(variable) for metric in self._merged for variable in metric.variables}
        states = []
        for variable in self._model.metrics_variables:
            state = tf.convert_to_tensor(value_of(variable))
            if id(variable) in merged:
                state = among_zeros(state, self._replica)
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
          numbers: the sums of `inputs.numbers`.
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
            args, kwargs = self.inputs.found(call.arguments, numbers=numbers, gathered=gathered)
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


def checking_uses(model, replica: Replica, step: Callable) -> Callable:
    """Returns a step whose trace, which never runs, shows what it computes from results.

    A step that runs as Python has values, of which that is not known.

    Raises (when it is traced):
      UsesResultsError: the step computes with the result of a metric.
    """

    @functools.wraps(step)
    def checked(batch):
        settings = {"has_rows": True, "in_parts": False, "xla": False}
        updates = Updates(model, replica, weigh=lambda _: None, **settings)
        with updates.noting_results():
            return updates.watching(step)(batch)

    return checked


def _is_symbolic(result: tuple) -> bool:
    return tf.is_symbolic_tensor(result[-1])


def _count(metric, number: tf.Tensor) -> None:
    keras.metrics.Mean.update_state(metric, number)


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
