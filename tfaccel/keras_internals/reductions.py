"""How Keras reduces losses and updates metrics, and what replaces it while a step is traced."""

import contextlib
import functools
from collections.abc import Callable

import keras
import tensorflow as tf
from keras.src.backend import get_keras_mask
from keras.src.losses import loss as keras_loss
from keras.src.trainers.compile_utils import MetricsList

from tfaccel.keras_internals.patching import patched

# The modules of the metrics that count values, and not rows.
COUNTS_VALUES = {"keras.src.metrics.confusion_metrics", "keras.src.metrics.iou_metrics"}


def losses_reduced_by(wrap: Callable) -> contextlib.AbstractContextManager:
    """Returns a context in which Keras reduces the values of every loss in another way.

    Args:
      wrap: from Keras's function of (values, sample_weight, mask, reduction, dtype) to the one that
        replaces it.
    """
    return patched(keras_loss, "reduce_weighted_values", wrap(keras_loss.reduce_weighted_values))


def means_updated_by(wrap: Callable) -> contextlib.AbstractContextManager:
    """Returns a context in which means, of losses and of functions, are updated in another way.

    Args:
      wrap: from Keras's `Mean.update_state(metric, values, sample_weight=None)` to the one that
        replaces it.
    """
    return patched(keras.metrics.Mean, "update_state", wrap(keras.metrics.Mean.update_state))


def metrics_updated_by(update: Callable) -> contextlib.AbstractContextManager:
    """Returns a context in which a function updates all metrics of an output.

    Args:
      update: a function of (the metrics, y_true, y_pred, sample_weight=None); `.metrics` of its
        first argument lists them.
    """
    return patched(MetricsList, "update_state", update)


def mask_of(tensor: tf.Tensor) -> tf.Tensor | None:
    """Returns the mask that the layer of a tensor computed, or None."""
    return get_keras_mask(tensor)


def counts_values(metric: keras.metrics.Metric) -> bool:
    """Returns whether a metric of Keras, or its subclass, counts values instead of rows."""
    return any(each.__module__ in COUNTS_VALUES for each in type(metric).__mro__)


def weighing_by_row(reduce_weighted_values: Callable) -> Callable:
    """Returns Keras's reduction of a loss, in which a weight per row weighs all of a row's values.

    Keras lines up weights [rows] with the last axis of values [rows, height, width]: an error, or a
    wrong loss where there are as many rows as columns.
    """

    @functools.wraps(reduce_weighted_values)
    def reduce(values, sample_weight=None, *args, **settings):
        return reduce_weighted_values(values, by_row(sample_weight, values), *args, **settings)

    return reduce


def by_row(sample_weight, values):
    """Returns weights of a loss's values: [rows] with as many axes as they have."""
    is_per_row = sample_weight is not None and len(sample_weight.shape) == 1
    return with_rank(sample_weight, values) if is_per_row else sample_weight


def with_rank(rows: tf.Tensor, like) -> tf.Tensor:
    """Returns [rows] as [rows, 1, ...], with as many axes as another tensor has."""
    return tf.reshape(rows, [-1] + [1] * (len(like.shape) - 1))
