"""Writes TensorFlow's own profile of some steps: every operation on the host and the devices.

trace(model, loader, folder)
# tensorboard --logdir FOLDER; its Profile tab needs the package xprof
"""

import math
import pathlib

import keras
import tensorflow as tf

from tfaccel.common.errors import RunError
from tfaccel.data.distribute import Loader

NUM_STEPS = 10  # at least one execution, which may have more; a longer trace is slow to open
DROPPED = 3  # executions before the trace, until the queues have their usual length


def trace(model: keras.Model, loader: Loader, folder: pathlib.Path) -> None:
    """Trains the model for some steps, and writes a trace of them into the folder.

    Args:
      model: a compiled model. Train it before, or the trace will mostly show the compilation.
      loader: the loader to train on.
      folder: the folder for TensorBoard; it is created if it does not exist.

    Raises:
      RunError: the profiler wrote nothing.
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
        # By now, the step's check for infinite and NaN values has waited for the device.
        self._ended += 1
        if self._ended == DROPPED:
            tf.profiler.experimental.start(str(self._folder))
        elif self._ended == DROPPED + self._executions:
            tf.profiler.experimental.stop()
            self.model.stop_training = True
