"""Computes a few numbers for each image on the replicas, so that no output has to be kept.

`scores_of` takes a run, a trained model, a loader and a function of a batch. It gives the
function's results for each example of the loader, in the loader's order and once each, on any
number of replicas. The model's outputs stay on the devices: all masks would not fit in memory.

    scores = scores_of(run, model, loader, Classes(num_named=5))
    scores["loss"]          # [num_examples] float32
"""

import dataclasses
from collections.abc import Callable

import keras
import numpy as np
import tensorflow as tf
from keras import ops

from tfaccel.data.distribute import Loader
from tfaccel.experiment.metrics import psnr
from tfaccel.run import Run
from tfaccel.training.losses import labels_of


class Scored(keras.Model):
    """A model whose prediction is a function of targets and outputs, a dict of [rows, ...]."""

    def __init__(self, model: keras.Model, function: Callable):
        """Takes the trained model and the function of (inputs, targets, outputs)."""
        super().__init__(name=f"scores_of_{model.name}")
        self.scored, self.function = model, function

    def call(self, inputs):
        """Returns the outputs of the model itself."""
        return self.scored(inputs, training=False)

    def predict_step(self, data):
        """Returns the function's results for a batch of a loader."""
        inputs, targets, _ = keras.utils.unpack_x_y_sample_weight(data)
        outputs = self.scored(inputs, training=False)
        return self.function(inputs, targets, outputs)


def scores_of(
    run: Run, model: keras.Model, loader: Loader, function: Callable, *, per_execution: int = 1
) -> dict[str, np.ndarray]:
    """Returns the function's results for each example of the loader, by name, [num_examples, ...].

    Args:
      run: the process's run, in whose scope the model was built.
      model: the trained model; its outputs are logits, or normalized pixels.
      loader: a loader without shuffling. Padding rows are left out.
      function: takes inputs, targets and outputs of a batch, and returns a dict of [rows, ...].
      per_execution: the batches of one launch.
    """
    with run.scope():
        scored = Scored(model, function)
    run.compile(scored, steps_per_execution=per_execution)
    return scored.predict(loader, verbose=0)


@dataclasses.dataclass(frozen=True)
class Classes:
    """The scores of a classification.

    Attributes:
      num_named: the likeliest classes to return for each image.
    """

    num_named: int

    def __call__(self, inputs, targets, outputs) -> dict[str, tf.Tensor]:
        """Returns the scores of the rows of a batch.

        Args:
          inputs: unused.
          targets: [rows] integers, the true classes.
          outputs: [rows, classes], logits.

        Returns:
          "classes", [rows, num_named] int32, the likeliest classes first (of equal ones, the one of
          the smaller number); "probabilities", [rows, num_named] float32, theirs; "true", [rows]
          float32, the true class's; "loss", [rows] float32, the negative natural logarithm of the
          true class's probability; "is_finite", [rows] bool, whether all logits are.
        """
        logits = ops.cast(outputs, "float32")
        log = ops.log_softmax(logits)
        chances, classes = ops.top_k(ops.exp(log), self.num_named)
        labels = ops.cast(targets, "int32")[:, None]
        loss = -ops.take_along_axis(log, labels, axis=-1)[:, 0]
        return {
            "classes": ops.cast(classes, "int32"),
            "probabilities": chances,
            "true": ops.exp(-loss),
            "loss": loss,
            "is_finite": ops.all(ops.isfinite(logits), axis=-1),
        }


@dataclasses.dataclass(frozen=True)
class Masks:
    """The scores of a segmentation.

    Attributes:
      num_classes: the number of classes of a pixel.
      ignore_class: the value of pixels that do not count; None if all count.
    """

    num_classes: int
    ignore_class: int | None

    def __call__(self, inputs, targets, outputs) -> dict[str, tf.Tensor]:
        """Returns the scores of the rows of a batch.

        Args:
          inputs: unused.
          targets: [rows, height, width, 1] integers, the masks.
          outputs: [rows, height, width, classes], logits.

        Returns:
          "pixels", [rows, classes, 3] int32, for each class the pixels that have it in mask and
          prediction, in the mask, and in the prediction; "loss", [rows] float32, the sum over the
          pixels of the negative natural logarithm of the true class's probability; "num_pixels",
          [rows] int32, how many pixels count; "is_finite", [rows] bool, whether all logits are.
        """
        logits = ops.cast(outputs, "float32")
        labels, valid = labels_of(targets, logits, self.ignore_class)
        valid = ops.ones_like(labels, "bool") if valid is None else ops.cast(valid, "bool")
        known = ops.arange(self.num_classes, dtype="int32")
        wanted = (labels[..., None] == known) & valid[..., None]
        found = ops.cast(ops.argmax(logits, axis=-1), "int32")[..., None] == known
        found = found & valid[..., None]
        pixels = [
            ops.sum(ops.cast(each, "int32"), (1, 2)) for each in (wanted & found, wanted, found)
        ]
        losses = ops.sparse_categorical_crossentropy(labels, logits, from_logits=True)
        return {
            "pixels": ops.stack(pixels, axis=-1),
            "loss": ops.sum(ops.where(valid, losses, 0.0), (1, 2)),
            "num_pixels": ops.sum(ops.cast(valid, "int32"), (1, 2)),
            "is_finite": ops.all(ops.isfinite(logits), axis=(1, 2, 3)),
        }


@dataclasses.dataclass(frozen=True)
class Restored:
    """The scores of a restoration; `std` is the divisor of the normalization of each channel."""

    std: tuple[float, ...]

    def __call__(self, inputs, targets, outputs) -> dict[str, tf.Tensor]:
        """Returns the scores of the rows of a batch.

        Args:
          inputs: [rows, height, width, channels], normalized.
          targets: [rows, height, width, channels], normalized.
          outputs: [rows, height, width, channels], normalized.

        Returns:
          "psnr" and "psnr_of_input", [rows] float32, in dB: the answer's and the given image's;
          "loss", [rows] float32, the mean absolute error of normalized values; "is_finite", [rows]
          bool.
        """
        targets, outputs = (ops.cast(each, "float32") for each in (targets, outputs))
        return {
            "psnr": psnr(targets, outputs, std=self.std),
            "psnr_of_input": psnr(targets, inputs, std=self.std),
            "loss": ops.mean(ops.abs(targets - outputs), axis=(1, 2, 3)),
            "is_finite": ops.all(ops.isfinite(outputs), axis=(1, 2, 3)),
        }


def shown(inputs, targets, outputs) -> dict[str, tf.Tensor]:
    """Returns what a picture of some rows needs: inputs, targets and outputs, as they are."""
    return {"inputs": inputs, "targets": targets, "outputs": ops.cast(outputs, "float32")}


def shown_masks(inputs, targets, outputs) -> dict[str, tf.Tensor]:
    """Returns the same of a segmentation, with the likeliest class of each pixel, uint8."""
    found = ops.argmax(outputs, axis=-1)[..., None]
    return {"inputs": inputs, "targets": targets, "outputs": ops.cast(found, "uint8")}
