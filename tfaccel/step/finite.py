"""What a training step finds infinite or NaN, and how that stays out of the model.

Takes a replica's model while its step is traced; gives the first such variable as a number.

    logs = watched(model, model.train_step, batch, xla=True)
    code = logs.pop(LOG)        # FINE, WEIGHTS or 1 + the index of a variable

All is found in sums over the replicas, so that each replica finds the same. A check costs one read
of the gradients and one of the weights: a mean squared error of 0.3 says nothing of a NaN that a
ReLU hid from it. Without XLA, which variable it is is looked for in one branch, which most steps do
not take: each branch is felt at a start, where Python traces it, and holds up a GPU's step.
"""

import contextlib
import functools
import operator
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import keras
import numpy as np
import tensorflow as tf

from tfaccel.keras_internals.model_view import every_optimizer, variables_of
from tfaccel.keras_internals.recording import noted
from tfaccel.keras_internals.variables import value_of
from tfaccel.step.totals import Span

# Any other code is 1 + the index of a variable in `variables_of`.
FINE, WEIGHTS, OTHER = 0, -1, 2**40  # OTHER: the gradient of what is not the model's
_NONE = OTHER + 1  # nothing was found, as a number above all that may be
LOG = "nonfinite"  # where a step's logs have the code, until Keras sees them
AT_ONCE = 32  # tensors: XLA fuses at most some ninety operands


def watched(model, step: Callable, batch, *, xla: bool, compile_: Callable | None = None) -> dict:
    """Runs the model's own step on its only replica, and leaves out what is not finite.

    Args:
      model: within `as_replica`.
      step: of the model, as a function of a batch.
      batch: of the replica.
      xla: whether XLA compiles what is traced.
      compile_: makes a function of the update that XLA compiles, where it does not compile all;
        None to let it be.

    Returns:
      Its logs, those of the loss scale, and the code.
    """
    metrics = model.metrics_variables
    before = [tf.convert_to_tensor(value_of(each)) for each in metrics]
    watch = Watch(model, xla=xla, compile_=compile_)
    with watch.updates(), noted(_floating_state(model)) as recording:
        logs = step(batch)
    watch.put_back(recording.assigned())
    after = [tf.convert_to_tensor(value_of(each)) for each in metrics]
    spoilt = watch.spoilt(metrics, before, after)
    put_back_where(spoilt, metrics, before, after)
    return _with_results(model, logs, spoilt) | watch.scale_logs() | {LOG: watch.code()}


def _floating_state(model) -> list:
    metrics = {id(each) for each in model.metrics_variables}
    return [
        each
        for each in model.non_trainable_variables
        if value_of(each).dtype.is_floating and id(each) not in metrics
    ]


def put_back_where(
    spoilt: tf.Tensor, variables: list, before: list[tf.Tensor], after: list | None = None
) -> None:
    """Gives the Keras variables the values that they had before, where that is so.

    Args:
      spoilt: whether it is.
      variables: in Keras.
      before: their values before.
      after: their values now; None to read them.
    """
    after = [value_of(each) for each in variables] if after is None else after
    for variable, old, new in zip(variables, before, after, strict=True):
        variable.assign(tf.where(spoilt, old, new))


def _with_results(model, logs: dict, spoilt: tf.Tensor) -> dict:
    """Returns the logs; of metrics that were put back, with their results as they are now."""
    results = model.get_metrics_result()
    return logs | {
        name: tf.where(spoilt, tf.cast(results[name], value.dtype), value)
        for name, value in logs.items()
        if name in results and tf.is_tensor(value) and value.shape == results[name].shape
    }


class _Look(NamedTuple):
    """What a look at some values found.

    Attributes:
      found: whether one is bad.
      code: of the first variable with one, or _NONE; without XLA a function that finds it, to be
        called in a branch where one is bad.
    """

    found: tf.Tensor
    code: tf.Tensor | Callable[[], tf.Tensor]


class Watch:
    """What one step does to one replica's model, as far as it is finite."""

    def __init__(self, model, *, xla: bool, compile_: Callable | None = None):
        """Takes the model, within `as_replica`, and whether XLA compiles what is traced.

        And `compile_`, as `watched` does.
        """
        self._model, self._xla, self._compile = model, xla, compile_
        self._graph = tf.compat.v1.get_default_graph()
        self._codes = {id(each): 1 + i for i, each in enumerate(variables_of(model))}
        self._looks, self._refused, self._overflowed = [], [], []

    @contextlib.contextmanager
    def updates(self, spans: Sequence[Span] = ()) -> Iterator[None]:
        """Within the context, the optimizer applies gradients if all are finite, or none.

        Otherwise weights, slots and iterations stay as they are. A dynamic loss scale that
        overflows is halved, by Keras, and is no fault.

        Args:
          spans: the same gradients, uncut, where they came out of vectors: a look at each span is
            quicker than one at every gradient.
        """
        with contextlib.ExitStack() as watched:
            for each in every_optimizer(self._model):
                apply = functools.partial(self.apply, each, spans=spans)
                watched.enter_context(_set(each, apply=apply))
            yield

    def apply(
        self, optimizer, grads, trainable_variables=None, *, spans: Sequence[Span] = ()
    ) -> None:
        """Applies gradients to the variables if all are finite, or none.

        Args:
          optimizer: of the model.
          grads: of each variable; None where there is none.
          trainable_variables: Keras's; None for the model's.
          spans: as for `updates`.
        """
        grads = list(grads)
        variables = list(trainable_variables or self._model.trainable_variables)
        if not optimizer.built:  # now, and not in the branch below
            optimizer.build(variables)
        scales = isinstance(optimizer, keras.optimizers.LossScaleOptimizer)
        xla = self._xla or self._compile is not None

        def apply_if_finite(grads: list, values: list) -> _Look:
            if spans:
                own = [span._replace(values=each) for span, each in zip(spans, values, strict=True)]
                look = self._look_at_spans(own, variables, xla=xla)
            else:
                dense = [_dense(each) for each in grads]
                given = [each for each in zip(variables, dense, strict=True) if each[1] is not None]
                look = self._look([each for each, _ in given], [each for _, each in given], xla=xla)
            refused = look.found
            apply = functools.partial(type(optimizer).apply, optimizer, grads, trainable_variables)
            if scales:
                with _set(optimizer, check_finite=lambda _: ~refused):  # once is enough
                    apply()
            else:
                tf.cond(refused, lambda: None, apply)
            return look

        look = self._compiled(apply_if_finite, grads, [each.values for each in spans])
        if tf.compat.v1.get_default_graph() is not self._graph:
            return  # a `train_step` that updates inside its own tf.cond keeps it to itself
        if scales:
            self._overflowed.append(look.found)
        else:
            self._refused.append(look.found)
            self._looks.append(look)

    def scale_logs(self) -> dict[str, tf.Tensor]:
        """Returns the loss scale and whether the update was skipped for it; {} without a scale."""
        optimizer = self._model.optimizer
        if not isinstance(optimizer, keras.optimizers.LossScaleOptimizer) or not optimizer.built:
            return {}
        return {
            "loss_scale": tf.identity(value_of(optimizer.dynamic_scale)),
            # Not int32, which functions return by way of the CPU: each step would wait for the GPU.
            "skipped_steps": tf.cast(_any(self._overflowed), tf.int64),
        }

    def put_back(self, changes: list[tuple]) -> None:
        """Undoes all changes where one is not finite, or the gradients were not.

        Args:
          changes: (Keras variable that is not trained, floating; its value before).
        """
        if not changes:
            return
        variables, before = [each for each, _ in changes], [each for _, each in changes]
        after = [tf.convert_to_tensor(value_of(each)) for each in variables]
        spoilt = self.spoilt(variables, before, after)
        put_back_where(_any([spoilt, *self._refused]), variables, before, after)

    def spoilt(self, variables: list, before: list[tf.Tensor], after: list[tf.Tensor]) -> tf.Tensor:
        """Returns whether any value that was finite is so no more; a minimum may start as inf.

        Args:
          variables: that hold them, in Keras.
          before: their values before the step.
          after: their values after it.
        """
        each = zip(variables, after, before, strict=True)
        floats = [values for values in each if values[1].dtype.is_floating]
        if not floats:
            return tf.constant(False)
        look = self._look(*zip(*floats, strict=True), xla=self._xla)
        self._looks.append(look)
        return look.found

    def code(self) -> tf.Tensor:
        """Returns what was found: of several, that of the first layer; a scalar, int64.

        FINE; WEIGHTS where those of the model are not finite now; or 1 + the index of a variable in
        `variables_of`: of its gradient where it is trained, else of its own value.
        """
        # Not int32, which functions return by way of the CPU: each step would wait for the GPU.
        first = self._first()
        fine = _any([tf.equal(first, _NONE), *self._overflowed])
        first = tf.where(fine, tf.constant(FINE, tf.int64), first)
        trained = self._model.trainable_variables
        xla = self._xla or self._compile is not None

        def weights_are_finite() -> tf.Tensor:
            return _all_finite([tf.convert_to_tensor(value_of(each)) for each in trained], xla=xla)

        finite = self._compiled(weights_are_finite)
        return tf.where(finite, first, tf.constant(WEIGHTS, tf.int64))

    def _first(self) -> tf.Tensor:
        """Returns the code of the first variable of all looks with a bad value, or _NONE."""
        known = [each.code for each in self._looks if not callable(each.code)]
        first = _least(known) if known else tf.constant(_NONE, tf.int64)
        others = [each for each in self._looks if callable(each.code)]
        if not others:
            return first
        return tf.cond(
            _any([each.found for each in others]),
            lambda: _least([first, *(each.code() for each in others)]),
            lambda: first,
        )

    def _compiled(self, function: Callable, *arguments):
        """Calls a function, which XLA compiles on its own where it does so to the update."""
        return (self._compile(function) if self._compile else function)(*arguments)

    def _look(self, variables, after, before=None, *, xla: bool) -> _Look:
        """Looks at values of variables, one for each; at those that were finite `before`."""
        if not after:
            return _Look(tf.constant(False), tf.constant(_NONE, tf.int64))
        if xla:
            return _look_in_xla(self._code_at(_index_in_each(after, before), variables))
        bad, sizes = ~_good(_packed(after), before and _packed(before)), _sizes(after)
        find = lambda: self._code_at(_index_of_first(bad, sizes), variables)  # noqa: E731
        return _Look(tf.reduce_any(bad), find)

    def _look_at_spans(self, spans: Sequence[Span], variables, *, xla: bool) -> _Look:
        """Looks at the gradients of variables, uncut."""
        bad = [each._replace(values=~tf.math.is_finite(each.values)) for each in spans]
        find = lambda: self._code_at(index_in_spans(bad, len(variables)), variables)  # noqa: E731
        if xla:
            return _look_in_xla(find())
        return _Look(_any([tf.reduce_any(each.values) for each in bad]), find)

    def _code_at(self, index: tf.Tensor, variables) -> tf.Tensor:
        """Returns the code of the variable at an index, or _NONE where that is their number."""
        codes = [self._codes.get(id(each), OTHER) for each in variables]
        return tf.gather(tf.constant([*codes, _NONE], tf.int64), index)


def _look_in_xla(code: tf.Tensor) -> _Look:
    return _Look(tf.not_equal(code, _NONE), code)


def _dense(gradient) -> tf.Tensor | None:
    """Returns a gradient's values, also of slices."""
    if gradient is None:
        return None
    is_slices = isinstance(gradient, tf.IndexedSlices)
    return gradient.values if is_slices else tf.convert_to_tensor(gradient)


def _index_in_each(after, before) -> tf.Tensor:
    """Returns which tensor is the first with a bad value, or their number, where XLA compiles it.

    A matrix's rows are reduced where XLA computes them; they and what is small are then looked at
    together, some tensors at a time: two kernels for each would be 1 ms of a ResNet-50 step of 36
    (H200, 2026-11-22). Not all in one vector: XLA computes each update again inside it, and took
    over 10 minutes for a model of 4 dense layers (CPU, 2026-11-21).

    Of ResNet-50's tensors 856 are looked at, so that each operation for one of them is felt at a
    start, where Python makes it and TensorFlow and XLA go over it.
    """
    found = []
    for start, good in _good_in_parts(after, before):
        index = _index_of_first(~tf.concat(good, axis=0), _sizes(good))
        is_all = len(good) == len(after)
        found.append(index if is_all else tf.where(index < len(good), start + index, len(after)))
    return _least(found)


def _good_in_parts(after, before) -> Iterator[tuple[int, list[tf.Tensor]]]:
    """Yields vectors that are True where rows are good, of AT_ONCE tensors, and the first's place.

    For XLA, as `_index_in_each` says.
    """
    before = before or [None] * len(after)
    axis, flat = tf.constant(-1), tf.constant([-1])
    for start in range(0, len(after), AT_ONCE):
        part = slice(start, start + AT_ONCE)
        good = [_good(*each) for each in zip(after[part], before[part], strict=True)]
        good = [tf.reduce_all(each, axis) if len(each.shape) > 1 else each for each in good]
        yield start, [each if len(each.shape) == 1 else tf.reshape(each, flat) for each in good]


def _all_finite(values: list[tf.Tensor], *, xla: bool) -> tf.Tensor:
    """Returns whether all values are finite."""
    if not values:
        return tf.constant(True)
    if not xla:
        return tf.reduce_all(tf.math.is_finite(_packed(values)))
    parts = [tf.reduce_all(tf.concat(good, axis=0)) for _, good in _good_in_parts(values, None)]
    return tf.reduce_all(tf.stack(parts))


def index_in_spans(bad: Sequence[Span], num_gradients: int) -> tf.Tensor:
    """Returns which gradient is the first with a bad value, or their number: a scalar, int32.

    Args:
      bad: spans whose values are True where those of the gradients are bad.
      num_gradients: of all spans.
    """
    found = [
        tf.gather([*span.indices, num_gradients], _index_of_first(span.values, span.sizes))
        for span in bad
    ]
    return _least(found)


def _any(bools: Sequence[tf.Tensor]) -> tf.Tensor:
    return functools.reduce(operator.or_, bools) if bools else tf.constant(False)


def _least(numbers: Sequence[tf.Tensor]) -> tf.Tensor:
    return functools.reduce(tf.minimum, numbers)


def _index_of_first(bad: tf.Tensor, sizes: list) -> tf.Tensor:
    """Returns which part the first True of a vector is in, or their number: a scalar, int32.

    XLA alone makes one pass of its passes over all values: without it, `bad` should have a True.

    Args:
      bad: [values of all parts] bool.
      sizes: values of each part.
    """
    num_bad = tf.size(bad)
    first = tf.reduce_min(tf.where(bad, tf.range(num_bad), num_bad))
    ends = tf.cumsum(sizes) if tf.is_tensor(sizes[0]) else np.cumsum(sizes, dtype=np.int32)
    return tf.reduce_sum(tf.cast(first >= ends, tf.int32))


def _sizes(parts: list[tf.Tensor]) -> list:
    """Returns the number of values of each; tensors, where that is not known beforehand."""
    sizes = [each.shape.num_elements() for each in parts]
    if None in sizes:  # the slices of an embedding's gradient
        return [tf.size(each) for each in parts]
    return sizes


def _good(after, before) -> tf.Tensor:
    """Returns where values are finite, or were not so before."""
    good = tf.math.is_finite(after)
    return good if before is None else good | ~tf.math.is_finite(before)


def _packed(values) -> tf.Tensor:
    """Returns all values in a vector, in a dtype that holds each.

    Without XLA, two kernels for each tensor would take their time.
    """
    dtype = tf.float64 if any(each.dtype == tf.float64 for each in values) else tf.float32
    flat = tf.constant([-1])
    return tf.concat([tf.reshape(tf.cast(each, dtype), flat) for each in values], axis=0)


@contextlib.contextmanager
def _set(optimizer, **methods) -> Iterator[None]:
    """Within the context, this optimizer has other methods."""
    optimizer.__dict__.update(methods)  # past Keras's tracking of attributes
    try:
        yield
    finally:
        for name in methods:
            del optimizer.__dict__[name]
