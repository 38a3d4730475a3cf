"""What a training step finds infinite or NaN, and how that stays out of the model.

Takes a replica's model while its step is traced; gives the first such variable as a number.

    logs = watched(model, model.train_step, batch, xla=True)
    code = logs.pop(LOG)        # FINE, WEIGHTS or 1 + the index of a variable

All is found in sums over the replicas, so that each replica finds the same. A check costs one read
of the gradients and one of the weights: a mean squared error of 0.3 says nothing of a NaN that a
ReLU hid from it.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence

import keras
import tensorflow as tf

from tfaccel import seam
from tfaccel.step.totals import Span

# Any other code is 1 + the index of a variable in `seam.variables_of`.
FINE, WEIGHTS, OTHER = 0, -1, 2**40  # OTHER: the gradient of what is not the model's
_NONE = OTHER + 1  # nothing was found, as a number above all that may be
LOG = "nonfinite"  # where a step's logs have the code, until Keras sees them
AT_ONCE = 32  # tensors: XLA fuses at most some ninety operands


def watched(model, step: Callable, batch, *, xla: bool, compile_: Callable | None = None) -> dict:
    """Runs the model's own step on its only replica, and leaves out what is not finite.

    Args:
      model: within `seam.as_replica`.
      step: of the model, as a function of a batch.
      batch: of the replica.
      xla: whether XLA compiles what is traced.
      compile_: makes a function of the update that XLA compiles, where it does not compile all;
        None to let it be.

    Returns:
      Its logs, those of the loss scale, and the code.
    """
    metrics = model.metrics_variables
    before = [tf.identity(each._value) for each in metrics]
    watch = Watch(model, xla=xla, compile_=compile_)
    with watch.updates(), seam.noted(_floating_state(model)) as noted:
        logs = step(batch)
    watch.put_back(noted.assigned())
    spoilt = watch.spoilt(metrics, before, [tf.identity(each._value) for each in metrics])
    put_back_where(spoilt, metrics, before)
    return _with_results(model, logs, spoilt) | watch.scale_logs() | {LOG: watch.code()}


def _floating_state(model) -> list:
    metrics = {id(each) for each in model.metrics_variables}
    return [
        each
        for each in model.non_trainable_variables
        if each._value.dtype.is_floating and id(each) not in metrics
    ]


def put_back_where(spoilt: tf.Tensor, variables: list, before: list[tf.Tensor]) -> None:
    """Gives the Keras variables the values that they had before, where that is so."""
    for variable, value in zip(variables, before, strict=True):
        variable.assign(tf.where(spoilt, value, variable._value))


def _with_results(model, logs: dict, spoilt: tf.Tensor) -> dict:
    """Returns the logs; of metrics that were put back, with their results as they are now."""
    results = model.get_metrics_result()
    return logs | {
        name: tf.where(spoilt, tf.cast(results[name], value.dtype), value)
        for name, value in logs.items()
        if name in results and tf.is_tensor(value) and value.shape == results[name].shape
    }


class Watch:
    """What one step does to one replica's model, as far as it is finite."""

    def __init__(self, model, *, xla: bool, compile_: Callable | None = None):
        """Takes the model, within `seam.as_replica`, and whether XLA compiles what is traced.

        And `compile_`, as `watched` does.
        """
        self._model, self._xla, self._compile = model, xla, compile_
        self._graph = tf.compat.v1.get_default_graph()
        self._codes = {id(each): 1 + i for i, each in enumerate(seam.variables_of(model))}
        self._found = []  # codes, or _NONE
        self._refused = self._overflowed = tf.constant(False)

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
            for each in seam.every_optimizer(self._model):
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

        def apply_if_finite(grads: list, values: list) -> tf.Tensor:
            if spans:
                own = [span._replace(values=each) for span, each in zip(spans, values, strict=True)]
                index = index_in_spans(own, len(variables), xla=xla)
                code = self._code_at(index, variables)
            else:
                dense = [_dense(each) for each in grads]
                given = [each for each in zip(variables, dense, strict=True) if each[1] is not None]
                code = self._first(*map(list, zip(*given, strict=True)), xla=xla)
            refused = tf.not_equal(code, _NONE)
            apply = functools.partial(type(optimizer).apply, optimizer, grads, trainable_variables)
            if scales:
                with _set(optimizer, check_finite=lambda _: ~refused):  # once is enough
                    apply()
            else:
                tf.cond(refused, lambda: None, apply)
            return code

        code = self._compiled(apply_if_finite, grads, [each.values for each in spans])
        refused = tf.not_equal(code, _NONE)
        if tf.compat.v1.get_default_graph() is not self._graph:
            return  # a `train_step` that updates inside its own tf.cond keeps it to itself
        if scales:
            self._overflowed |= refused
        else:
            self._refused |= refused
            self._found.append(code)

    def scale_logs(self) -> dict[str, tf.Tensor]:
        """Returns the loss scale and whether the update was skipped for it; {} without a scale."""
        optimizer = self._model.optimizer
        if not isinstance(optimizer, keras.optimizers.LossScaleOptimizer) or not optimizer.built:
            return {}
        return {
            "loss_scale": tf.identity(optimizer.dynamic_scale._value),
            # Not int32, which functions return by way of the CPU: each step would wait for the GPU.
            "skipped_steps": tf.cast(self._overflowed, tf.int64),
        }

    def put_back(self, changes: list[tuple]) -> None:
        """Undoes all changes where one is not finite, or the gradients were not.

        Args:
          changes: (Keras variable that is not trained, floating; its value before).
        """
        variables, before = [each for each, _ in changes], [each for _, each in changes]
        spoilt = self.spoilt(variables, before, [each._value for each in variables])
        put_back_where(spoilt | self._refused, variables, before)

    def spoilt(self, variables: list, before: list[tf.Tensor], after: list[tf.Tensor]) -> tf.Tensor:
        """Returns whether any value that was finite is so no more; a minimum may start as inf.

        Args:
          variables: that hold them, in Keras.
          before: their values before the step.
          after: their values after it.
        """
        each = zip(variables, after, before, strict=True)
        floats = [values for values in each if values[1].dtype.is_floating]
        code = self._first(*zip(*floats, strict=True)) if floats else tf.cast(_NONE, tf.int64)
        self._found.append(code)
        return tf.not_equal(code, _NONE)

    def code(self) -> tf.Tensor:
        """Returns what was found: of several, that of the first layer; a scalar, int64.

        FINE; WEIGHTS where those of the model are not finite now; or 1 + the index of a variable in
        `seam.variables_of`: of its gradient where it is trained, else of its own value.
        """
        # Not int32, which functions return by way of the CPU: each step would wait for the GPU.
        first = tf.reduce_min(tf.stack([tf.constant(_NONE, tf.int64), *self._found]))
        fine = tf.equal(first, _NONE) | self._overflowed
        first = tf.where(fine, tf.constant(FINE, tf.int64), first)
        trained = self._model.trainable_variables
        xla = self._xla or self._compile is not None

        def look() -> tf.Tensor:
            return self._first(trained, [each._value for each in trained], xla=xla)

        weights = self._compiled(look)
        return tf.where(tf.equal(weights, _NONE), first, tf.constant(WEIGHTS, tf.int64))

    def _compiled(self, function: Callable, *arguments) -> tf.Tensor:
        """Calls a function, which XLA compiles on its own where it does so to the update."""
        return (self._compile(function) if self._compile else function)(*arguments)

    def _first(self, variables, after, before=None, *, xla: bool | None = None) -> tf.Tensor:
        """Returns the code of the first variable with a bad value, or _NONE."""
        after = [tf.convert_to_tensor(each) for each in after]
        if not after:
            return tf.cast(_NONE, tf.int64)
        xla = self._xla if xla is None else xla
        index = (_index_in_each if xla else _index_in_all)(after, before)
        return self._code_at(index, variables)

    def _code_at(self, index: tf.Tensor, variables) -> tf.Tensor:
        """Returns the code of the variable at an index, or _NONE where that is their number."""
        codes = [self._codes.get(id(each), OTHER) for each in variables]
        return tf.gather(tf.constant([*codes, _NONE], tf.int64), index)


def _dense(gradient) -> tf.Tensor | None:
    """Returns a gradient's values, also of slices."""
    return gradient.values if isinstance(gradient, tf.IndexedSlices) else gradient


def _index_in_each(after, before) -> tf.Tensor:
    """Returns which tensor is the first with a bad value, or their number, where XLA compiles it.

    A matrix's rows are reduced where XLA computes them; they and what is small are then looked at
    together, some tensors at a time: two kernels for each would be 1 ms of a ResNet-50 step of 36
    (H200, 2026-11-22). Not all in one vector: XLA computes each update again inside it, and took
    over 10 minutes for a model of 4 dense layers (CPU, 2026-11-21).

    Of ResNet-50's tensors 856 are looked at, so that each operation for one of them is felt at a
    start, where Python makes it and TensorFlow and XLA go over it.
    """
    before, found = before or [None] * len(after), []
    axis, flat = tf.constant(-1), tf.constant([-1])
    for start in range(0, len(after), AT_ONCE):
        part = slice(start, start + AT_ONCE)
        good = [_good(*each) for each in zip(after[part], before[part], strict=True)]
        good = [tf.reduce_all(each, axis) if len(each.shape) > 1 else each for each in good]
        good = [each if len(each.shape) == 1 else tf.reshape(each, flat) for each in good]
        index = _index_of_first(~tf.concat(good, axis=0), _sizes(good))
        found.append(tf.where(index < len(good), start + index, len(after)))
    return tf.reduce_min(tf.stack(found))


def _index_in_all(after, before) -> tf.Tensor:
    """Returns the same without XLA, where two kernels for each tensor would take their time."""
    bad = ~_good(_packed(after), None if before is None else _packed(before))
    return _index_if_any(bad, _sizes(after))


def index_in_spans(spans: Sequence[Span], num_gradients: int, *, xla: bool) -> tf.Tensor:
    """Returns which gradient is the first with a bad value, or their number: a scalar, int32."""
    index_of = _index_of_first if xla else _index_if_any
    found = [
        tf.gather([*span.indices, num_gradients], index_of(~_good(span.values, None), span.sizes))
        for span in spans
    ]
    return tf.reduce_min(tf.stack(found))


def _index_if_any(bad: tf.Tensor, sizes: list) -> tf.Tensor:
    """Returns what `_index_of_first` does, whose passes over all XLA alone makes one."""
    return tf.cond(
        tf.reduce_any(bad), lambda: _index_of_first(bad, sizes), lambda: tf.constant(len(sizes))
    )


def _index_of_first(bad: tf.Tensor, sizes: list) -> tf.Tensor:
    """Returns which part the first True of a vector is in, or their number: a scalar, int32.

    Args:
      bad: [values of all parts] bool.
      sizes: values of each part.
    """
    num_bad = tf.size(bad)
    first = tf.reduce_min(tf.where(bad, tf.range(num_bad), num_bad))
    return tf.reduce_sum(tf.cast(first >= tf.cumsum(sizes), tf.int32))


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
    """Returns all values in a vector, in a dtype that holds each."""
    dtype = tf.float64 if any(each.dtype == tf.float64 for each in values) else tf.float32
    return tf.concat([tf.reshape(tf.cast(each, dtype), [-1]) for each in values], axis=0)


@contextlib.contextmanager
def _set(optimizer, **methods) -> Iterator[None]:
    """Within the context, this optimizer has other methods."""
    optimizer.__dict__.update(methods)  # past Keras's tracking of attributes
    try:
        yield
    finally:
        for name in methods:
            del optimizer.__dict__[name]
