"""Times the first steps of `fit`, and ends `fit` when there are enough warm ones.

    times = StepTimes(train, strategy)
    model.fit(train, steps_per_epoch=1, epochs=MOST_EPOCHS, callbacks=[times])
    times.seconds[0], times.step_s       # 5.0, 0.012

An epoch of this `fit` is one execution, of one or several steps. The first execution of each length
may compile, so it is not warm. After the first warm one, the workers agree on the number of further
ones, so that none waits for a step that another leaves out.
"""

import statistics
import time
from collections.abc import Callable

import keras
import tensorflow as tf

from tfaccel.data.distribute import Loader
from tfaccel.runtime.agreement import slowest

MOST_EPOCHS = 10
BUDGET_S = 0.3  # for the warm executions; there is at least one


def most_epochs(num_batches: int, steps_per_execution: int) -> int:
    """Returns how many executions to time at most: no partial one, which would be compiled too.

    A partial one is the last execution of the data's epoch. If it is the second, there must be a
    third, which is warm.
    """
    num_whole, rest = divmod(num_batches, steps_per_execution)
    return min(MOST_EPOCHS, num_whole) if rest and num_whole > 1 else MOST_EPOCHS


class StepTimes(keras.callbacks.Callback):
    """Measures the time of a warm step, without the time that it waits for its batch.

    Attributes:
      seconds: the seconds from the start of `fit` to the end of each epoch.
      num_steps: the number of steps from the start of `fit` to the end of each epoch.
    """

    def __init__(
        self,
        loader: Loader,
        strategy: tf.distribute.Strategy,
        *,
        clock: Callable[[], float] = time.perf_counter,
    ):
        """Takes the data of `fit`, the strategy over all workers, and a monotonic clock in s."""
        super().__init__()
        self._loader, self._strategy, self._clock = loader, strategy, clock
        self.seconds, self.num_steps = [], []
        self._lengths, self._warm, self._num_epochs = set(), [], None

    @property
    def step_s(self) -> float:
        """The median seconds of a warm step on this worker, the sum over all replicas included."""
        return statistics.median(self._warm)

    def on_train_begin(self, logs=None):
        """Starts the clock."""
        self._began = self._now()

    def on_train_batch_begin(self, batch, logs=None):
        """Starts the clock of an execution, which also draws its batches."""
        self._last = self._now()

    def on_train_batch_end(self, batch, logs=None):
        """Adds the time of an execution; tfaccel's own callbacks have waited for its end."""
        now = self._now()
        seconds, waited_s, steps = (new - old for new, old in zip(now, self._last, strict=True))
        if steps in self._lengths:
            self._warm.append((seconds - waited_s) / steps)
        self._lengths.add(steps)

    def on_epoch_end(self, epoch, logs=None):
        """Ends `fit` after the number of epochs that the workers agree on."""
        seconds, _, position = self._now()
        self.seconds.append(seconds - self._began[0])
        self.num_steps.append(position - self._began[2])
        if self._warm and self._num_epochs is None:
            execution_s = slowest(seconds - self._last[0], self._strategy)
            self._num_epochs = epoch + max(1, int(BUDGET_S / execution_s))
        if self._num_epochs is not None and epoch + 1 >= self._num_epochs:
            self.model.stop_training = True

    def _now(self) -> tuple[float, float, int]:
        return self._clock(), self._loader.waited_s, self._loader.position
