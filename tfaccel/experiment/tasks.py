"""The task that the data set for a model: outputs, loss and metrics.

`task_of` takes a loader's data and the model's config. Labels make a classification, into one class
or several classes, or a regression. Target images make a restoration, and masks a segmentation.

    task = task_of(train.data, config.model, config.step, config.train)
    run.compile(model, optimizer, task.loss, metrics=task.metrics)
"""

import contextlib
import dataclasses
import functools
from collections.abc import Sequence

import keras
import numpy as np

from tfaccel.common.errors import UserError
from tfaccel.common.run_log import summary
from tfaccel.config import ModelConfig, StepConfig, TrainConfig
from tfaccel.config import names as names_lib
from tfaccel.config.training import LOSSES_OF_NUMBERS
from tfaccel.data.images import ImageData
from tfaccel.data.source import Blobs
from tfaccel.data.sources.pillow import UNREADABLE, histogram
from tfaccel.experiment.metrics import (
    PSNR,
    MeanIoU,
    PixelAccuracy,
    metrics_of_numbers,
    metrics_of_several,
)
from tfaccel.training.losses import BinaryCrossentropy, Crossentropy, Dice, Sum

# Evenly spread masks that are checked, and counted for weights: 0.1 s if they are photographs'.
NUM_MASKS = 64


@dataclasses.dataclass(frozen=True)
class Task:
    """The outputs, loss and metrics of a model.

    Attributes:
      output_shape: the model's output without the batch: (classes,), (numbers,), or (height,
        width, channels).
      loss: a loss of the outputs as the model gives them: logits, numbers, or normalized pixels.
      metrics: the metrics besides the loss.
    """

    output_shape: tuple[int, ...]
    loss: keras.losses.Loss
    metrics: list

    @property
    def num_outputs(self) -> int:
        """The number of classes, of numbers, or of values per pixel."""
        return self.output_shape[-1]


def task_of(data: ImageData, model: ModelConfig, step: StepConfig, train: TrainConfig) -> Task:
    """Returns the task for a loader's data: labelled images, or pairs of images.

    Args:
      data: the training data.
      model: its `num_outputs` may set the number of classes of images with one class each.
      step: it may turn labels into probabilities.
      train: its loss, and its weights of classes.

    Raises:
      UserError: `num_outputs` or the loss does not suit the data, or `num_outputs` is missing for
        masks, or a checked mask has a higher value; or the config asks for label smoothing, mixup
        or cutmix, but the data have no labels for them.
    """
    kind = data.source.task
    if kind in ("multilabel", "regression"):
        count = data.source.labels.shape[1]
        if model.num_outputs not in (None, count):
            raise UserError(
                f"num_outputs={model.num_outputs}, but an image has {count} labels; remove "
                "num_outputs"
            )
        return _several(count, train) if kind == "multilabel" else _regression(count, train, step)
    if kind == "classes":
        num_outputs = _num_outputs(len(data.class_names), model.num_outputs)
        if train.bce_target_threshold is not None and step.label_smoothing:
            raise UserError(
                f"label_smoothing={step.label_smoothing} with bce_target_threshold="
                f"{train.bce_target_threshold}, which makes each target 0 or 1 again; remove one"
            )
        return _classification(num_outputs, data, train, mixes_labels=step.mixes_labels)
    if step.mixes_labels:
        names = ("label_smoothing", "mixup_alpha", "cutmix_alpha")
        raise UserError(f"{_set(step, names)} with target images, but it is for classes: remove it")
    if data.images.targets == "mask":
        return _segmentation(data, model.num_outputs, train)
    if wrong := _set(train, ("loss", "class_weights")):
        raise UserError(f"{wrong} with target images, but it is for classes or numbers: remove it")
    return _restoration(data.images, model.num_outputs)


def check_model(model: keras.Model, task: Task) -> None:
    """Raises UserError unless the model's outputs have the task's shape.

    If possible, Keras would broadcast one to the other, and train on that.
    """
    if model.output_shape[1:] != task.output_shape:
        raise UserError(
            f"model {model.name} gives {model.output_shape[1:]} for an image, but the targets of "
            f"these data need {task.output_shape}; use a model that gives "
            + ("an image" if len(task.output_shape) == 3 else "a number for each label")
        )


def check_names(data: ImageData, model: ModelConfig) -> None:
    """Raises UserError unless each class of masks has a name, or none has.

    A run without a name for some outputs would train classes that the masks do not have. Only a run
    that trains is refused, so that one of an earlier version can still be evaluated.
    """
    names, outputs = data.found.target_names, model.num_outputs
    if data.images.targets == "mask" and names and outputs is not None and len(names) < outputs:
        shown = ", ".join(names[:5]) + (", ..." if len(names) > 5 else "")
        raise UserError(
            f"data.classes names {len(names)} classes of the masks ({shown}), but "
            f"model.num_outputs={outputs}; set --config.model.num_outputs={len(names)} if these "
            f"are all classes, or name all {outputs} in data.classes"
        )


def tell_moved(data: ImageData) -> None:
    """Shows a line if numbers are learned from images that are flipped, cut or moved at random.

    Nothing changes the numbers with the image, which is wrong for a position or a side.
    """
    if data.source.task != "regression":
        return
    augment, fields = data.augment, ("horizontal_flip", "vertical_flip", "rotation_degrees")
    moved = {f"window={augment.window}": augment.has_random_window}
    moved |= {name: getattr(augment, name) for name in (*fields, "shift_pixels")}
    moved[f"policy={augment.policy}"] = augment.policy != "none"
    if asked := [name for name, each in moved.items() if each]:
        summary(
            "data: the training images are moved at random (%s), but their numbers stay as they "
            "are; if a number says where something is, or on which side, set "
            "--config.train_images.horizontal_flip=False and so on",
            ", ".join(asked),
        )


def check_monitor(monitor: str, task: Task) -> None:
    """Raises UserError for a metric that the epochs will not have."""
    names = ["loss", *(each if isinstance(each, str) else each.name for each in task.metrics)]
    names_lib.check_monitor(monitor, names)


def _set(config: StepConfig | TrainConfig, names: Sequence[str]) -> str:
    """Returns the fields that do not have their default, as "name=value, other=value"."""
    values = {each: getattr(config, each) for each in names}
    return ", ".join(
        f"{name}={value!r}"
        for name, value in values.items()
        if value != getattr(type(config), name)
    )


def _num_outputs(num_classes: int, asked: int | None) -> int:
    if asked is not None and asked < num_classes:
        raise UserError(
            f"num_outputs={asked}, but the data have {num_classes} classes; use at least as many, "
            "or remove num_outputs"
        )
    return asked or num_classes


def _classification(
    num_outputs: int, data: ImageData, train: TrainConfig, *, mixes_labels: bool
) -> Task:
    """Returns the task, for probabilities if the step turns labels into them, else for labels."""
    if train.loss not in ("auto", "cross_entropy", "binary_cross_entropy", "focal"):
        what = "numbers" if train.loss in LOSSES_OF_NUMBERS else "masks"
        raise UserError(
            f"loss={train.loss!r} with labelled images; it is for {what}: use 'cross_entropy', "
            "'binary_cross_entropy' or 'focal'"
        )
    weights = None
    if train.class_weights == "balanced":
        counts = np.bincount(data.source.labels, minlength=num_outputs)
        weights = _balanced(counts, "the training labels")
    if train.loss == "binary_cross_entropy":
        threshold = train.bce_target_threshold
        loss = BinaryCrossentropy(target_threshold=threshold, of_probabilities=mixes_labels)
    elif train.loss == "focal" or weights:
        loss = _cross_entropy_of(train, weights, of_probabilities=mixes_labels)
    elif mixes_labels:
        loss = keras.losses.CategoricalCrossentropy(from_logits=True)
    else:
        loss = _cross_entropy()
    top_k = "TopKCategoricalAccuracy" if mixes_labels else "SparseTopKCategoricalAccuracy"
    # From the name "accuracy" Keras chooses the metric for the labels.
    top_5 = [getattr(keras.metrics, top_k)(5, name="top5")] if num_outputs > 5 else []
    return Task((num_outputs,), loss, ["accuracy", *top_5])


def _several(num_classes: int, train: TrainConfig) -> Task:
    """Returns the task of any number of classes an image, each with a logit of its own."""
    if train.loss not in ("auto", "cross_entropy", "binary_cross_entropy", "focal"):
        raise UserError(
            f"loss={train.loss!r} with several classes an image; use 'cross_entropy' or 'focal'"
        )
    if train.bce_target_threshold is not None:
        raise UserError(
            f"bce_target_threshold={train.bce_target_threshold} with several classes an image, "
            "whose labels are 0 or 1; it is for images with one class: remove it"
        )
    if train.class_weights != "none":
        raise UserError(
            f"class_weights={train.class_weights!r} with several classes an image, of which each "
            "has its own loss; remove it, or use loss='focal'"
        )
    if train.loss == "focal":
        loss = keras.losses.BinaryFocalCrossentropy(gamma=train.focal_gamma, from_logits=True)
    else:
        loss = keras.losses.BinaryCrossentropy(from_logits=True)
    return Task((num_classes,), loss, metrics_of_several(num_classes))


def _regression(num_numbers: int, train: TrainConfig, step: StepConfig) -> Task:
    if wrong := _set(step, ("label_smoothing", "cutmix_alpha")):
        raise UserError(
            f"{wrong} with numbers as labels, but it is for classes: set it to 0, or use "
            "mixup_alpha, which blends numbers too"
        )
    if train.loss not in ("auto", *LOSSES_OF_NUMBERS):
        raise UserError(
            f"loss={train.loss!r} with numbers as labels; use one of {', '.join(LOSSES_OF_NUMBERS)}"
        )
    if wrong := _set(train, ("class_weights",)):
        raise UserError(f"{wrong} with numbers as labels, but it is for classes: remove it")
    loss = {
        "absolute_error": keras.losses.MeanAbsoluteError,
        "huber": functools.partial(keras.losses.Huber, delta=train.huber_delta),
    }.get(train.loss, keras.losses.MeanSquaredError)()
    return Task((num_numbers,), loss, metrics_of_numbers())


def _segmentation(data: ImageData, asked: int | None, train: TrainConfig) -> Task:
    if train.loss == "binary_cross_entropy" or train.loss in LOSSES_OF_NUMBERS:
        what = "numbers" if train.loss in LOSSES_OF_NUMBERS else "labelled images"
        raise UserError(
            f"loss={train.loss!r} with masks; it is for {what}: use one of 'cross_entropy', "
            "'focal', 'dice', 'cross_entropy_dice' or 'focal_dice'"
        )
    names = data.found.target_names
    if asked is None and names:
        asked = len(names)
    if asked is None:
        raise UserError(
            "num_outputs=None with targets='mask'; set it to the number of values of a mask's "
            "pixels (the largest, plus one, without ignore_class), for example "
            "--config.model.num_outputs=21, or name the classes in data.classes"
        )
    if len(names) > asked:
        raise UserError(
            f"num_outputs={asked}, but classes has {len(names)} names of a mask's values; use "
            f"num_outputs={len(names)}, or name fewer values"
        )
    ignored = data.images.ignore_class
    if ignored is not None and ignored < asked:
        raise UserError(
            f"ignore_class={ignored} is one of the classes 0 to {asked - 1} of num_outputs="
            f"{asked}; number the classes from 0, and give ignored pixels another value, e.g. 255"
        )
    counts = _checked_counts(data.found.targets, asked, ignored)
    weights = _balanced(counts, f"{NUM_MASKS} masks") if train.class_weights == "balanced" else None
    if train.loss in ("auto", "cross_entropy") and ignored is None and weights is None:
        loss = _cross_entropy()
    elif train.loss == "dice":
        loss = Dice(ignore_class=ignored)
    else:
        loss = _cross_entropy_of(train, weights, ignore_class=ignored)
        if train.loss.endswith("_dice"):
            loss = Sum([loss, Dice(ignore_class=ignored)])
    accuracy = "accuracy" if ignored is None else PixelAccuracy(ignore_class=ignored)
    metrics = [accuracy, MeanIoU(asked, ignore_class=ignored)]
    return Task((*data.images.image_size, asked), loss, metrics)


def _checked_counts(masks: Blobs | np.ndarray, num_outputs: int, ignored: int | None) -> np.ndarray:
    """Returns the number of pixels of each class in some masks, [num_outputs].

    Raises:
      UserError: a value has no output, so that the loss would silently be NaN.
    """
    counts = np.zeros(256, np.int64)
    for index in np.unique(np.linspace(0, len(masks) - 1, NUM_MASKS).astype(int)).tolist():
        name, own = f"mask {index}", np.zeros(256, np.int64)
        if not isinstance(masks, Blobs):
            own = np.bincount(masks[index].ravel(), minlength=256)
        else:
            name = f"the mask {masks.name(index)}"
            with contextlib.suppress(*UNREADABLE):  # the loader reports it, or skips it
                own = np.array(histogram(masks, index))
        if ignored is not None:
            own[ignored] = 0
        largest = max(np.flatnonzero(own), default=0)
        if largest >= num_outputs:
            fixes = [
                f"use --config.model.num_outputs={largest + 1} or more",
                f"number the classes of the masks from 0 to {num_outputs - 1}",
            ]
            # 255 is Pascal VOC's and Cityscapes' value of pixels without a class.
            ignores = f"if such pixels have no class, use --config.data.ignore_class={largest}"
            fixes.insert(0 if largest == 255 else 2, ignores)
            raise UserError(
                f"{name} has the value {largest}, but num_outputs={num_outputs} allows 0 to "
                f"{num_outputs - 1}; {', or '.join(fixes)}"
            )
        counts += own
    return counts[:num_outputs]


def _balanced(counts: np.ndarray, of: str) -> tuple[float, ...]:
    """Returns weights of classes whose mean over the examples is 1; the log says the extremes.

    A class that was not seen has the weight of the rarest one.
    """
    seen = counts > 0
    weights = counts.sum() / (seen.sum() * np.maximum(counts, 1))
    weights[~seen] = weights[seen].max(initial=1.0)
    summary(
        "loss: class_weights=balanced: %.3g for the most frequent class to %.3g for the rarest, "
        "from %s",
        weights.min(),
        weights.max(),
        of,
    )
    return tuple(weights.tolist())


def _cross_entropy_of(
    train: TrainConfig, weights: tuple[float, ...] | None, **others
) -> keras.losses.Loss:
    gamma = train.focal_gamma if "focal" in train.loss else 0.0
    return Crossentropy(gamma=gamma, class_weights=weights, **others)


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
