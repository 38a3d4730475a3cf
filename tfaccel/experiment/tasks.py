"""The task that the data set for a model: outputs, loss and metrics.

`task_of` takes a loader's data and the model's config. Labels make a classification, target images
a restoration, and masks a segmentation.

    task = task_of(train.data, config.model, config.step)
    run.compile(model, optimizer, task.loss, metrics=task.metrics)
"""

import contextlib
import dataclasses

import keras
import numpy as np

from tfaccel.common.errors import UserError
from tfaccel.config import ModelConfig, StepConfig
from tfaccel.config import names as names_lib
from tfaccel.data.images import ImageData
from tfaccel.data.source import Blobs
from tfaccel.data.sources.pillow import UNREADABLE, largest_value
from tfaccel.experiment.metrics import PSNR

NUM_MASKS = 64  # evenly spread masks that are checked: 0.1 s if they are photographs'


@dataclasses.dataclass(frozen=True)
class Task:
    """The outputs, loss and metrics of a model.

    Attributes:
      output_shape: the model's output without the batch: (classes,), or (height, width, channels).
      loss: a loss of the outputs as the model gives them: logits, or normalized pixels.
      metrics: the metrics besides the loss.
    """

    output_shape: tuple[int, ...]
    loss: keras.losses.Loss
    metrics: list

    @property
    def num_outputs(self) -> int:
        """The number of classes, or of values per pixel."""
        return self.output_shape[-1]


def task_of(data: ImageData, model: ModelConfig, step: StepConfig) -> Task:
    """Returns the task for a loader's data: labelled images, or pairs of images.

    Raises:
      UserError: `num_outputs` does not suit the data, or is missing for masks, or a checked mask
        has a higher value; or the config asks for label smoothing, mixup or cutmix, but the data
        have no labels.
    """
    if data.source.targets is None:
        num_outputs = _num_outputs(len(data.class_names), model.num_outputs)
        return _classification(num_outputs, mixes_labels=step.mixes_labels)
    if step.mixes_labels:
        raise UserError(
            "label_smoothing, mixup or cutmix with target images; they are for classes: remove them"
        )
    if data.images.targets == "mask":
        return _segmentation(data, model.num_outputs)
    return _restoration(data.images, model.num_outputs)


def check_model(model: keras.Model, task: Task) -> None:
    """Raises UserError unless the model's outputs have the task's shape.

    If possible, Keras would broadcast one to the other, and train on that.
    """
    if model.output_shape[1:] != task.output_shape:
        raise UserError(
            f"model {model.name} gives {model.output_shape[1:]} for an image, but the targets of "
            f"these data need {task.output_shape}; use a model that gives "
            + ("an image" if len(task.output_shape) == 3 else "classes")
        )


def check_monitor(monitor: str, task: Task) -> None:
    """Raises UserError for a metric that the epochs will not have."""
    names = ["loss", *(each if isinstance(each, str) else each.name for each in task.metrics)]
    names_lib.check_monitor(monitor, names)


def _num_outputs(num_classes: int, asked: int | None) -> int:
    if asked is not None and asked < num_classes:
        raise UserError(
            f"num_outputs={asked}, but the data have {num_classes} classes; use at least as many, "
            "or remove num_outputs"
        )
    return asked or num_classes


def _classification(num_outputs: int, *, mixes_labels: bool) -> Task:
    """Returns the task, for probabilities if the step turns labels into them, else for labels."""
    if mixes_labels:
        loss = keras.losses.CategoricalCrossentropy(from_logits=True)
        top_k = keras.metrics.TopKCategoricalAccuracy
    else:
        loss, top_k = _cross_entropy(), keras.metrics.SparseTopKCategoricalAccuracy
    # From the name "accuracy" Keras chooses the metric for the labels.
    top_5 = [top_k(5, name="top5")] if num_outputs > 5 else []
    return Task((num_outputs,), loss, ["accuracy", *top_5])


def _segmentation(data: ImageData, asked: int | None) -> Task:
    if asked is None:
        raise UserError(
            "num_outputs=None with targets='mask'; set it to the number of values of a mask's "
            "pixels (the largest, plus one), for example --config.model.num_outputs=21"
        )
    _check_values(data.found.targets, asked)
    return Task((*data.images.image_size, asked), _cross_entropy(), ["accuracy"])


def _check_values(masks: Blobs | np.ndarray, num_outputs: int) -> None:
    """Raises UserError for a value without an output, for which the loss would silently be NaN."""
    for index in np.unique(np.linspace(0, len(masks) - 1, NUM_MASKS).astype(int)).tolist():
        name, largest = f"mask {index}", 0
        if not isinstance(masks, Blobs):
            largest = int(masks[index].max())
        else:
            name = f"the mask {masks.name(index)}"
            with contextlib.suppress(*UNREADABLE):  # the loader reports it, or skips it
                largest = largest_value(masks, index)
        if largest >= num_outputs:
            raise UserError(
                f"{name} has the value {largest}, but num_outputs={num_outputs} allows 0 to "
                f"{num_outputs - 1}; use --config.model.num_outputs={largest + 1} or more, or "
                "number the classes from 0 (the loss ignores no value)"
            )


def _restoration(images, asked: int | None) -> Task:
    if asked not in (None, images.channels):
        raise UserError(
            f"num_outputs={asked}, but target images have {images.channels} channel(s); remove "
            "num_outputs"
        )
    loss = keras.losses.MeanAbsoluteError()  # sharper than squared error, with an equal PSNR
    return Task((*images.image_size, images.channels), loss, [PSNR(images.std)])


def _cross_entropy() -> keras.losses.Loss:
    return keras.losses.SparseCategoricalCrossentropy(from_logits=True)
