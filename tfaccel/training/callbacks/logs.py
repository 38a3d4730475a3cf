"""The records of a run, from Keras's logs, the optimizer, the loader and the GPUs, to its writers.

Takes the writers and where the numbers come from; gives each writer a record within epochs, every
so many steps or seconds, and one after each epoch: tfaccel/training/logs/__init__.py says what is
in it.

    throughput = Throughput(train)
    logs = Logs(make_writers(workdir, ...), loader=train, throughput=throughput, gpus=...)
    with contextlib.closing(logs):
        model.fit(train, epochs=90, callbacks=[throughput, logs], verbose=0)

It comes after the callbacks that add to Keras's logs, and before those that save checkpoints: what
a checkpoint has, the log has too, and where a resume begins the writers drop what is written again.
"""

import itertools
import logging
import math
import statistics
import time
from collections.abc import Callable, Sequence

import keras

from tfaccel.data.distribute import Loader
from tfaccel.keras_internals.optimizers import schedule_of
from tfaccel.runtime.gpu_usage import GpuUsage
from tfaccel.training.callbacks.throughput import Throughput, Timed, images_until
from tfaccel.training.logs import Record, Writer

log = logging.getLogger("tfaccel")


class Logs(keras.callbacks.Callback):
    """Makes the records and hands them to the writers, whose failures do not end training."""

    def __init__(
        self,
        writers: Sequence[Writer],
        *,
        loader: Loader,
        throughput: Throughput,
        gpus: GpuUsage,
        every_steps: int = 50,
        clock: Callable[[], float] = time.perf_counter,
    ):
        """Writes nothing yet.

        Args:
          writers: of the chief; none on other workers, where nothing is done.
          loader: that `fit` trains on.
          throughput: a callback of the same `fit`, before this one.
          gpus: of this process.
          every_steps: between two records of an epoch, for writers that go by steps.
          clock: seconds, monotonic.
        """
        super().__init__()
        self._writers = [_Paced(each, every_steps) for each in writers]
        self._loader, self._throughput, self._gpus = loader, throughput, gpus
        self._clock, self._start = clock, clock()
        self._after_steps_s = 0.0  # that validation takes, of the epoch before
        self._tests = _Tests(clock)

    # What a checkpoint keeps.

    @property
    def seconds(self) -> float:
        """Since the run began, what was before a resume included."""
        return self._clock() - self._start

    def get_state(self) -> dict:
        """Returns how long the run has taken."""
        return {"seconds": self.seconds}

    def set_state(self, state: dict) -> None:
        """Goes on from there, or from later, where the same process went back to a checkpoint."""
        self._start = min(self._start, self._clock() - state["seconds"])

    # In `fit`.

    def on_train_begin(self, logs=None):
        """Begins anew: where, the first epoch knows."""
        self._begins = True
        self._tests.begin()

    def on_epoch_begin(self, epoch, logs=None):
        """Notes where the epoch begins, and lets the writers go on from there."""
        position, num_steps = self._loader.next_position, self._loader.num_batches
        # A resume may begin where all steps are done, and only the validation is to come.
        steps_are_done = self._loader.begins_late and position % num_steps == 0
        self._epoch = position // num_steps + (0 if steps_are_done else 1)
        self._epochs_after = self.params["epochs"] - epoch - 1
        self._position, self._steps_ended = position, None
        self._usages = []
        for each in self._writers:
            if self._begins and position:
                each.call("resume_at", step=position, epoch=self._epoch - 1)
            each.begin_epoch(position)
        self._begins = False

    def on_train_batch_end(self, batch, logs=None):
        """Gives a record to the writers whose time it is."""
        if not self._writers:
            return
        self._position, seconds = self._loader.position, self.seconds
        due = [each for each in self._writers if each.is_due(self._position, seconds)]
        ends_epoch = self._position % self._loader.num_batches == 0
        if ends_epoch:
            self._steps_ended = seconds
        if not due and not ends_epoch:
            return
        self._usages.append(self._gpus.read())
        timed = self._throughput.epoch
        record = self._record(logs, num_validations=self._epochs_after + 1)
        record |= _of_gpus(self._usages[-1:])
        for each in due:
            each.call("steps", _with_rates(record, timed - each.timed))
            each.note(self._position, seconds, timed)

    def on_test_batch_begin(self, batch, logs=None):
        """Notes when an execution of the validation begins."""
        self._tests.begin_execution(batch)

    def on_test_end(self, logs=None):
        """Notes that the validation is over."""
        self._tests.end()

    def on_epoch_end(self, epoch, logs=None):
        """Gives all writers the epoch's record, if the epoch is complete."""
        if not self._writers or self._position % self._loader.num_batches:
            return
        if self._steps_ended is not None:
            self._after_steps_s = self.seconds - self._steps_ended - self._tests.compiling_s
        record = self._record(logs, num_validations=self._epochs_after)
        record |= _of_gpus(self._usages)
        for each in self._writers:
            each.call("epoch", _with_rates(record, self._throughput.epoch))

    def close(self) -> None:
        """Closes the writers."""
        for each in self._writers:
            each.call("close")

    def _record(self, logs: dict | None, *, num_validations: int) -> Record:
        """Returns what all writers' records have in common.

        Args:
          logs: Keras's.
          num_validations: that are still to come.
        """
        own = {
            "step": self._position,
            "epoch": self._epoch,
            "seconds": round(self.seconds, 3),
            "images": images_until(self._loader, self._position),
        }
        given = {name: float(value) for name, value in (logs or {}).items()}
        if "skipped_steps" in given:
            given["skipped_steps"] = int(given["skipped_steps"])
        if not given.get("images_per_second"):
            given.pop("images_per_second", None)  # nothing was timed
        eta_s = self._eta_s(num_validations)
        eta = {} if eta_s is None else {"eta_s": round(eta_s, 1)}
        return own | given | eta | {"learning_rate": learning_rate_of(self.model.optimizer)}

    def _eta_s(self, num_validations: int) -> float | None:
        timed = self._throughput
        rate = timed.steady.images_per_second or timed.images_per_second
        if not rate:
            return None
        last = (self._epoch + self._epochs_after) * self._loader.num_batches
        images = images_until(self._loader, last) - images_until(self._loader, self._position)
        return images / rate + num_validations * self._after_steps_s


class _Tests:
    """How long the validation of an epoch took to compile.

    The first one of a `fit` compiles in its first execution and, where that is shorter than the
    others, in its last one. What they would take without it, the others say.

    Attributes:
      compiling_s: seconds of the newest validation; 0 of all but the first.
    """

    def __init__(self, clock: Callable[[], float]):
        self._clock = clock
        self.begin()

    def begin(self) -> None:
        self.compiling_s, self._is_first, self._begun = 0.0, True, []

    def begin_execution(self, batch: int) -> None:
        if self._is_first:
            self._begun.append((batch, self._clock()))

    def end(self) -> None:
        if not self._is_first:
            self.compiling_s = 0.0
        elif self._begun:
            self._is_first = False
            times = [each for _, each in self._begun] + [self._clock()]
            taken = [after - before for before, after in itertools.pairwise(times)]
            others = taken[1:-1] or (taken[1:] if len(taken) > 1 else [0.0])
            usual = statistics.median(others)
            ends = {0, len(taken) - 1}
            self.compiling_s = sum(max(0.0, taken[index] - usual) for index in ends)


class _Paced:
    """A writer, and what it had its last record of.

    Attributes:
      timed: of the epoch, up to the last record.
    """

    def __init__(self, writer: Writer, every_steps: int):
        self._writer, self._every_steps = writer, every_steps
        self._last_step, self._last_s = 0, -math.inf
        self._has_failed = False
        self.timed = Timed()

    def begin_epoch(self, step: int) -> None:
        self._last_step, self.timed = step, Timed()

    def is_due(self, step: int, seconds: float) -> bool:
        if self._writer.every_s is None:
            return step - self._last_step >= self._every_steps
        if self._last_s == -math.inf and not self._writer.has_first_step:
            self._last_s = seconds
        return seconds - self._last_s >= self._writer.every_s

    def note(self, step: int, seconds: float, timed: Timed) -> None:
        self._last_step, self._last_s, self.timed = step, seconds, timed

    def call(self, method: str, *args, **kwargs) -> None:
        """Calls a method of the writer. That it fails is said once."""
        try:
            getattr(self._writer, method)(*args, **kwargs)
        except OSError as error:
            if not self._has_failed:
                log.warning(
                    "logs: %s cannot be written (%s); training goes on, and what comes is tried",
                    self._writer.name,
                    error.strerror or error,
                )
            self._has_failed = True


def learning_rate_of(optimizer) -> float:
    """Returns the rate that the last step was taken with."""
    optimizer = getattr(optimizer, "inner_optimizer", optimizer)  # of a LossScaleOptimizer
    schedule = schedule_of(optimizer)
    if isinstance(schedule, keras.optimizers.schedules.LearningRateSchedule):
        taken = int(keras.ops.convert_to_numpy(optimizer.iterations))
        rate = schedule(max(taken - 1, 0))
    else:
        rate = optimizer.learning_rate
    # Of float32 the digits that it has: 0.1, not 0.10000000149.
    return float(str(keras.ops.convert_to_numpy(rate)))


def _with_rates(record: Record, timed: Timed) -> Record:
    """Returns the record with the rates of a stretch of training, where it was timed."""
    if timed.seconds <= 0:
        return record
    return record | {
        "images_per_second": round(timed.images_per_second, 2),
        "input_wait": round(min(timed.waited_s / timed.seconds, 1.0), 4),
    }


def _of_gpus(usages: list[tuple]) -> Record:
    """Returns each GPU's most memory and mean utilisation of several readings."""
    record = {}
    for index, readings in enumerate(zip(*usages, strict=False)):
        record[f"gpu{index}_memory_mib"] = max(each.memory_mib for each in readings)
        mean = sum(each.utilisation for each in readings) / len(readings)
        record[f"gpu{index}_utilisation"] = round(mean, 4)
    return record
