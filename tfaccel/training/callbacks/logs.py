"""Makes a run's records from Keras's logs, the optimizer, the loader and the GPUs.

Takes the writers and the sources of the numbers; gives each writer records. A writer gets one at
its interval of steps or seconds within an epoch, and one after each epoch. Their fields are listed
in tfaccel/training/logs/__init__.py.

    throughput = Throughput(train)
    logs = Logs(make_writers(workdir, ...), loader=train, throughput=throughput, gpus=...)
    with contextlib.closing(logs):
        model.fit(train, epochs=90, callbacks=[throughput, logs], verbose=0)

`Logs` follows the callbacks that add to Keras's logs, and precedes the checkpoints, so every step
of a checkpoint is in the log. When a run resumes, the writers drop the records of later steps,
because those steps are trained and written again.
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
from tfaccel.step.loss_scale import is_skipped
from tfaccel.training.callbacks.throughput import Throughput, Timed, images_until
from tfaccel.training.logs import Record, Writer

log = logging.getLogger("tfaccel")


class Logs(keras.callbacks.Callback):
    """Makes the records and gives them to the writers. A writer's failure does not end training."""

    def __init__(
        self,
        writers: Sequence[Writer],
        *,
        loader: Loader,
        throughput: Throughput,
        gpus: GpuUsage,
        epochs_later: int = 0,
        every_steps: int = 50,
        clock: Callable[[], float] = time.perf_counter,
    ):
        """Writes nothing yet.

        Args:
          writers: on the chief; empty on other workers, which then do nothing.
          loader: the training data of `fit`.
          throughput: a callback of the same `fit`, before this one.
          gpus: of this process.
          epochs_later: epochs of the run that another `fit` trains after this one.
          every_steps: steps between two records of an epoch, for writers without `every_s`.
          clock: seconds, monotonic.
        """
        super().__init__()
        self._writers = [Paced(each, every_steps) for each in writers]
        self._loader, self._throughput, self._gpus = loader, throughput, gpus
        self._epochs_later = epochs_later
        self._clock, self._start = clock, clock()
        self._after_steps_s = 0.0  # how long validation took in the previous epoch
        self._validations = _ValidationTimer(clock)

    # The state for a checkpoint.

    @property
    def seconds(self) -> float:
        """Seconds since the run began, including the time before a resume."""
        return self._clock() - self._start

    def get_state(self) -> dict:
        """Returns how long the run has taken."""
        return {"seconds": self.seconds}

    def set_state(self, state: dict) -> None:
        """Continues the time of the checkpoint. After a rollback, this process's own time stays."""
        self._start = min(self._start, self._clock() - state["seconds"])

    # Keras's events.

    def on_train_begin(self, logs=None):
        """Forgets the previous `fit`."""
        self._begins = True
        self._validations.begin()

    def on_epoch_begin(self, epoch, logs=None):
        """Notes where the epoch begins. In a resumed run, tells the writers."""
        position, num_steps = self._loader.next_position, self._loader.num_batches
        # A run may resume after the last step of an epoch, with only its validation left.
        steps_are_done = self._loader.begins_late and position % num_steps == 0
        self._epoch = position // num_steps + (0 if steps_are_done else 1)
        self._epochs_after = self.params["epochs"] - epoch - 1 + self._epochs_later
        self._position, self._steps_ended = position, None
        self._usages = []
        for each in self._writers:
            if self._begins and position:
                each.call("resume_at", step=position, epoch=self._epoch - 1)
            each.begin_epoch(position)
        self._begins = False

    def on_train_batch_end(self, batch, logs=None):
        """Gives a record to each writer that is due for one."""
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
        record |= gpu_fields(self._usages[-1:])
        for each in due:
            each.call("steps", _with_rates(record, timed - each.timed))
            each.note(self._position, seconds, timed)

    def on_test_batch_begin(self, batch, logs=None):
        """Notes when an execution of the validation begins."""
        self._validations.begin_execution()

    def on_test_end(self, logs=None):
        """Notes when the validation ends."""
        self._validations.end()

    def on_epoch_end(self, epoch, logs=None):
        """Gives all writers the epoch's record, if the epoch is complete."""
        if not self._writers or self._position % self._loader.num_batches:
            return
        if self._steps_ended is not None:
            self._after_steps_s = self.seconds - self._steps_ended - self._validations.compiling_s
        record = self._record(logs, num_validations=self._epochs_after)
        record |= gpu_fields(self._usages)
        for each in self._writers:
            each.call("epoch", _with_rates(record, self._throughput.epoch))

    def close(self) -> None:
        """Closes the writers."""
        for each in self._writers:
            each.call("close")

    def _record(self, logs: dict | None, *, num_validations: int) -> Record:
        """Returns the fields that all writers' records share, with `num_validations` left to do."""
        own = {
            "step": self._position,
            "epoch": self._epoch,
            "seconds": round(self.seconds, 3),
            "images": images_until(self._loader, self._position),
        }
        given = {name: float(value) for name, value in (logs or {}).items()}
        for name in filter(is_skipped, given):
            given[name] = int(given[name])
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


class _ValidationTimer:
    """Measures how long the validation of an epoch took to compile.

    Only the first validation of a `fit` compiles: in its first execution and, if the last execution
    is shorter than the others, in that one, too. The other executions tell how long these two would
    take without compilation.

    Attributes:
      compiling_s: seconds that the newest validation compiled; 0 for all but the first.
    """

    def __init__(self, clock: Callable[[], float]):
        self._clock = clock
        self.begin()

    def begin(self) -> None:
        self.compiling_s, self._is_first, self._begun = 0.0, True, []

    def begin_execution(self) -> None:
        if self._is_first:
            self._begun.append(self._clock())

    def end(self) -> None:
        if not self._is_first:
            self.compiling_s = 0.0
        elif self._begun:
            self._is_first = False
            times = [*self._begun, self._clock()]
            taken = [after - before for before, after in itertools.pairwise(times)]
            usual = statistics.median(taken[1:-1] or taken[1:] or [0.0])
            ends = {0, len(taken) - 1}
            self.compiling_s = sum(max(0.0, taken[index] - usual) for index in ends)


class Paced:
    """A writer, and the place of its last record.

    Attributes:
      timed: what was timed of the epoch, up to the last record.
    """

    def __init__(self, writer: Writer, every_steps: int):
        """Takes a writer, and the steps between two records if the writer has no `every_s`."""
        self._writer, self._every_steps = writer, every_steps
        self._last_step, self._last_s = 0, -math.inf
        self._has_failed = False
        self.timed = Timed()

    def begin_epoch(self, step: int) -> None:
        """Forgets what was timed of the previous epoch; `step` is the last one before this."""
        self._last_step, self.timed = step, Timed()

    def is_due(self, step: int, seconds: float) -> bool:
        """Returns whether the writer gets a record of this step."""
        if self._writer.every_s is None:
            return step - self._last_step >= self._every_steps
        if self._last_s == -math.inf and not self._writer.has_first_step:
            self._last_s = seconds
        return seconds - self._last_s >= self._writer.every_s

    def note(self, step: int, seconds: float, timed: Timed) -> None:
        """Notes the place of the record that was just written."""
        self._last_step, self._last_s, self.timed = step, seconds, timed

    def call(self, method: str, *args, **kwargs) -> None:
        """Calls a method of the writer. Its first failure is logged."""
        try:
            getattr(self._writer, method)(*args, **kwargs)
        except OSError as error:
            if not self._has_failed:
                log.warning(
                    "logs: %s cannot be written (%s); training continues, and tries again at "
                    "the next record",
                    *(self._writer.name, error.strerror or error),
                )
            self._has_failed = True


def record_of_epoch(
    callback: keras.callbacks.Callback, epoch: int, logs: dict | None, *, seconds: float
) -> Record:
    """Returns the record of an epoch of any `fit`, from what Keras gives to `on_epoch_end`.

    Args:
      callback: of this `fit`.
      epoch: Keras's number of the epoch, from 0.
      logs: Keras's.
      seconds: since the training began.
    """
    record = {
        "step": (epoch + 1) * (callback.params.get("steps") or 1),
        "epoch": epoch + 1,
        "seconds": round(seconds, 3),
    }
    if getattr(callback.model, "optimizer", None) is not None:
        record["learning_rate"] = learning_rate_of(callback.model.optimizer)
    return record | {name: float(each) for name, each in (logs or {}).items() if each is not None}


def learning_rate_of(optimizer) -> float:
    """Returns the learning rate of the last step."""
    optimizer = getattr(optimizer, "inner_optimizer", optimizer)  # a LossScaleOptimizer has one
    schedule = schedule_of(optimizer)
    if isinstance(schedule, keras.optimizers.schedules.LearningRateSchedule):
        taken = int(keras.ops.convert_to_numpy(optimizer.iterations))
        rate = schedule(max(taken - 1, 0))
    else:
        rate = optimizer.learning_rate
    # By way of its text, a float32 is 0.1 and not 0.10000000149.
    return float(str(keras.ops.convert_to_numpy(rate)))


def _with_rates(record: Record, timed: Timed) -> Record:
    """Returns the record with the rates of a stretch of training, if it was timed."""
    if timed.seconds <= 0:
        return record
    return record | {
        "images_per_second": round(timed.images_per_second, 2),
        "input_wait": round(min(timed.waited_s / timed.seconds, 1.0), 4),
    }


def gpu_fields(usages: list[tuple]) -> Record:
    """Returns each GPU's largest memory and mean utilisation over several readings."""
    record = {}
    for index, readings in enumerate(zip(*usages, strict=False)):
        record[f"gpu{index}_memory_mib"] = max(each.memory_mib for each in readings)
        mean = sum(each.utilisation for each in readings) / len(readings)
        record[f"gpu{index}_utilisation"] = round(mean, 4)
    return record
