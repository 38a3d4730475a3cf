"""A hint where training goes well and validation guesses: what that may come from, once.

Takes what Keras's logs of an epoch hold already, so that no device is waited for.

    model.fit(train, validation_data=test, callbacks=[NearChance(train, test)])

Batch norm that has seen few updates is the common cause: in training it takes a batch's own
statistics, in validation its moving averages, of which momentum ** updates is still the value from
before training. 48 updates with Keras's momentum of 0.99 leave 62% of it. A network of three
convolutions and four such layers, on 512 images of ten planted classes (Keras 3.15, CPU,
2026-11-27), validated after 48 steps at 0.19 with momentum 0.99 and at 0.82 with 0.9; with each
batch's own statistics at 0.91 both. In training it had 1.00.
"""

import logging
from collections.abc import Iterator

import keras
import numpy as np

from tfaccel.data.distribute import Loader
from tfaccel.keras_internals.layers import layers_of

log = logging.getLogger("tfaccel")

# Keras's, of the likeliest class; a metric of the best few classes has another chance.
NAMES = ("accuracy", "acc", "sparse_categorical_accuracy", "categorical_accuracy")
LEARNT = 0.3  # of the way from chance to 1, from which on training goes well
GUESSED = 0.2  # of training's lead over chance, up to which validation guesses
STILL = 0.1  # part of an average from before training, from which on it may be the cause


class NearChance(keras.callbacks.Callback):
    """Says once, in the log, that validation is near chance while training is not."""

    def __init__(self, train: Loader, test: Loader, *, updates_per_step: int = 1):
        """Has seen nothing yet.

        Args:
          train: what `fit` trains on: its position counts the steps, those before a resume too.
          test: what `fit` validates on.
          updates_per_step: of batch norm's averages: parts of a batch that it sees by turns.
        """
        super().__init__()
        self._train, self._updates_per_step = train, updates_per_step
        self._most_frequent = most_frequent(getattr(test.data.source, "labels", None))
        self._was_near, self._is_told = False, False

    def on_epoch_end(self, epoch, logs=None):
        """Speaks where two epochs in turn are so, or the last one."""
        if self._is_told:
            return
        found = next(self._near(logs or {}), None)
        if found and (self._was_near or epoch + 1 == self.params["epochs"]):
            self._is_told = True
            log.warning("%s. %s", self._said(*found), self._cause())
        self._was_near = bool(found)

    def _near(self, logs: dict) -> Iterator[tuple[str, float, float, float]]:
        """Yields name, training's, validation's and chance, of accuracies near chance."""
        for prefix, num_classes in _outputs(self.model):
            chance = max(1 / num_classes, self._most_frequent)
            for name in (f"{prefix}{each}" for each in NAMES):
                values = logs.get(name), logs.get(f"val_{name}")
                if None not in values and is_near_chance(*map(float, values), chance=chance):
                    yield name, *map(float, values), chance

    def _said(self, name: str, train: float, test: float, chance: float) -> str:
        return (
            f"training: {name} is {train:.2f}, but val_{name} is {test:.2f}, near the "
            f"{chance:.2f} of guessing"
        )

    def _cause(self) -> str:
        steps = self._train.position
        updates = steps * self._updates_per_step
        total = self.params["epochs"] * self._train.num_batches * self._updates_per_step
        optimizer = self.model.optimizer
        if getattr(optimizer, "use_ema", False) and optimizer.ema_momentum**steps > STILL:
            momentum, what = optimizer.ema_momentum, "averaged weights"
            cure = "a smaller ema_momentum, more epochs, or a smaller batch (more steps an epoch)"
            kept = momentum**steps
            begins = "the first step's"
        elif (momentum := batch_norm_momentum(self.model)) and momentum**updates > STILL:
            what = "batch norm, whose moving averages validation uses"
            cure = (
                "BatchNormalization(momentum=0.9), more epochs, or a smaller batch (more steps an "
                "epoch)"
            )
            kept = momentum**updates
            begins = "the value from before training"
        else:
            return (
                "Possible causes: the validation images are prepared in another way (pixel range, "
                "colours, size), their classes are in another order, augmentation makes training "
                f"images unlike them, or the model knows its {self._train.num_examples:,} training "
                "images by heart"
            )
        later = ""
        if momentum**total <= STILL:
            later = f". After all {self.params['epochs']} epochs it will be {momentum**total:.0%}"
        return (
            f"A likely cause is {what}: with momentum={momentum:.6g}, {kept:.0%} of them is still "
            f"{begins} after {steps:,} steps. What helps: {cure}{later}"
        )


def is_near_chance(train: float, test: float, *, chance: float) -> bool:
    """Returns whether an accuracy is far above chance in training, and near it in validation."""
    lead = train - chance
    return lead >= LEARNT * (1 - chance) and test - chance <= min(GUESSED * lead, chance)


def batch_norm_momentum(model: keras.Model) -> float | None:
    """Returns the largest momentum of the batch norm layers that train; None where there is none.

    A frozen layer uses its moving averages in training, too.
    """
    found = [
        each.momentum
        for each in layers_of(model)
        if isinstance(each, keras.layers.BatchNormalization) and each.trainable
    ]
    return max(found, default=None)


def most_frequent(labels: np.ndarray | None) -> float:
    """Returns the share of the most frequent class; 0 where there are no labels."""
    if labels is None or not len(labels):
        return 0.0
    return float(np.bincount(np.asarray(labels)).max() / len(labels))


def _outputs(model: keras.Model) -> Iterator[tuple[str, int]]:
    """Yields for each output what its metrics' names begin with, and its number of classes."""
    names = list(getattr(model, "output_names", None) or ())
    shapes = [tuple(each.shape) for each in getattr(model, "outputs", None) or ()]
    for name, shape in zip(names, shapes, strict=False):
        prefix = f"{name}_" if len(names) > 1 else ""
        yield prefix, max(2, shape[-1] or 2)
