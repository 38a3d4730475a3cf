"""Steps whose loss and metrics ignore padding rows, which are rows of weight 0.

    step = leave_out_padding(model, model.test_step)

`check` refuses a model with a loss or metric that cannot ignore them.
"""

import contextlib
import functools
import inspect
import traceback
from collections.abc import Callable

import keras
import tensorflow as tf

from tfaccel.common.errors import UserError
from tfaccel.keras_internals.model_view import loss_means_of, losses_of, metrics_of
from tfaccel.keras_internals.reductions import (
    by_row,
    losses_reduced_by,
    mask_of,
    means_updated_by,
    metrics_updated_by,
    values_weighed_by_row,
    with_rank,
)
from tfaccel.keras_internals.row_operations import is_noticing, noticing
from tfaccel.keras_internals.variables import value_of
from tfaccel.step import totals

OWN_STEPS = ("train_step", "test_step")  # methods that a model may override


def leave_out_padding(model: keras.Model, step: Callable) -> Callable:
    """Returns `step` with a loss and metrics that ignore padding rows."""

    def without_padding(batch) -> dict:
        real = totals.real_rows(batch)
        if real is None:
            return step(batch)
        with _left_out(model, real), _weights_explained(model):
            return step(batch)

    return without_padding


def check(model: keras.Model) -> None:
    """Raises UserError for losses and metrics that cannot ignore padding rows."""
    for loss in losses_of(model):
        if getattr(loss, "reduction", "mean") in (None, "none"):
            raise UserError(
                f"the loss {loss.name} has reduction=None; for padded batches use "
                "'sum_over_batch_size', or a loader with last_batch='drop'"
            )
    for metric in metrics_of(model):
        if isinstance(metric, keras.metrics.Metric) and not _takes_weights(metric.update_state):
            raise UserError(
                f"update_state of the metric {metric.name} has no parameter sample_weight, which "
                "padded batches need to leave padding out; add it, or use a loader with "
                "last_batch='drop'"
            )


@contextlib.contextmanager
def _weights_explained(model):
    """Within the context, explains the error of a model's own step that unpacks only (x, y)."""
    try:
        yield
    except ValueError as error:
        last = traceback.extract_tb(error.__traceback__)[-1].name
        if last not in OWN_STEPS or "too many values to unpack" not in str(error):
            raise
        raise UserError(
            f"{last} of the model {model.name} unpacks a batch as (x, y), but the batch is (x, y, "
            "weight) with the weight 0 for padding; unpack it with "
            "keras.utils.unpack_x_y_sample_weight and pass the weight to self.compute_loss, or use "
            "a loader with last_batch='drop'"
        ) from error


def _takes_weights(update_state: Callable) -> bool:
    parameters = inspect.signature(update_state).parameters.values()
    return any(each.name == "sample_weight" or each.kind == each.VAR_KEYWORD for each in parameters)


@contextlib.contextmanager
def _left_out(model, real: tf.Tensor):
    """Within the context, Keras's losses and metrics ignore padding: rows where `real` is False.

    If every row is padding, no metric changes. That includes a metric that counts batches and that
    the model's own `train_step` updates with the loss.
    """
    num_real = tf.reduce_sum(tf.cast(real, tf.float32))
    before = [tf.identity(value_of(each)) for each in model.metrics_variables]
    with (
        losses_reduced_by(functools.partial(_reduced_without_padding, real=real)),
        means_updated_by(functools.partial(_tracking_rows, model=model, num_real=num_real)),
        metrics_updated_by(_updated_without_padding(real)),
        values_weighed_by_row(),
    ):
        yield
    for variable, value in zip(model.metrics_variables, before, strict=True):
        variable.assign(tf.where(num_real > 0, value_of(variable), value))


def _reduced_without_padding(reduce_weighted_values: Callable, real: tf.Tensor) -> Callable:
    """Returns Keras's reduction of a loss that masks padding, as Keras masks time steps."""

    # `recorded` wraps the reduction to refuse other masks; this mask must bypass it.
    keras_own = getattr(reduce_weighted_values, "__wrapped__", reduce_weighted_values)

    def reduce(values, sample_weight=None, mask=None, reduction="sum_over_batch_size", dtype=None):
        is_mean = mask is None and reduction in ("sum_over_batch_size", "mean", None, "none")
        if not is_mean and keras_own is not reduce_weighted_values:
            return reduce_weighted_values(values, sample_weight, mask, reduction)
        reduced = keras_own
        if reduction not in (None, "none"):  # else the caller reduces the values
            _check_rows(values, real)
            own = with_rank(real, values if mask is None else mask)
            if reduction == "mean_with_sample_weight":  # Keras divides by the sum of the weights
                own = tf.broadcast_to(own, tf.shape(values))
            if is_mean:  # tfaccel/step/plain_steps.py must tell this mask from those of the step
                reduced = getattr(keras_own, "of_real_rows", keras_own)
            mask = own if mask is None else own & tf.cast(mask, tf.bool)
        # In parts, the mean over the real rows of each part is weighted by their number later.
        with noticing(on=is_noticing() and keras_own is reduce_weighted_values):
            return reduced(values, by_row(sample_weight, values), mask, reduction, dtype)

    return reduce


def _check_rows(values, real: tf.Tensor) -> None:
    if values.shape.rank == 0 or not values.shape[:1].is_compatible_with(real.shape):
        raise UserError(
            f"a loss has values of shape {values.shape} for {real.shape[0]} rows; with padded "
            "batches it must return one value for each row, as keras.ops.mean(..., axis=-1) and "
            "keras.losses.Dice(axis=(1, 2, 3)) do; or use a loader with last_batch='drop'"
        )


def _tracking_rows(update_state: Callable, model, num_real: tf.Tensor) -> Callable:
    """Returns `Mean.update_state` that weights Keras's own means of losses by the real rows."""

    def update(metric, values, sample_weight=None):
        if any(metric is each for each in loss_means_of(model)):
            sample_weight = num_real
        return update_state(metric, values, sample_weight)

    return update


def _updated_without_padding(real: tf.Tensor) -> Callable:
    """Returns `MetricsList.update_state` that masks padding for metrics without weights."""

    def update(metrics, y_true, y_pred, sample_weight=None):
        if sample_weight is None:
            mask = mask_of(y_pred)
            sample_weight = tf.cast(with_rank(real, real if mask is None else mask), tf.float32)
        for metric in metrics.metrics:
            try:
                metric.update_state(y_true, y_pred, sample_weight=sample_weight)
            except (TypeError, ValueError, tf.errors.InvalidArgumentError) as error:
                raise UserError(
                    f"the metric {metric.name} cannot leave out padding: it must take one sample "
                    "weight per row, and a function must return one value per row; change it, or "
                    f"use a loader with last_batch='drop' ({error})"
                ) from error

    return update
