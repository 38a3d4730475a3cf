"""How the arms that are Keras's `fit` are timed: tfaccel's and its rivals', by the same few lines.

Takes a compiled model and its data; gives an Arm, whose stretches are calls of `fit` in whole
epochs: some that are dropped, then those that are timed, between two waits for the device.

    serve(lambda settings: fit_arm(model, data, settings, ...))

Only hooks of whole epochs, and of a batch's beginning where step times are asked for: one of each
batch's end would have the host wait for every step.
"""

import contextlib
import math
import os
import time
from collections.abc import Mapping

import keras
import numpy as np
import tensorflow as tf

from bench_arms.protocol import Arm
from tfaccel.runtime import devices as runtime

# ImageNet's: its classes, and the mean and deviation of its channels.
NUM_CLASSES = 1000
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
GETTING_AHEAD = 3  # executions of an epoch


def fit_arm(
    model: keras.Model,
    data,
    settings: Mapping,
    *,
    epoch_steps: int,
    images_per_epoch: int,
    speaks: bool = True,
    **fit_args,
) -> Arm:
    """Trains the steps that are dropped, which compiles, and returns the arm.

    Args:
      model: compiled.
      data: for `fit`.
      settings: of the arm: "drop" and "steps", in steps, which are rounded up to whole epochs;
        "step_times", of so many executions; "trace", a folder, where a profile is wanted;
        "started", when its process began.
      epoch_steps: steps of an epoch.
      images_per_epoch: over all replicas; padding does not count.
      speaks: whether this process tells the driver.
      **fit_args: for `fit`.

    Raises:
      ValueError: step times are asked for, of epochs too short to have any.
    """
    wants_steps = settings.get("step_times", False)
    num_dropped = math.ceil(settings["drop"] / epoch_steps)
    each = executions_timed(epoch_steps, model.steps_per_execution) if wants_steps else epoch_steps
    num_timed = math.ceil(settings["steps"] / each)
    first = FirstExecution()
    model.fit(data, epochs=max(1, num_dropped), callbacks=[first], verbose=0, **fit_args)

    def stretch():
        clock = Clock(num_dropped, num_timed)
        callbacks = [clock, times := StepTimes(num_dropped)] if wants_steps else [clock]
        epochs = num_dropped + num_timed
        with traced(settings.get("trace")):
            model.fit(data, epochs=epochs, callbacks=callbacks, verbose=0, **fit_args)
        result = {
            "images_per_second": num_timed * images_per_epoch / clock.seconds,
            "seconds": clock.seconds,
            "timed_steps": num_timed * epoch_steps,
            "peak_memory_mib": peak_memory_mib(),
        }
        return result | ({"step_seconds": times.seconds} if wants_steps else {})

    ready = {
        "settings": {**settings, "epoch_steps": epoch_steps},
        "environment": environment(),
        "seconds_to_first_step": first.ended - settings["started"],
        "peak_memory_mib": peak_memory_mib(),
    }
    return Arm(ready, stretch, speaks)


def executions_timed(epoch_steps: int, steps_per_execution: int) -> int:
    """Returns how many executions of an epoch have a time of their own: see `StepTimes`."""
    number = math.ceil(epoch_steps / steps_per_execution)
    timed = number - GETTING_AHEAD - 1
    if timed < 1:
        raise ValueError(
            f"step_times: an epoch of {number} execution(s) has none to time; have epochs of "
            f"{GETTING_AHEAD + 2} or more, by epoch_steps or steps_per_execution"
        )
    return timed


def traced(folder: str | None):
    """Returns a context that TensorFlow's profiler records in a folder, where there is one.

    A stretch that is recorded is slower. tools/kernel_table.py reads it; its steps are those that
    are dropped and those that are timed.
    """
    return tf.profiler.experimental.Profile(folder) if folder else contextlib.nullcontext()


def random_images(number: int, size: int) -> np.ndarray:
    """Returns [number, size, size, 3] uint8: some hundred images again and again, made quickly."""
    some = np.random.default_rng(0).integers(0, 256, (256, size, size, 3), dtype=np.uint8)
    return np.resize(some, (number, size, size, 3))


def gathered_whole(x: np.ndarray, y: np.ndarray, batch: int) -> tf.data.Dataset:
    """Returns shuffled batches without end, gathered whole: quicker than image by image.

    Args:
      x: all inputs, on the host.
      y: all labels.
      batch: rows of a step.
    """
    with tf.device("/cpu:0"):
        x, y = tf.constant(x), tf.constant(y)
    ids = tf.data.Dataset.range(len(x)).shuffle(len(x)).repeat().batch(batch, drop_remainder=True)
    return ids.map(
        lambda rows: (tf.gather(x, rows), tf.gather(y, rows)),
        num_parallel_calls=tf.data.AUTOTUNE,
    )


def steps_of_epoch(settings: Mapping) -> int:
    """Returns "epoch_steps", or "drop" where it is not given."""
    return settings.get("epoch_steps") or settings["drop"]


def steps_in_execution(settings: Mapping, epoch_steps: int) -> int:
    """Returns "steps_per_execution", of which "epoch" is all steps of one."""
    each = settings["steps_per_execution"]
    return epoch_steps if each == "epoch" else each


class FirstExecution(keras.callbacks.Callback):
    """Notes when the first execution of a fit has ended: `ended`, in seconds since the epoch."""

    ended = None

    def on_train_batch_end(self, batch, logs=None):
        """Waits for the device, once."""
        if self.ended is None:
            wait_for_device(self.model)
            self.ended = time.time()


class Clock(keras.callbacks.Callback):
    """Times the epochs of a fit after those that are dropped: `seconds`."""

    def __init__(self, num_dropped: int, num_timed: int):
        """Takes the epochs of either kind."""
        super().__init__()
        self._first, self._last = num_dropped, num_dropped + num_timed - 1
        self.seconds = None

    def on_epoch_begin(self, epoch, logs=None):
        """Starts the clock when the device has nothing left to do."""
        if epoch == self._first:
            wait_for_device(self.model)
            self._began = time.perf_counter()

    def on_epoch_end(self, epoch, logs=None):
        """Stops it, likewise."""
        if epoch == self._last:
            wait_for_device(self.model)
            self.seconds = time.perf_counter() - self._began


class StepTimes(keras.callbacks.Callback):
    """Times each execution after the epochs that are dropped: `seconds`, of each.

    From the beginning of one to that of the next, for which nobody waits: where `fit` is ahead of
    the device, an execution begins as soon as the one two before it has ended. The first of an
    epoch, by which it gets ahead, are not counted, and what lies between epochs is of no execution.
    """

    def __init__(self, num_dropped: int):
        """Takes the epochs that are dropped."""
        super().__init__()
        self._first, self.seconds = num_dropped, []

    def on_epoch_begin(self, epoch, logs=None):
        """Begins anew."""
        self._begun = []

    def on_train_batch_begin(self, batch, logs=None):
        """Notes when."""
        self._begun.append(time.perf_counter())

    def on_epoch_end(self, epoch, logs=None):
        """Adds those of the epoch."""
        if epoch >= self._first:
            self.seconds += np.diff(self._begun[GETTING_AHEAD:]).tolist()


def wait_for_device(model: keras.Model) -> None:
    """Returns when all steps are done: their count, which each adds to, can then be read."""
    keras.ops.convert_to_numpy(model.optimizer.iterations)


def peak_memory_mib() -> float | None:
    """Returns the most that this process's tensors took on one of its GPUs; None on the CPU."""
    # Under a launcher the logical devices are also those of other workers, and their names are of
    # a job, which get_memory_info does not know: so this process's own are counted, by number.
    num_gpus = len(tf.config.get_visible_devices("GPU"))
    peaks = [
        tf.config.experimental.get_memory_info(f"GPU:{index}")["peak"] for index in range(num_gpus)
    ]
    return max(peaks) / 2**20 if peaks else None


def environment() -> dict:
    """Returns versions, hardware, and the flags that XLA and CUDA were given."""
    names = ("XLA_FLAGS", "TF_XLA_FLAGS", runtime.QUEUES)
    flags = {name: os.environ.get(name) for name in names}
    return runtime.describe_environment() | flags


def start_keras_alone(precision: str) -> None:
    """Prepares the process of a rival, by Keras and TensorFlow alone, as their users would.

    TF32 is on, which is TensorFlow's default. GPU memory grows, as several arms share a GPU.
    """
    runtime.load_cuda_libraries()
    for gpu in tf.config.list_physical_devices("GPU"):
        tf.config.experimental.set_memory_growth(gpu, True)
    keras.config.set_dtype_policy(precision)
    keras.utils.set_random_seed(0)
