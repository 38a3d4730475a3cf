"""Images per second of training, in the logs, so that bar, History and every logger show it."""

import time
from collections.abc import Callable

import keras


class Throughput(keras.callbacks.Callback):
    """Adds `images_per_second`, over all replicas, to the logs of each training batch and epoch.

    The time is that of the steps alone: validation and the first step of a `fit`, which traces and
    compiles, are left out. Where an epoch has a single step, that step counts from the second epoch
    on. Keras reads every batch's metrics, so a step's work is done when its batch ends.

    Attributes:
      num_images: counted so far, over all epochs.
      seconds: they took.
    """

    def __init__(
        self,
        *,
        global_batch_size: int,
        num_examples: int,
        clock: Callable[[], float] = time.perf_counter,
    ):
        """Takes the loader's numbers.

        Args:
          global_batch_size: images per step over all replicas.
          num_examples: images per epoch; a partial last batch counts as what it is.
          clock: seconds, monotonic.
        """
        super().__init__()
        self._global_batch_size, self._num_examples = global_batch_size, num_examples
        self._clock = clock
        self._compiled = False
        self.num_images, self.seconds = 0, 0.0

    def on_epoch_begin(self, epoch, logs=None):
        """Starts the clock anew: what lies between epochs is not training."""
        self._epoch_images, self._epoch_seconds = 0, 0.0
        self._seen, self._last = 0, self._clock()

    def on_train_batch_end(self, batch, logs=None):
        """Counts the batches up to number `batch`: several with `steps_per_execution`."""
        seen = min((batch + 1) * self._global_batch_size, self._num_examples)
        now = self._clock()
        if self._compiled:
            self._epoch_images += seen - self._seen
            self._epoch_seconds += now - self._last
        self._compiled = True
        self._seen, self._last = seen, now
        self._log(logs)

    def on_epoch_end(self, epoch, logs=None):
        """Adds the epoch's mean to its logs."""
        self.num_images += self._epoch_images
        self.seconds += self._epoch_seconds
        self._log(logs)

    def _log(self, logs):
        if logs is not None:
            rate = self._epoch_images / self._epoch_seconds if self._epoch_seconds else 0.0
            logs["images_per_second"] = rate
