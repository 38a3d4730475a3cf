"""Replaces how Keras reduces losses and updates metrics, while a step is traced."""

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator, Sequence

import keras
import tensorflow as tf
from keras.src.backend.common.masking import get_keras_mask, set_keras_mask
from keras.src.losses import loss as keras_loss
from keras.src.trainers.compile_utils import CompileMetrics, MetricsList

from tfaccel.keras_internals.never_run import never_run
from tfaccel.keras_internals.patching import patched

# The modules of Keras's metrics that count single values instead of rows.
COUNTS_VALUES = {"keras.src.metrics.confusion_metrics", "keras.src.metrics.iou_metrics"}

# The metrics whose `update_state` only calls that of others: containers, and those of a function.
CALLERS = (CompileMetrics, MetricsList, keras.metrics.MeanMetricWrapper)


def losses_reduced_by(wrap: Callable) -> contextlib.AbstractContextManager:
    """Returns a context in which another function reduces the values of every loss.

    Args:
      wrap: A function from Keras's function of (values, sample_weight, mask, reduction, dtype) to
        the function that replaces it.
    """
    return patched(keras_loss, "reduce_weighted_values", wrap(keras_loss.reduce_weighted_values))


def means_updated_by(wrap: Callable) -> contextlib.AbstractContextManager:
    """Returns a context in which another function updates the means of losses and of functions.

    Args:
      wrap: A function from Keras's `Mean.update_state(metric, values, sample_weight=None)` to the
        function that replaces it.
    """
    return patched(keras.metrics.Mean, "update_state", wrap(keras.metrics.Mean.update_state))


def metrics_updated_by(update: Callable) -> contextlib.AbstractContextManager:
    """Returns a context in which another function updates the metrics of each output.

    Args:
      update: A function of (metrics, y_true, y_pred, sample_weight=None). `metrics.metrics` lists
        the metrics of the output.
    """
    return patched(MetricsList, "update_state", update)


def has_own_update(metric: keras.metrics.Metric) -> bool:
    """Returns whether the `update_state` of a metric is the user's own, not Keras's."""
    return _is_own_update(type(metric))


def function_of(metric: keras.metrics.MeanMetricWrapper) -> Callable:
    """Returns the function that a metric is made of."""
    return metric._fn


def mixes_rows(metric: keras.metrics.MeanMetricWrapper, function: Callable, y_true, y_pred) -> bool:
    """Returns whether the function of a metric does not return a value for each row.

    A function of Keras compares along the rows if its `axis` is 0. The user's functions are called
    with an unknown number of rows: the shape of what they return must depend on it.
    """
    rank = len(y_pred.shape)
    axis = metric._fn_kwargs.get("axis")
    if axis is not None and 0 in {each % rank for each in tf.nest.flatten(axis) if rank}:
        return True
    if _is_of_keras(function):
        return False
    with never_run("of_any_rows"):
        arguments = tf.nest.map_structure(_of_any_rows, (y_true, y_pred))
        try:
            values = function(*arguments, **metric._fn_kwargs)
        except Exception:  # it may not work with an unknown number of rows
            return False
    return bool(values.shape.rank) and values.shape[0] is not None


def _of_any_rows(value):
    if not isinstance(value, tf.Tensor) or not value.shape.rank:
        return value
    return tf.compat.v1.placeholder(value.dtype, [None, *value.shape[1:]])


def may_mix_rows(metric) -> bool:
    """Returns whether a metric may need all rows of a batch at once.

    Args:
      metric: A metric, a function, or the name of Keras's own.
    """
    if not isinstance(metric, keras.metrics.Metric):
        return callable(metric)
    if has_own_update(metric):
        return True
    is_function = isinstance(metric, keras.metrics.MeanMetricWrapper)
    return is_function and ("axis" in metric._fn_kwargs or not _is_of_keras(metric._fn))


def _is_of_keras(what) -> bool:
    return getattr(what, "__module__", "").partition(".")[0] == "keras"


def _is_own_update(kind: type) -> bool:
    defining = next(each for each in kind.__mro__ if "update_state" in vars(each))
    return not _is_of_keras(defining)


@contextlib.contextmanager
def own_metrics_updated_by(update: Callable) -> Iterator[None]:
    """Within the context, another function updates metrics that may need all rows at once.

    These are metrics with an `update_state` of their own, and metrics that are made of a function.
    All classes are patched, because a `train_step` of the model's own may update any metric. What
    the function calls, such as `super().update_state(...)` or a metric within, is not replaced.

    Args:
      update: A function of (metric, own, args, kwargs). `own(*args, **kwargs)` is the metric's own
        `update_state`.
    """
    is_busy = False

    def replaced(own_update, metric, *args, **kwargs):
        nonlocal is_busy
        own = own_update.__get__(metric, type(metric))
        if is_busy:
            return own(*args, **kwargs)
        is_busy = True
        try:
            return update(metric, own, args, kwargs)
        finally:
            is_busy = False

    kinds = [each for each in _kinds_of(keras.metrics.Metric) if _is_own_update(each)]
    kinds.append(keras.metrics.MeanMetricWrapper)
    own = [inspect.getattr_static(each, "update_state") for each in kinds]
    with contextlib.ExitStack() as patches:
        for kind, own_update in zip(kinds, own, strict=True):
            patches.enter_context(patched(kind, "update_state", _method(replaced, own_update)))
        yield


@contextlib.contextmanager
def results_noted_by(note: Callable) -> Iterator[None]:
    """Within the context, a function computes the result of each metric that the step asks for.

    A result that is a variable becomes its value, which a log can be recognized by. The result of
    a metric within another one is left as it is.

    Args:
      note: A function of (metric, compute). `compute()` is the result.
    """
    is_busy = False

    def noting(own: Callable, metric, args: tuple, kwargs: dict):
        if is_busy:
            return own(*args, **kwargs)

        def compute():
            nonlocal is_busy
            is_busy = True
            try:
                return tf.nest.map_structure(_value_of, own(*args, **kwargs))
            finally:
                is_busy = False

        return note(metric, compute)

    with metric_methods_by("result", noting):
        yield


def _value_of(each):
    return tf.convert_to_tensor(each) if isinstance(each, keras.Variable) else each


@contextlib.contextmanager
def metric_methods_by(name: str, call: Callable, *, but: Sequence[type] = ()) -> Iterator[None]:
    """Within the context, a function calls a method of all metrics, Keras's own and the user's.

    Args:
      name: The name of the method.
      call: A function of (own, metric, args, kwargs). `own(*args, **kwargs)` is the method.
      but: The classes whose own method is left as it is.
    """

    def replaced(own, metric, *args, **kwargs):
        return call(own.__get__(metric, type(metric)), metric, args, kwargs)

    with contextlib.ExitStack() as patches:
        for kind in _kinds_of(keras.metrics.Metric):
            if name in vars(kind) and kind not in but:
                patches.enter_context(patched(kind, name, _method(replaced, vars(kind)[name])))
        yield


def _kinds_of(kind: type) -> list[type]:
    """Returns the subclasses of a class, and theirs, each once."""
    found = {}
    for each in kind.__subclasses__():
        found |= dict.fromkeys([each, *_kinds_of(each)])
    return list(found)


def _method(function: Callable, own) -> Callable:
    @functools.wraps(own)
    def method(self, *args, **kwargs):
        return function(own, self, *args, **kwargs)

    return method


def with_mask(tensor: tf.Tensor, mask: tf.Tensor) -> tf.Tensor:
    """Returns the tensor, with a mask as a layer computes it."""
    set_keras_mask(tensor, mask)
    return tensor


def mask_of(tensor: tf.Tensor) -> tf.Tensor | None:
    """Returns the mask that a layer computed for its output; None without a mask."""
    return get_keras_mask(tensor)


@contextlib.contextmanager
def values_weighed_by_row() -> Iterator[None]:
    """Within the context, metrics that count single values take a weight for each row.

    Keras would align [rows] with the last axis of the values: an error, or a wrong result if both
    have the same length. The weights are shaped where Keras's own `update_state` is called, because
    a metric of the user's may slice or flatten the values before.
    """

    def weighed(own_update, metric, y_true, y_pred, sample_weight=None):
        own = own_update.__get__(metric, type(metric))
        return own(y_true, y_pred, sample_weight=_by_value(metric, sample_weight, y_true))

    with contextlib.ExitStack() as patches:
        for kind in _kinds_of(keras.metrics.Metric):
            if kind.__module__ in COUNTS_VALUES and "update_state" in vars(kind):
                replacement = _method(weighed, vars(kind)["update_state"])
                patches.enter_context(patched(kind, "update_state", replacement))
        patches.enter_context(patched(_Weighing, "by_row", True))
        yield


class _Weighing:
    by_row = False  # whether `values_weighed_by_row` is entered


def as_weighed_now(update: Callable) -> Callable:
    """Returns an update for later, in which metrics take weights as they do now."""
    if not _Weighing.by_row:
        return update

    def later(*args, **kwargs):
        with values_weighed_by_row():
            return update(*args, **kwargs)

    return later


def _by_value(metric: keras.metrics.Metric, weights, y_true):
    """Returns weights [rows] as a weight for each value; other weights unchanged."""
    if len(getattr(weights, "shape", ())) != 1:
        return weights
    y_true = tf.convert_to_tensor(y_true)
    if not getattr(metric, "sparse_y_true", True):  # the classes of one value are its last axis
        y_true = y_true[..., 0]
    rows, size = weights.shape[0], y_true.shape.num_elements()
    if None not in (rows, size) and (rows == 0 or size % rows):
        return weights  # they do not fit
    per_row = tf.size(y_true) // tf.maximum(tf.size(weights), 1)
    per_row = per_row if None in (rows, size) else size // rows
    return tf.reshape(tf.repeat(weights, per_row), tf.shape(y_true))


def weighing_by_row(reduce_weighted_values: Callable) -> Callable:
    """Returns Keras's reduction of a loss, in which the weight of a row applies to all its values.

    Keras aligns weights [rows] with the last axis of values [rows, height, width]. That raises an
    error, or gives a wrong loss if there are as many rows as columns.
    """

    @functools.wraps(reduce_weighted_values)
    def reduce(values, sample_weight=None, *args, **settings):
        return reduce_weighted_values(values, by_row(sample_weight, values), *args, **settings)

    return reduce


def by_row(sample_weight, values):
    """Returns weights [rows] with as many axes as the values; other weights unchanged."""
    is_per_row = sample_weight is not None and len(sample_weight.shape) == 1
    return with_rank(sample_weight, values) if is_per_row else sample_weight


def with_rank(rows: tf.Tensor, like) -> tf.Tensor:
    """Returns [rows] as [rows, 1, ...], with as many axes as `like`."""
    return tf.reshape(rows, [-1] + [1] * (len(like.shape) - 1))
