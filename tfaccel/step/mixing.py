"""Label smoothing, mixup, cutmix, cutout: a batch changed on its device, in the compiled step.

Takes a model and what `config.step` says; gives a function from a replica's batch to the batch that
the model's own step is given. With the first three, labels are probabilities over the classes,
[rows, classes] float32; cutout leaves them, or whatever the targets are, as they are.

    change = mixed(model, config)           # for training
    batch = change(replica, batch)
    change = as_probabilities(model)        # for testing: neither smoothed, mixed nor cut

Each row has draws of its own (tfaccel/step/draws.py), and is mixed with the next row of its
replica. Sample weights stay those of the row. A row of weight 0 may be padding: no other row is
mixed with it.
"""

from collections.abc import Callable

import keras
import numpy as np
import tensorflow as tf

from tfaccel.common.errors import UserError
from tfaccel.common.tables import in_figures
from tfaccel.config import StepConfig
from tfaccel.keras_internals.model_view import outputs_of, takes_labels
from tfaccel.keras_internals.replica import Replica
from tfaccel.step import blend, cutout, totals


def mixed(model: keras.Model, config: StepConfig) -> Callable:
    """Returns the change of a training batch: smoothed, blended with the next row's, then cut.

    Args:
      model: that `check` has passed, if labels are mixed.
      config: label_smoothing, mixup_alpha, cutmix_alpha and cutout_pixels.
    """

    def change(replica: Replica, batch):
        x, y, weight = keras.utils.unpack_x_y_sample_weight(batch)
        if config.mixes_labels:
            y = _smoothed(_probabilities(model, y), config.label_smoothing)
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
    """Returns the change of a test batch: the labels as probabilities, for the same loss."""

    def change(replica: Replica, batch):
        x, y, weight = keras.utils.unpack_x_y_sample_weight(batch)
        return keras.utils.pack_x_y_sample_weight(x, _probabilities(model, y), weight)

    return change


def specs_as_probabilities(model: keras.Model) -> Callable:
    """Returns the same change of a batch's specs, by which Keras chooses what "accuracy" is."""

    def change(batch):
        x, y, weight = keras.utils.unpack_x_y_sample_weight(batch)
        labels = _labels(y)
        y = tf.TensorSpec((labels.shape[0], model.output_shape[-1]), tf.float32)
        return keras.utils.pack_x_y_sample_weight(x, y, weight)

    return change


def check(model: keras.Model, config: StepConfig) -> None:
    """Raises UserError for a model whose labels cannot be probabilities, or images not be mixed."""
    outputs = outputs_of(model)
    if len(outputs) != 1 or len(outputs[0].shape) != 2 or (outputs[0].shape[-1] or 0) < 2:
        received = ", ".join(str(each.shape[1:]) for each in outputs) or "no known outputs"
        raise UserError(
            f"label_smoothing, mixup or cutmix with model {model.name}, which gives {received} for "
            "a row; expected one output of a score for each class: start it with "
            "keras.Input(shape=...), or leave them out"
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
            "a row; expected one, which for cutmix is (height, width, channels): leave them out"
        )


# Labels.


def _probabilities(model, y) -> tf.Tensor:
    """Returns the labels as [rows, classes] float32: NaN for one that is no class's number."""
    labels, num_classes = _labels(y), model.output_shape[-1]
    shape = labels.shape[1:]
    if shape in ((), (1,)):
        labels = tf.cast(tf.reshape(labels, [-1]), tf.int32)
        is_class = (labels >= 0) & (labels < num_classes)
        # `one_hot` would give zeros, and a loss of 0; the sparse loss gives NaN too.
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


def _smoothed(probabilities: tf.Tensor, part: float) -> tf.Tensor:
    return probabilities * (1 - part) + part / probabilities.shape[-1]


# Rows.


def _unless_padding(own: tf.Tensor, real: tf.Tensor | None) -> tf.Tensor:
    """Returns what stays of each row: all, where the next one weighs nothing."""
    if real is None:
        return own
    return tf.where(tf.reshape(_next(real), [-1] + [1] * (own.shape.rank - 1)), own, 1.0)


def _blended(value: tf.Tensor, own: tf.Tensor) -> tf.Tensor:
    """Returns each row blended with the next one, rounded once to its own dtype."""
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
