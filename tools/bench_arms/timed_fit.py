"""Times the arms that use Keras's `fit`, tfaccel's and the rivals', in the same way.

This module takes a compiled model and its data, and gives an Arm. A stretch of the Arm is one call
of `fit` for whole epochs: first some untimed epochs, then the timed epochs. It waits for the device
before and after the timed epochs.

    serve(lambda settings: fit_arm(model, data, settings, ...))

The callbacks have hooks for epochs, and for the start of a batch if step times are wanted. They
have no hook for the end of a batch, because the host would then wait for every step.
"""

import contextlib
import itertools
import math
import os
import time
from collections.abc import Mapping

import keras
import numpy as np
import tensorflow as tf

from bench_arms.protocol import Arm
from tfaccel.runtime import devices as runtime

# The number of classes of ImageNet, and the mean and standard deviation of its channels.
NUM_CLASSES = 1000
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
NO_END = 10**6  # epochs, of which a callback ends the last one
GETTING_AHEAD = 3  # the first executions of an epoch, in which the host gets ahead of the device


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
    """Trains the untimed steps, which compiles the model, and returns the arm.

    Args:
      model: a compiled model.
      data: the data for `fit`.
      settings: the settings of the arm. "drop" and "steps" are the untimed and the timed steps,
        rounded up to whole epochs. "step_times" asks for the times of "steps" executions. "trace"
        is a folder for a profile of each stretch. With "trace_after" only the stretch of that
        number, from 0, is profiled, and it is one epoch. "started" is the time at which the
        process started. With "first_steps" the arm has no stretches: see `start_arm`.
      epoch_steps: steps of an epoch.
      images_per_epoch: images of an epoch over all replicas, without padding rows.
      speaks: True if this process answers the driver.
      **fit_args: further arguments for `fit`.

    Raises:
      ValueError: step times are wanted, but the epochs are too short.
    """
    if settings.get("first_steps"):
        return start_arm(model, data, settings, speaks=speaks, **fit_args)
    wants_steps = settings.get("step_times", False)
    num_dropped = math.ceil(settings["drop"] / epoch_steps)
    each = executions_timed(epoch_steps, model.steps_per_execution) if wants_steps else epoch_steps
    num_timed = math.ceil(settings["steps"] / each)
    first = FirstExecution()
    model.fit(data, epochs=max(1, num_dropped), callbacks=[first], verbose=0, **fit_args)

    numbers, traced_one = itertools.count(), settings.get("trace_after")

    def stretch():
        is_traced = next(numbers) == traced_one
        dropped, timed = (0, 1) if is_traced else (num_dropped, num_timed)
        clock = Clock(dropped, timed)
        callbacks = [clock, times := StepTimes(dropped)] if wants_steps else [clock]
        with traced(settings.get("trace") if is_traced or traced_one is None else None):
            model.fit(data, epochs=dropped + timed, callbacks=callbacks, verbose=0, **fit_args)
        result = {
            "images_per_second": timed * images_per_epoch / clock.seconds,
            "seconds": clock.seconds,
            "timed_steps": timed * epoch_steps,
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


def start_arm(
    model: keras.Model, data, settings: Mapping, *, speaks: bool = True, **fit_args
) -> Arm:
    """Trains the setting "first_steps", and more until XLA's step is used; returns their times.

    `Arm.ready` has `marks`: numbers of steps that were done, and the seconds since "started".
    """
    marks = Marks(settings)
    model.fit(data, epochs=NO_END, callbacks=[marks], verbose=0, **fit_args)
    ready = {
        "settings": dict(settings),
        "environment": environment(),
        "marks": marks.found,
        "seconds_to_first_step": marks.found[0][1],
        "peak_memory_mib": peak_memory_mib(),
    }
    return Arm(ready, dict, speaks)


def executions_timed(epoch_steps: int, steps_per_execution: int) -> int:
    """Returns the number of executions of an epoch that `StepTimes` can time."""
    number = math.ceil(epoch_steps / steps_per_execution)
    timed = number - GETTING_AHEAD - 1
    if timed < 1:
        raise ValueError(
            f"step_times: an epoch of {number} execution(s) is too short; change epoch_steps or "
            f"steps_per_execution, so that an epoch has at least {GETTING_AHEAD + 2} executions"
        )
    return timed


def traced(folder: str | None):
    """Returns a context in which TensorFlow's profiler writes to a folder; None for no profile.

    Profiling makes a stretch slower. tools/kernel_table.py reads the profile, which contains the
    untimed and the timed steps.
    """
    return tf.profiler.experimental.Profile(folder) if folder else contextlib.nullcontext()


def random_images(number: int, size: int) -> np.ndarray:
    """Returns [number, size, size, 3] uint8: 256 random images repeated, to be quick."""
    some = np.random.default_rng(0).integers(0, 256, (256, size, size, 3), dtype=np.uint8)
    return np.resize(some, (number, size, size, 3))


def gathered_whole(x: np.ndarray, y: np.ndarray, batch: int) -> tf.data.Dataset:
    """Returns endless shuffled batches, each gathered in one operation.

    This is quicker than a pipeline that handles each image.

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
    """Returns the setting "epoch_steps"; by default the setting "drop"."""
    return settings.get("epoch_steps") or settings["drop"]


def steps_in_execution(settings: Mapping, epoch_steps: int) -> int:
    """Returns the setting "steps_per_execution"; "epoch" means all steps of an epoch."""
    each = settings["steps_per_execution"]
    return epoch_steps if each == "epoch" else each


class FirstExecution(keras.callbacks.Callback):
    """Stores in `ended` when the first execution of a fit ended, as the value of time.time()."""

    ended = None

    def on_train_batch_end(self, batch, logs=None):
        """Waits for the device, once."""
        if self.ended is None:
            wait_for_device(self.model)
            self.ended = time.time()


class Marks(keras.callbacks.Callback):
    """Stores in `found` when steps were done: the first execution, and each "steps_of_mark".

    Ends the fit after "first_steps" steps, but not as long as training runs without XLA because XLA
    still compiles its step, and for so many steps after that.
    """

    def __init__(self, settings: Mapping):
        """Takes the settings of the arm."""
        super().__init__()
        self._settings, self._num_steps, self.found = settings, 0, []
        self._last = settings["first_steps"]

    def on_train_batch_end(self, batch, logs=None):
        """Notes the time after some executions, and waits for the device there."""
        self._num_steps += self.model.steps_per_execution
        due = self.found[-1][0] + self._settings["steps_of_mark"] if self.found else 0
        if self._num_steps < due:
            return
        wait_for_device(self.model)
        self.found.append((self._num_steps, time.time() - self._settings["started"]))
        if getattr(self.model.train_function, "is_without_xla_yet", False):
            more = self._settings["first_steps"] // 2
            self._last = max(self._last, self._num_steps + more)
        if self._num_steps >= self._last:
            self.model.stop_training = True


class Clock(keras.callbacks.Callback):
    """Stores in `seconds` the duration of the timed epochs, which follow the untimed ones."""

    def __init__(self, num_dropped: int, num_timed: int):
        """Takes the numbers of untimed and of timed epochs."""
        super().__init__()
        self._first, self._last = num_dropped, num_dropped + num_timed - 1
        self.seconds = None

    def on_epoch_begin(self, epoch, logs=None):
        """Waits until the device has finished its work, and starts the clock."""
        if epoch == self._first:
            wait_for_device(self.model)
            self._began = time.perf_counter()

    def on_epoch_end(self, epoch, logs=None):
        """Waits until the device has finished its work, and stops the clock."""
        if epoch == self._last:
            wait_for_device(self.model)
            self.seconds = time.perf_counter() - self._began


class StepTimes(keras.callbacks.Callback):
    """Stores in `seconds` the time of each execution of the timed epochs.

    The time of an execution goes from its start to the start of the next one, so nothing has to
    wait for the device. This is exact while `fit` is ahead of the device: an execution then starts
    when the one two before it has ended. The first executions of an epoch, in which `fit` gets
    ahead, do not count, and neither does the time between epochs.
    """

    def __init__(self, num_dropped: int):
        """Takes the number of untimed epochs."""
        super().__init__()
        self._first, self.seconds = num_dropped, []

    def on_epoch_begin(self, epoch, logs=None):
        """Forgets the start times of the epoch before."""
        self._begun = []

    def on_train_batch_begin(self, batch, logs=None):
        """Notes the start time of an execution."""
        self._begun.append(time.perf_counter())

    def on_epoch_end(self, epoch, logs=None):
        """Adds the execution times of a timed epoch."""
        if epoch >= self._first:
            self.seconds += np.diff(self._begun[GETTING_AHEAD:]).tolist()


def wait_for_device(model: keras.Model) -> None:
    """Waits until all steps are done: it reads the step counter, which every step increases."""
    keras.ops.convert_to_numpy(model.optimizer.iterations)


def peak_memory_mib() -> float | None:
    """Returns the peak memory of this process's tensors on its fullest GPU; None on the CPU."""
    # Under a launcher, the logical devices include those of other workers. Their names contain a
    # job, which get_memory_info does not know. So the GPUs of this process are named by index.
    num_gpus = len(tf.config.get_visible_devices("GPU"))
    peaks = [
        tf.config.experimental.get_memory_info(f"GPU:{index}")["peak"] for index in range(num_gpus)
    ]
    return max(peaks) / 2**20 if peaks else None


def environment() -> dict:
    """Returns versions, hardware, and the flags of XLA and CUDA."""
    names = ("XLA_FLAGS", "TF_XLA_FLAGS", runtime.QUEUES)
    flags = {name: os.environ.get(name) for name in names}
    return runtime.describe_environment() | flags


def start_keras_alone(precision: str) -> None:
    """Prepares a rival's process with Keras and TensorFlow alone, as their users would.

    TF32 is on, as by default in TensorFlow. GPU memory grows on demand, because several arms share
    a GPU.
    """
    runtime.load_cuda_libraries()
    for gpu in tf.config.list_physical_devices("GPU"):
        tf.config.experimental.set_memory_growth(gpu, True)
    keras.config.set_dtype_policy(precision)
    keras.utils.set_random_seed(0)
