"""Adds images per second of training to the logs, so that History and every logger show it.

Takes the loader; gives `images_per_second` in the logs, and the times that were measured.

    throughput = tfaccel.Throughput(loader)
    history = model.fit(loader, callbacks=[throughput]).history
    history["images_per_second"], throughput.epoch.waited_s
"""

import dataclasses
import time
from collections.abc import Callable

import keras

from tfaccel.data.distribute import Loader


@dataclasses.dataclass(frozen=True)
class Timed:
    """A stretch of training.

    Attributes:
      images: trained on, over all replicas.
      seconds: how long it took.
      waited_s: the part of these seconds in which the steps waited for their batches.
    """

    images: int = 0
    seconds: float = 0.0
    waited_s: float = 0.0

    def __add__(self, other: "Timed") -> "Timed":
        """Returns the sum of two stretches."""
        pairs = zip(dataclasses.astuple(self), dataclasses.astuple(other), strict=True)
        return Timed(*map(sum, pairs))

    def __sub__(self, other: "Timed") -> "Timed":
        """Returns this without its beginning."""
        return self + Timed(-other.images, -other.seconds, -other.waited_s)

    @property
    def images_per_second(self) -> float:
        """The rate; 0 if nothing was timed."""
        return self.images / self.seconds if self.seconds > 0 else 0.0


class Throughput(keras.callbacks.Callback):
    """Adds `images_per_second`, over all replicas, to the logs of each training batch and epoch.

    Only the steps are timed: not validation, and not the first execution of a `fit`, which
    compiles. Keras reads every batch's metrics, so a batch's work is done when the batch ends.

    Attributes:
      epoch: what was timed of the current epoch so far.
      steady: the same without the first execution of each length, because it may compile. (An
        epoch's last execution may be shorter.) The rest of the run has this speed.
      first_execution_s: seconds of the very first execution, which compiles; 0 before it.
    """

    def __init__(self, loader: Loader, *, clock: Callable[[], float] = time.perf_counter):
        """Takes the training data of `fit`, and a monotonic clock, in seconds."""
        super().__init__()
        self._loader, self._clock = loader, clock
        self.epoch = self.steady = Timed()
        self.first_execution_s = 0.0
        self._epochs = []  # the epochs that are over

    def get_state(self) -> dict:
        """Returns nothing, because another process's times say nothing about this one's speed."""
        return {}

    def set_state(self, state: dict) -> None:
        """Ignores the state: see `get_state`."""

    def on_train_begin(self, logs=None):
        """Forgets the previous `fit`, because every `fit` traces and compiles."""
        self._epochs = []
        self._has_compiled = False
        self._compiled = set()  # lengths of executions, in steps

    @property
    def images_per_second(self) -> float:
        """The mean over all epochs but the first, in which a partial batch compiles, too.

        If there is only one epoch, the mean over that epoch; 0 if nothing was timed.
        """
        return sum(self._epochs[1:] or self._epochs, Timed()).images_per_second

    def on_epoch_begin(self, epoch, logs=None):
        """Restarts the clock, because the time between two epochs is not training."""
        self.epoch = self.steady = Timed()
        self._position = self._loader.next_position
        self._last = self._now(self._position)

    def on_train_batch_end(self, batch, logs=None):
        """Counts the images and the time of this execution."""
        position = self._loader.position
        now, length = self._now(position), position - self._position
        if length in self._compiled:
            self.steady += now - self._last
        if self._has_compiled:
            self.epoch += now - self._last
        elif not self.first_execution_s:  # it is set if this `fit` continues after a rollback
            self.first_execution_s = (now - self._last).seconds
        self._has_compiled = True
        self._compiled.add(length)
        self._last, self._position = now, position
        self._log(logs)

    def on_epoch_end(self, epoch, logs=None):
        """Adds the epoch's mean to its logs."""
        self._epochs.append(self.epoch)
        self._log(logs)

    def _now(self, position: int) -> Timed:
        images = images_until(self._loader, position)
        return Timed(images, self._clock(), self._loader.waited_s)

    def _log(self, logs):
        # After a resume at an epoch's end no step is timed, and the logs have the rate from before.
        if logs is not None and (self.epoch.seconds or "images_per_second" not in logs):
            logs["images_per_second"] = self.epoch.images_per_second


def images_until(loader: Loader, position: int) -> int:
    """Returns the number of images in the first `position` steps, counted across epochs.

    A partial last batch of an epoch counts only the images that it has.
    """
    epochs, steps = divmod(position, loader.num_batches)
    return epochs * _images_in(loader, loader.num_batches) + _images_in(loader, steps)


def _images_in(loader: Loader, num_steps: int) -> int:
    images = num_steps * loader.global_batch_size
    return images if loader.num_examples is None else min(images, loader.num_examples)
