"""What is computed for each image, on its replica: functions for `experiment.scored`.

scores = scored(run, model, Classes(num_named=5)).predict(loader, verbose=0)
scores["loss"]          # [num_examples] float32
"""

import dataclasses

import tensorflow as tf
from keras import ops

from tfaccel.experiment.metrics import psnr
from tfaccel.training.losses import labels_of


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


def several(inputs, targets, outputs) -> dict[str, tf.Tensor]:
    """Returns the scores of images that have any number of classes.

    Args:
      inputs: unused.
      targets: [rows, classes], 1 for each class of the image, else 0.
      outputs: [rows, classes], logits.

    Returns:
      "probabilities", [rows, classes] float32, each class's own; "loss", [rows] float32, the mean
      over the classes of the binary cross-entropy, in nats; "is_finite", [rows] bool, whether all
      logits are.
    """
    logits = ops.cast(outputs, "float32")
    losses = tf.nn.sigmoid_cross_entropy_with_logits(ops.cast(targets, "float32"), logits)
    return {
        "probabilities": ops.sigmoid(logits),
        "loss": ops.mean(losses, axis=-1),
        "is_finite": ops.all(ops.isfinite(logits), axis=-1),
    }


def numbers(inputs, targets, outputs) -> dict[str, tf.Tensor]:
    """Returns the scores of a regression.

    Args:
      inputs: unused.
      targets: unused, because a loader gives them as the source has them.
      outputs: [rows, targets], numbers.

    Returns:
      "numbers", [rows, targets] float32, the outputs; "is_finite", [rows] bool, whether all are.
    """
    outputs = ops.cast(outputs, "float32")
    return {"numbers": outputs, "is_finite": ops.all(ops.isfinite(outputs), axis=-1)}


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
          [rows] int32, how many pixels count; "num_beyond", [rows] int32, how many others have a
          value that is no class; "is_finite", [rows] bool, whether all logits are.
        """
        logits = ops.cast(outputs, "float32")
        labels, valid = labels_of(targets, logits, self.ignore_class)
        counts = ops.ones_like(labels, "bool") if valid is None else ops.cast(valid, "bool")
        # A GPU would give a loss of NaN for a value beyond the classes, and a CPU an error.
        valid = counts & (labels < self.num_classes)
        labels = ops.where(valid, labels, 0)
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
            "num_beyond": ops.sum(ops.cast(counts & ~valid, "int32"), (1, 2)),
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
