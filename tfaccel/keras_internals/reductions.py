"""Replaces how Keras reduces losses and updates metrics, while a step is traced."""

import contextlib
import functools
from collections.abc import Callable

import keras
import tensorflow as tf
from keras.src.backend import get_keras_mask
from keras.src.losses import loss as keras_loss
from keras.src.trainers.compile_utils import MetricsList

from tfaccel.keras_internals.patching import patched

# The modules of Keras's metrics that count single values instead of rows.
COUNTS_VALUES = {"keras.src.metrics.confusion_metrics", "keras.src.metrics.iou_metrics"}


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


def mask_of(tensor: tf.Tensor) -> tf.Tensor | None:
    """Returns the mask that a layer computed for its output; None without a mask."""
    return get_keras_mask(tensor)


def counts_values(metric: keras.metrics.Metric) -> bool:
    """Returns whether a metric counts single values instead of rows."""
    return any(each.__module__ in COUNTS_VALUES for each in type(metric).__mro__)


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
