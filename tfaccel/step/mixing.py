"""Label smoothing, mixup, cutmix and cutout: changes to a batch inside the compiled step.

`mixed` takes a model and `config.step`. It returns a function that changes a replica's batch, on
its device, before the model's own step sees it. Label smoothing, mixup and cutmix turn labels into
probabilities over the classes, [rows, classes] float32. With a binary cross-entropy, labels of
several classes a row are [rows, classes] already, and each is smoothed towards one half, as Keras
does. With the loss of a regression, mixup blends the numbers, and the others are refused. Cutout
does not change labels or targets.

    change = mixed(model, config)           # for training
    batch = change(replica, batch)
    change = as_probabilities(model)        # for testing: neither smoothed, mixed nor cut

Each row has its own random draws (tfaccel/step/draws.py) and is mixed with the next row of its
replica. A row keeps its own sample weight. A row of weight 0 may be padding, so no other row is
mixed with it.
"""

from collections.abc import Callable

import keras
import numpy as np
import tensorflow as tf

from tfaccel.common.errors import UserError
from tfaccel.common.tables import in_figures
from tfaccel.config import StepConfig
from tfaccel.keras_internals.model_view import labels_for, outputs_of, takes_labels
from tfaccel.keras_internals.replica import Replica
from tfaccel.step import blend, cutout, totals


def mixed(model: keras.Model, config: StepConfig) -> Callable:
    """Returns a function that smooths a training batch, blends it with the next rows, then cuts it.

    If labels are mixed, the model has passed `check`.
    """

    def change(replica: Replica, batch):
        x, y, weight = keras.utils.unpack_x_y_sample_weight(batch)
        if config.mixes_labels:
            y = _smoothed(model, y, config.label_smoothing)
        if config.mixup_alpha or config.cutmix_alpha:
            own = blend.own_part(config, _image(x), replica, model.optimizer)
            own = [_unless_padding(each, totals.real_rows(batch)) for each in own]
            x = tf.nest.map_structure(lambda each: _blended(each, own[0]), x)
            y = _blended(y, own[1])
        if config.cutout_pixels:
            x = cutout.cut_out(x, config.cutout_pixels, replica, model.optimizer)
        return keras.utils.pack_x_y_sample_weight(x, y, weight)

    return change


def as_probabilities(model: keras.Model) -> Callable:
    """Returns a function that turns the labels of a test batch into probabilities."""

    def change(replica: Replica, batch):
        x, y, weight = keras.utils.unpack_x_y_sample_weight(batch)
        return keras.utils.pack_x_y_sample_weight(x, _probabilities(model, y), weight)

    return change


def specs_as_probabilities(model: keras.Model) -> Callable:
    """Returns `as_probabilities` for a batch's specs, from which Keras chooses its "accuracy"."""

    def change(batch):
        x, y, weight = keras.utils.unpack_x_y_sample_weight(batch)
        labels = _labels(y)
        shape = (labels.shape[0], model.output_shape[-1])
        y = tf.TensorSpec(labels.shape if _are_values(model, labels) else shape, tf.float32)
        return keras.utils.pack_x_y_sample_weight(x, y, weight)

    return change


def check(model: keras.Model, config: StepConfig) -> None:
    """Raises UserError for a model that these changes to labels and images do not suit."""
    outputs, kind = outputs_of(model), labels_for(model)
    if kind == "regression" and (config.label_smoothing or config.cutmix_alpha):
        raise UserError(
            "label_smoothing or cutmix with the loss of a regression; they are for classes: remove "
            "them, or use mixup_alpha, which blends numbers too"
        )
    least = 2 if kind == "classes" else 1
    if len(outputs) != 1 or len(outputs[0].shape) != 2 or (outputs[0].shape[-1] or 0) < least:
        received = ", ".join(str(each.shape[1:]) for each in outputs) or "no known outputs"
        raise UserError(
            f"label_smoothing, mixup or cutmix with model {model.name}, which gives {received} for "
            "a row; expected one output with a score for each class: start the model with "
            "keras.Input(shape=...), or remove label_smoothing, mixup and cutmix"
        )
    if takes_labels(model):
        raise UserError(
            "label_smoothing, mixup or cutmix with the loss SparseCategoricalCrossentropy: labels "
            "become probabilities in the step; use CategoricalCrossentropy, with the same "
            "from_logits"
        )
    if config.mixup_alpha or config.cutmix_alpha:
        _check_images(model, config)


def _check_images(model, config: StepConfig) -> None:
    if len(model.inputs) != 1 or (config.cutmix_alpha and len(model.inputs[0].shape) != 4):
        received = ", ".join(str(each.shape[1:]) for each in model.inputs)
        raise UserError(
            f"mixup_alpha={in_figures(config.mixup_alpha)}, "
            f"cutmix_alpha={in_figures(config.cutmix_alpha)} with a model of inputs {received} for "
            "a row; expected one input, (height, width, channels) for cutmix: remove mixup_alpha "
            "and cutmix_alpha"
        )


# Labels.


def _probabilities(model, y) -> tf.Tensor:
    """Returns the labels as [rows, classes] float32; the row of an unknown label is NaN."""
    labels, num_classes = _labels(y), model.output_shape[-1]
    shape = labels.shape[1:]
    if _are_values(model, labels):
        return tf.cast(labels, tf.float32)
    if shape in ((), (1,)):
        labels = tf.cast(tf.reshape(labels, [-1]), tf.int32)
        is_class = (labels >= 0) & (labels < num_classes)
        # `one_hot` would give zeros, and a loss of 0. The sparse loss gives NaN too.
        return tf.where(is_class[:, None], tf.one_hot(labels, num_classes), np.nan)
    if shape == (num_classes,):
        return tf.cast(labels, tf.float32)
    raise UserError(
        f"labels of shape {labels.shape} with label_smoothing, mixup or cutmix; expected [rows] or "
        f"[rows, 1] of whole numbers, or [rows, {num_classes}] of probabilities"
    )


def _labels(y):
    labels = [each for each in tf.nest.flatten(y) if each is not None]
    if len(labels) != 1:
        raise UserError(
            f"{len(labels)} sets of labels with label_smoothing, mixup or cutmix; expected one"
        )
    return labels[0]


def _are_values(model, labels) -> bool:
    """Returns whether the loss takes a label for each output, and the labels are of this form."""
    return labels_for(model) != "classes" and labels.shape[1:] == (model.output_shape[-1],)


def _smoothed(model, y, part: float) -> tf.Tensor:
    probabilities = _probabilities(model, y)
    if not part:
        return probabilities
    # Of classes that do not exclude each other, each is or is not there.
    choices = 2 if _are_values(model, _labels(y)) else probabilities.shape[-1]
    return probabilities * (1 - part) + part / choices


# Rows.


def _unless_padding(own: tf.Tensor, real: tf.Tensor | None) -> tf.Tensor:
    """Returns the share that each row keeps: all of the row if the next row weighs 0."""
    if real is None:
        return own
    return tf.where(tf.reshape(_next(real), [-1] + [1] * (own.shape.rank - 1)), own, 1.0)


def _blended(value: tf.Tensor, own: tf.Tensor) -> tf.Tensor:
    """Returns each row blended with the next one, rounded once to its dtype."""
    exact = tf.cast(value, tf.float32)
    return tf.cast(own * exact + (1 - own) * _next(exact), value.dtype)


def _next(rows: tf.Tensor) -> tf.Tensor:
    return tf.concat([rows[1:], rows[:1]], axis=0)


def _image(x) -> tf.Tensor:
    (image,) = tf.nest.flatten(x)
    if not image.dtype.is_floating:
        raise UserError(
            f"images of {image.dtype.name} with mixup or cutmix; expected float32 or float16"
        )
    return image
