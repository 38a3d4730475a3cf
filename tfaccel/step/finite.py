"""What a training step finds infinite or NaN, and how that stays out of the model.

Takes a replica's model while its step is traced; gives the first such variable as a number.

    logs = watched(model, model.train_step, batch)
    code = logs.pop(LOG)        # FINE, WEIGHTS or 1 + the index of a variable

All is found in sums over the replicas, so that each replica finds the same. A check costs one read
of the gradients and one of the weights: a mean squared error of 0.3 says nothing of a NaN that a
ReLU hid from it.
"""

import contextlib
import functools
import itertools
from collections.abc import Callable, Iterator

import keras
import numpy as np
import tensorflow as tf

from tfaccel import seam

# Any other code is 1 + the index of a variable in `seam.variables_of`.
FINE, WEIGHTS, OTHER = 0, -1, 2**40  # OTHER: the gradient of what is not the model's
_NONE = OTHER + 1  # nothing was found, as a number above all that may be

_LARGE = 2**18  # elements; 1 MiB of float32 is as soon read where it lies as copied
LOG = "nonfinite"  # where a step's logs have the code, until Keras sees them


def watched(model, step: Callable, batch) -> dict:
    """Runs the model's own step on its only replica, and leaves out what is not finite.

    Returns:
      Its logs, and the code.
    """
    metrics = model.metrics_variables
    before = [tf.identity(each._value) for each in metrics]
    watch = Watch(model)
    with watch.updates(), seam.noted(_floating_state(model)) as noted:
        logs = step(batch)
    watch.put_back(noted.assigned())
    spoilt = watch.spoilt(metrics, before, [tf.identity(each._value) for each in metrics])
    put_back_where(spoilt, metrics, before)
    return _with_results(model, logs, spoilt) | {LOG: watch.code()}


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
    results = {}
    for metric in model.metrics:
        if metric.variables:  # or it may not be built, and has no result
            result = metric.result()
            results |= result if isinstance(result, dict) else {metric.name: result}
    return logs | {
        name: tf.where(spoilt, tf.cast(results[name], value.dtype), value)
        for name, value in logs.items()
        if name in results and tf.is_tensor(value) and value.shape == results[name].shape
    }


class Watch:
    """What one step does to one replica's model, as far as it is finite."""

    def __init__(self, model):
        """Takes the model, within `seam.as_replica`."""
        self._model = model
        self._graph = tf.compat.v1.get_default_graph()
        known = seam.variables_of(model)
        self._codes = {id(each): 1 + index for index, each in enumerate(known)}
        self._found = []  # codes, or _NONE
        self._refused = self._overflowed = tf.constant(False)

    @contextlib.contextmanager
    def updates(self) -> Iterator[None]:
        """Within the context, the optimizer applies gradients if all are finite, or none.

        Otherwise weights, slots and iterations stay as they are. A dynamic loss scale that
        overflows is halved, by Keras, and is no fault.
        """
        optimizer = self._model.optimizer
        with contextlib.nullcontext() if optimizer is None else _set(optimizer, apply=self._apply):
            yield

    def _apply(self, grads, trainable_variables=None) -> None:
        optimizer, grads = self._model.optimizer, list(grads)
        variables = list(trainable_variables or self._model.trainable_variables)
        dense = [each.values if isinstance(each, tf.IndexedSlices) else each for each in grads]
        given = [pair for pair in zip(variables, dense, strict=True) if pair[1] is not None]
        refused = ~_all_finite([each for _, each in given])
        apply = functools.partial(type(optimizer).apply, optimizer, grads, trainable_variables)
        outermost = tf.compat.v1.get_default_graph() is self._graph
        if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
            with _set(optimizer, check_finite=lambda _: ~refused):  # once is enough
                apply()
            self._overflowed |= refused if outermost else False
            return
        code = tf.cond(refused, lambda: self._first_of(given), lambda: _after(apply()))
        if outermost:  # or it is for the tf.cond alone, in which a `train_step` may update
            self._refused |= refused
            self._found.append(code)

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
        each = zip(variables, before, after, strict=True)
        floats = [(variable, *pair) for variable, *pair in each if pair[0].dtype.is_floating]
        if not floats:
            return tf.constant(False)
        variables, before, after = zip(*floats, strict=True)
        spoilt = tf.math.is_finite(_packed(before)) & ~tf.math.is_finite(_packed(after))
        size = spoilt.shape[0]
        first = tf.reduce_min(tf.where(spoilt, tf.range(size), size))
        ends = np.cumsum([each.shape.num_elements() for each in before])
        codes = tf.constant([*map(self._code, variables), _NONE], tf.int64)
        index = tf.reduce_sum(tf.cast(first >= ends, tf.int32))
        self._found.append(codes[index])
        return first < size

    def code(self) -> tf.Tensor:
        """Returns what was found: of several, that of the first layer; a scalar, int64.

        FINE; WEIGHTS where those of the model are not finite now; or 1 + the index of a variable in
        `seam.variables_of`: of its gradient where it is trained, else of its own value.
        """
        # Not int32, which functions return by way of the CPU: each step would wait for the GPU.
        first = tf.reduce_min(tf.stack([tf.constant(_NONE, tf.int64), *self._found]))
        fine = tf.equal(first, _NONE) | self._overflowed
        weights = _all_finite([each._value for each in self._model.trainable_variables])
        first = tf.where(fine, tf.constant(FINE, tf.int64), first)
        return tf.where(weights, first, tf.constant(WEIGHTS, tf.int64))

    def _code(self, variable) -> int:
        return self._codes.get(id(variable), OTHER)

    def _first_of(self, gradients: list[tuple]) -> tf.Tensor:
        codes = tf.constant([self._code(variable) for variable, _ in gradients], tf.int64)
        finite = tf.stack([tf.reduce_all(tf.math.is_finite(each)) for _, each in gradients])
        return tf.reduce_min(tf.where(finite, tf.constant(_NONE, tf.int64), codes))


def _after(_) -> tf.Tensor:
    return tf.constant(_NONE, tf.int64)


def _all_finite(values: list) -> tf.Tensor:
    """Returns whether all are. Small tensors are packed: each would be a kernel of its own."""
    values = [tf.convert_to_tensor(each) for each in values]
    # Of slices, the rows are not known: no number of elements.
    small = [(each.shape.num_elements() or _LARGE) < _LARGE for each in values]
    packed = list(itertools.compress(values, small))
    parts = [each for each, is_small in zip(values, small, strict=True) if not is_small]
    parts += [_packed(packed)] if packed else []
    return tf.reduce_all([True, *(tf.reduce_all(tf.math.is_finite(each)) for each in parts)])


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
