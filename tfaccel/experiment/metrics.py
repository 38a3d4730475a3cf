"""Metrics: of several classes an image, of numbers, of restored images and of masks.

Keras's own metrics are taken where it has them. Those of several classes take logits here.

run.compile(model, metrics=metrics_of_several(num_classes=80))
run.compile(model, metrics=metrics_of_numbers())
run.compile(model, metrics=[PSNR(std=0.5)])
run.compile(model, metrics=[MeanIoU(21, ignore_class=255), PixelAccuracy(ignore_class=255)])
"""

from collections.abc import Sequence

import keras
from keras import ops

from tfaccel.training.losses import labels_of, weights_of

# The smallest error that counts. A perfect image has an infinite ratio, which would hide the others
# in the mean, so it counts as 100 dB. An error of half an 8-bit grey level in every pixel is 54 dB.
LEAST_MSE = 1e-10


def metrics_of_several(num_classes: int) -> list[keras.metrics.Metric]:
    """Returns metrics of any number of classes an image, for logits [rows, classes].

    They are Keras's: the share of right answers (of all classes of all images), the F1 score, the
    area under the ROC curve, and the mean average precision, as the area under the curve of
    precision and recall. The last three are means over the classes. A class without any image
    counts 0 in them, as in Keras. Keras computes areas from 200 thresholds.

    Args:
      num_classes: the number of classes.
    """
    areas = {"multi_label": True, "num_labels": num_classes}
    return [
        BinaryAccuracyOfLogits(name="binary_accuracy"),
        F1OfLogits(average="macro", threshold=0.5, name="f1_score"),
        AUCOfLogits(name="auc", **areas),
        AUCOfLogits(curve="PR", name="mean_average_precision", **areas),
    ]


def metrics_of_numbers() -> list[keras.metrics.Metric]:
    """Returns metrics of numbers [rows, numbers]: the mean absolute error and R squared, as means.

    R squared is 1 for perfect numbers, and 0 for the mean of all rows.
    """
    return [
        keras.metrics.MeanAbsoluteError(name="mean_absolute_error"),
        keras.metrics.R2Score(name="r2_score"),
    ]


class _OfLogits:
    """Lets a metric of Keras take logits, and labels that mixup or smoothing made fractions.

    Such a label counts as 1 above one half, else as 0. The states of the metrics are sums over
    rows, so the states of replicas are added.
    """

    merge_state = "sum"

    def update_state(self, y_true, y_pred, sample_weight=None):
        """Adds the labels and logits of some rows, [rows, classes], of weights [rows]."""
        y_true = ops.cast(ops.cast(y_true, "float32") > 0.5, "float32")
        chances = ops.sigmoid(ops.cast(y_pred, "float32"))
        return super().update_state(y_true, chances, sample_weight)


@keras.saving.register_keras_serializable("tfaccel")
class BinaryAccuracyOfLogits(_OfLogits, keras.metrics.BinaryAccuracy):
    """Keras's BinaryAccuracy, for logits."""


@keras.saving.register_keras_serializable("tfaccel")
class F1OfLogits(_OfLogits, keras.metrics.F1Score):
    """Keras's F1Score, for logits. `threshold` is one of probabilities."""


@keras.saving.register_keras_serializable("tfaccel")
class AUCOfLogits(_OfLogits, keras.metrics.AUC):
    """Keras's AUC, for logits."""


@keras.saving.register_keras_serializable("tfaccel")
class PSNR(keras.metrics.MeanMetricWrapper):
    """The mean over images of the peak signal-to-noise ratio, in dB, for pixels in 0..1.

    Its state is a sum over images and their number, which can be added over replicas. An image of
    weight 0 does not count. Outputs are neither clipped nor rounded.
    """

    def __init__(self, std: float | Sequence[float] = 1.0, name="psnr", dtype=None):
        """Starts without images.

        Args:
          std: the standard deviation that images were divided by, for each channel or one for all.
            It turns a difference of normalized values into one of pixels in 0..1.
          name: the name in the logs.
          dtype: the dtype of the state; Keras's default, float32, suffices.
        """
        self.std = std
        super().__init__(psnr, name=name, dtype=dtype, std=std)
        self._direction = "up"

    def get_config(self) -> dict:
        """Returns the arguments of the constructor."""
        return {"name": self.name, "dtype": self.dtype, "std": self.std}


def psnr(y_true, y_pred, *, std: float | Sequence[float]):
    """Returns the ratio of each image in dB, [rows] float32.

    Args:
      y_true: [rows, height, width, channels], normalized.
      y_pred: [rows, height, width, channels], normalized.
      std: the divisor of the normalization, for each channel or one for all.
    """
    difference = ops.cast(y_true, "float32") - ops.cast(y_pred, "float32")
    pixels = difference * ops.convert_to_tensor(std, "float32")
    mse = ops.mean(ops.square(pixels), axis=(1, 2, 3))
    return -10 * ops.log10(ops.maximum(mse, LEAST_MSE))


@keras.saving.register_keras_serializable("tfaccel")
class MeanIoU(keras.metrics.Metric):
    """The mean over classes of the intersection over union of all pixels, from logits.

    A class without a pixel in labels and outputs does not count. The state has three numbers for
    each class, which can be added over replicas. Keras's MeanIoU keeps a matrix of all pairs of
    classes, which a GPU fills pixel by pixel.
    """

    def __init__(self, num_classes: int, *, ignore_class=None, name="mean_iou", dtype=None):
        """Starts without pixels.

        Args:
          num_classes: the number of classes, which is that of the logits.
          ignore_class: the label of pixels that do not count; None counts all.
          name: the name in the logs.
          dtype: unused. The state is float64, because float32 counts only to 16 million.
        """
        super().__init__(name=name, dtype=dtype)
        self.num_classes, self.ignore_class, self._direction = num_classes, ignore_class, "up"
        self.both, self.labelled, self.found = (
            self.add_variable((num_classes,), "zeros", dtype="float64", name=each)
            for each in ("both", "labelled", "found")
        )

    def update_state(self, y_true, y_pred, sample_weight=None):
        """Adds the pixels of some masks, [rows, height, width, 1], and of their logits.

        An image of sample weight 0 does not count; other weights multiply its pixels.
        """
        labels, valid = labels_of(y_true, y_pred, self.ignore_class)
        classes = ops.arange(self.num_classes, dtype="int32")
        wanted = labels[..., None] == classes
        found = ops.cast(ops.argmax(y_pred, axis=-1), "int32")[..., None] == classes
        valid = ops.ones_like(labels) if valid is None else valid
        weight = weights_of(ops.cast(valid, "float32"), sample_weight)
        axes = tuple(range(len(labels.shape)))
        for variable, pixels in (
            (self.both, wanted & found),
            (self.labelled, wanted),
            (self.found, found),
        ):
            counted = ops.sum(ops.where(pixels, weight[..., None], 0.0), axis=axes)
            variable.assign_add(ops.cast(counted, "float64"))

    def of_classes(self):
        """Returns the intersection over union of each class, NaN for one without pixels."""
        union = self.labelled + self.found - self.both
        return ops.where(union > 0, self.both / ops.maximum(union, 1e-30), float("nan"))

    def result(self):
        """Returns the mean over the classes that have pixels; 0 without pixels."""
        union = self.labelled + self.found - self.both
        there = ops.cast(union > 0, "float64")
        ratios = self.both / ops.where(union > 0, union, 1.0)
        return ops.cast(ops.sum(ratios) / ops.maximum(ops.sum(there), 1.0), "float32")

    def get_config(self) -> dict:
        """Returns the arguments of the constructor."""
        own = {"num_classes": self.num_classes, "ignore_class": self.ignore_class}
        return {"name": self.name, "dtype": self.dtype} | own


@keras.saving.register_keras_serializable("tfaccel")
class PixelAccuracy(keras.metrics.SparseCategoricalAccuracy):
    """The share of pixels whose class is found, without ignored pixels."""

    def __init__(self, *, ignore_class: int, name="accuracy", dtype=None):
        """Takes the label of pixels that do not count."""
        super().__init__(name=name, dtype=dtype)
        self.ignore_class = ignore_class

    def update_state(self, y_true, y_pred, sample_weight=None):
        """Adds the pixels of some masks, [rows, height, width, 1], and of their logits."""
        labels, valid = labels_of(y_true, y_pred, self.ignore_class)
        weight = weights_of(ops.cast(valid, "float32"), sample_weight)
        return super().update_state(labels, y_pred, weight)

    def get_config(self) -> dict:
        """Returns the arguments of the constructor."""
        return {"name": self.name, "dtype": self.dtype, "ignore_class": self.ignore_class}
