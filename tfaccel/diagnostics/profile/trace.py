"""TensorFlow's own profile of some steady steps: every operation on the host and the devices.

trace(model, loader, folder)
# tensorboard --logdir FOLDER, with the package xprof for its Profile tab
"""

import math
import pathlib

import keras
import tensorflow as tf

from tfaccel.common.errors import RunError
from tfaccel.data.distribute import Loader

NUM_STEPS = 10  # a trace of more is slow to open; an execution may have more
DROPPED = 3  # executions, until queues have their usual length


def trace(model: keras.Model, loader: Loader, folder: pathlib.Path) -> None:
    """Writes a trace of some steps into the folder. Trains the model.

    Args:
      model: compiled; that has been trained before, or its compilation fills the trace.
      loader: that it trains on.
      folder: for TensorBoard; made if it is not there.

    Raises:
      RunError: nothing was written.
    """
    window = _Window(folder, executions=math.ceil(NUM_STEPS / model.steps_per_execution))
    before = set(folder.rglob("*.xplane.pb"))
    model.fit(loader, epochs=10**9, callbacks=[window], verbose=0)
    if not set(folder.rglob("*.xplane.pb")) - before:
        raise RunError(f"TensorFlow's profiler wrote nothing to {folder}")


class _Window(keras.callbacks.Callback):
    """Starts the profiler after some executions, stops it after some more, and ends `fit`."""

    def __init__(self, folder: pathlib.Path, *, executions: int):
        super().__init__()
        self._folder, self._executions, self._ended = folder, executions, 0

    def on_train_batch_end(self, batch, logs=None):
        # The step's own check for what is not finite has waited for the device by now.
        self._ended += 1
        if self._ended == DROPPED:
            tf.profiler.experimental.start(str(self._folder))
        elif self._ended == DROPPED + self._executions:
            tf.profiler.experimental.stop()
            self.model.stop_training = True
