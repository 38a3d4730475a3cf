"""Steps on batches in which rows of weight 0 are padding: loss and metrics leave them out.

Takes a model and its step; gives a step of the same rows less the padding, or a refusal.

    step = leave_out_padding(model, model.test_step)
"""

import functools
import inspect
from collections.abc import Callable

import keras

from tfaccel import seam
from tfaccel.errors import UserError
from tfaccel.step import totals


def leave_out_padding(model: keras.Model, step: Callable) -> Callable:
    """Returns `step`, in which loss and metrics count the rows that are not padding."""
    return functools.partial(_without_padding, model, step)


def check(model: keras.Model) -> None:
    """Raises UserError for losses and metrics that cannot leave out padding rows."""
    if seam.runs_eagerly(model):
        raise UserError(
            "run_eagerly is stock Keras's step, which counts padding; leave it out, or use a "
            "loader with last_batch='drop'"
        )
    for loss in seam.losses_of(model):
        if getattr(loss, "reduction", "mean") in (None, "none"):
            raise UserError(
                f"the loss {loss.name} has reduction=None; where batches are padded use "
                "'sum_over_batch_size', or a loader with last_batch='drop'"
            )
    for metric in seam.metrics_of(model):
        if isinstance(metric, keras.metrics.Metric) and not _takes_weights(metric.update_state):
            raise UserError(
                f"update_state of the metric {metric.name} has no parameter sample_weight; where "
                "batches are padded it needs one, to leave padding out (or a loader with "
                "last_batch='drop')"
            )


def _without_padding(model, step: Callable, batch) -> dict:
    real = totals.real_rows(batch)
    if real is None:
        return step(batch)
    with seam.without_padding(model, real):
        return step(batch)


def _takes_weights(update_state: Callable) -> bool:
    parameters = inspect.signature(update_state).parameters.values()
    return any(each.name == "sample_weight" or each.kind == each.VAR_KEYWORD for each in parameters)
