"""Images per second of training, in the logs, so that bar, History and every logger show it."""

import time
from collections.abc import Callable

import keras


class Throughput(keras.callbacks.Callback):
    """Adds `images_per_second`, over all replicas, to the logs of each training batch and epoch.

    The time is that of the steps alone, without validation and without the first step of a `fit`,
    which compiles. Keras reads every batch's metrics, so its work is done when the batch ends.
    """

    def __init__(
        self,
        *,
        global_batch_size: int,
        num_examples: int | None,
        clock: Callable[[], float] = time.perf_counter,
    ):
        """Takes the loader's numbers.

        Args:
          global_batch_size: images per step over all replicas.
          num_examples: images per epoch, of which a partial last batch counts as what it is; None
            for endless data.
          clock: seconds, monotonic.
        """
        super().__init__()
        self._global_batch_size, self._num_examples = global_batch_size, num_examples
        self._clock = clock
        self._epochs = []  # (images, seconds) of each

    def on_train_begin(self, logs=None):
        """Starts anew: every `fit` traces and compiles."""
        self._epochs = []

    @property
    def images_per_second(self) -> float:
        """The mean over the epochs after the first, in which a partial batch compiles too.

        The first epoch's own where there is no other; 0 where nothing was timed.
        """
        return _rate(self._epochs[1:] or self._epochs)

    def on_epoch_begin(self, epoch, logs=None):
        """Starts the clock anew: what lies between epochs is not training."""
        self._epochs.append((0, 0.0))
        self._seen, self._last = 0, self._clock()

    def on_train_batch_end(self, batch, logs=None):
        """Counts the batches up to number `batch`: several with `steps_per_execution`."""
        seen = (batch + 1) * self._global_batch_size
        if self._num_examples is not None:
            seen = min(seen, self._num_examples)
        now = self._clock()
        compiles = len(self._epochs) == 1 and self._seen == 0
        if not compiles:
            images, seconds = self._epochs[-1]
            self._epochs[-1] = (images + seen - self._seen, seconds + now - self._last)
        self._seen, self._last = seen, now
        self._log(logs)

    def on_epoch_end(self, epoch, logs=None):
        """Adds the epoch's mean to its logs."""
        self._log(logs)

    def _log(self, logs):
        if logs is not None:
            logs["images_per_second"] = _rate(self._epochs[-1:])


def _rate(epochs: list[tuple[int, float]]) -> float:
    images = sum(each for each, _ in epochs)
    seconds = sum(each for _, each in epochs)
    return images / seconds if seconds else 0.0
