"""What is learned from what the data gives: outputs, loss and metrics.

Takes a loader's data and which model; gives a `Task`. Labels make a classification, target images a
restoration, masks a segmentation.

    task = task_of(train.data, config.model, config.step)
    run.compile(model, optimizer, task.loss, metrics=task.metrics)
"""

import contextlib
import dataclasses

import keras
import numpy as np

from tfaccel.common.errors import UserError, did_you_mean
from tfaccel.config import ModelConfig, StepConfig
from tfaccel.data.images import ImageData
from tfaccel.data.source import Blobs
from tfaccel.data.sources.pillow import UNREADABLE, largest_value
from tfaccel.experiment.metrics import PSNR

NUM_MASKS = 64  # that are looked at, from the first to the last: 0.1 s where they are photographs'


@dataclasses.dataclass(frozen=True)
class Task:
    """What a model is trained to give.

    Attributes:
      output_shape: of the model, without the batch: (classes,), or (height, width, channels).
      loss: on the outputs as the model gives them: logits, or normalised pixels.
      metrics: to measure, beside the loss.
    """

    output_shape: tuple[int, ...]
    loss: keras.losses.Loss
    metrics: list

    @property
    def num_outputs(self) -> int:
        """Classes, or values per pixel."""
        return self.output_shape[-1]


def task_of(data: ImageData, model: ModelConfig, step: StepConfig) -> Task:
    """Returns the task that the data sets.

    Args:
      data: what a loader reads: labelled images, or pairs of images.
      model: which model, and how many outputs it should have, if they are not those of the data.
      step: whether labels become probabilities over the classes.

    Raises:
      UserError: `num_outputs` does not suit the data, or is missing for masks, or one of those that
        are looked at has a higher value; or label smoothing, mixup or cutmix is asked of data
        without labels.
    """
    if data.source.targets is None:
        classification = _classification_of_mixed if step.mixes_labels else _classification
        return classification(_num_outputs(len(data.class_names), model.num_outputs))
    if step.mixes_labels:
        raise UserError(
            "label_smoothing, mixup or cutmix with target images; they are for classes: leave them "
            "out"
        )
    if data.images.targets == "mask":
        return _segmentation(data, model.num_outputs)
    return _restoration(data.images, model.num_outputs)


def check_model(model: keras.Model, task: Task) -> None:
    """Raises UserError unless the model gives what the task asks for.

    Keras would stretch one to the other where it can, and train on that.
    """
    if model.output_shape[1:] != task.output_shape:
        raise UserError(
            f"model {model.name} gives {model.output_shape[1:]} for an image; expected "
            f"{task.output_shape}, as the targets of these data are: use a model that gives "
            + ("an image" if len(task.output_shape) == 3 else "classes")
        )


def check_monitor(monitor: str, task: Task) -> None:
    """Raises UserError for a metric that no epoch will have."""
    names = ["loss", *(each if isinstance(each, str) else each.name for each in task.metrics)]
    known = [*names, *(f"val_{name}" for name in names)]
    if monitor not in known:
        cure = did_you_mean(monitor, known)
        raise UserError(f"train.monitor={monitor!r} is none of an epoch's metrics{cure}")


def _num_outputs(num_classes: int, asked: int | None) -> int:
    if asked is not None and asked < num_classes:
        raise UserError(
            f"num_outputs={asked}, but the data have {num_classes} classes; give at least as many, "
            "or leave it out"
        )
    return asked or num_classes


def _classification(num_outputs: int) -> Task:
    top_k = keras.metrics.SparseTopKCategoricalAccuracy
    return Task((num_outputs,), _cross_entropy(), _accuracies(num_outputs, top_k))


def _classification_of_mixed(num_outputs: int) -> Task:
    """Returns the same where the step makes probabilities of the labels."""
    loss = keras.losses.CategoricalCrossentropy(from_logits=True)
    top_k = keras.metrics.TopKCategoricalAccuracy
    return Task((num_outputs,), loss, _accuracies(num_outputs, top_k))


def _accuracies(num_outputs: int, top_k: type) -> list:
    """Returns top-1, by the name from which Keras chooses what suits the labels, and top-5."""
    return ["accuracy", top_k(5, name="top5")] if num_outputs > 5 else ["accuracy"]


def _segmentation(data: ImageData, asked: int | None) -> Task:
    if asked is None:
        raise UserError(
            "num_outputs=None with targets='mask'; say how many values a mask's pixels have (the "
            "largest, plus one), e.g. --config.model.num_outputs=21"
        )
    _check_values(data.found.targets, asked)
    return Task((*data.images.image_size, asked), _cross_entropy(), ["accuracy"])


def _check_values(masks: Blobs | np.ndarray, num_outputs: int) -> None:
    """Raises UserError for a value that no output is of: the loss would be NaN, and not say why."""
    for index in np.unique(np.linspace(0, len(masks) - 1, NUM_MASKS).astype(int)).tolist():
        name, largest = f"mask {index}", 0
        if not isinstance(masks, Blobs):
            largest = int(masks[index].max())
        else:
            name = f"the mask {masks.name(index)}"
            with contextlib.suppress(*UNREADABLE):  # the loader names it, or leaves it out
                largest = largest_value(masks, index)
        if largest >= num_outputs:
            raise UserError(
                f"{name} has the value {largest}; expected 0 to {num_outputs - 1}, as "
                f"num_outputs={num_outputs} says: give --config.model.num_outputs={largest + 1} or "
                "more, or number the classes from 0 on (no value is left out of the loss)"
            )


def _restoration(images, asked: int | None) -> Task:
    if asked not in (None, images.channels):
        raise UserError(
            f"num_outputs={asked}, but target images have {images.channels} channel(s); leave it "
            "out"
        )
    loss = keras.losses.MeanAbsoluteError()  # sharper than squares, and as good in PSNR
    return Task((*images.image_size, images.channels), loss, [PSNR(images.std)])


def _cross_entropy() -> keras.losses.Loss:
    return keras.losses.SparseCategoricalCrossentropy(from_logits=True)
