"""Draws the page of a script's `fit`. `Run.report` makes this callback.

Takes a folder, and the training images to show; gives metrics.jsonl, a line for each epoch, and at
the end report.html with the curves of all epochs: see tfaccel/training/page/.

    model.fit(train, epochs=3, callbacks=[checkpoints, run.report("runs/photos", train)])

It does nothing at a batch's end, so `fit` need not wait for each execution's results.
"""

import contextlib
import logging
import pathlib
import time
from collections.abc import Callable, Sequence

import keras

from tfaccel.common.disk_errors import not_written
from tfaccel.common.errors import UserError
from tfaccel.data.distribute import Loader
from tfaccel.data.images import ImageData
from tfaccel.process import waits
from tfaccel.runtime.devices import Device
from tfaccel.runtime.gpu_usage import GpuUsage
from tfaccel.training.callbacks.logs import Paced, gpu_fields, record_of_epoch
from tfaccel.training.logs import json_lines
from tfaccel.training.logs.first_batch import FirstBatch
from tfaccel.training.page.page import FILE, try_to_write

log = logging.getLogger("tfaccel")


class Reporting(keras.callbacks.Callback):
    """Writes the epochs of a `fit`, and its page. A `fit` that resumes adds to the same page."""

    def __init__(
        self,
        folder: pathlib.Path,
        train: Loader | None,
        *,
        devices: Sequence[Device],
        is_chief: bool,
        clock: Callable[[], float] = time.perf_counter,
    ):
        """Writes nothing yet. For the folder and the loader, see `Run.report`."""
        super().__init__()
        self._folder, self._is_chief, self._clock = folder, is_chief, clock
        self._gpus = GpuUsage(devices)
        lines = json_lines.JsonLines(folder / "metrics.jsonl")
        has_images = train is not None and isinstance(train.data, ImageData)
        sheets = [FirstBatch(folder / "first_batch.png", train)] if is_chief and has_images else []
        self._writers = [Paced(each, 1) for each in (lines, *sheets)]

    def get_state(self) -> dict:
        """Returns nothing, because the folder has the state."""
        return {}

    def set_state(self, state: dict) -> None:
        """Ignores the state: see `get_state`."""

    def on_train_begin(self, logs=None):
        """Makes the folder.

        Raises:
          UserError: it cannot be made.
        """
        self._start, self._begins = self._clock(), True
        if self._is_chief:
            try:
                self._folder.mkdir(parents=True, exist_ok=True)
                (self._folder / FILE).unlink(missing_ok=True)
            except OSError as error:
                raise UserError(
                    f"{self._folder} {not_written(error, self._folder)}, or give another folder"
                ) from error

    def on_epoch_begin(self, epoch, logs=None):
        """Drops the epochs that a resumed `fit` trains again."""
        if self._begins and epoch and self._is_chief:
            for each in self._writers:
                each.call("resume_at", step=0, epoch=epoch)
            self._start = self._clock() - self._seconds_before()
        self._begins = False

    def on_epoch_end(self, epoch, logs=None):
        """Writes the epoch's record, and after the first one the first images."""
        if not self._is_chief:
            return
        record = record_of_epoch(self, epoch, logs, seconds=self._clock() - self._start)
        record |= gpu_fields([self._gpus.read()])
        for each in self._writers[1:]:
            each.call("steps", record)
        self._writers[0].call("epoch", record)

    def on_train_end(self, logs=None):
        """Draws the page."""
        if self._is_chief:
            for each in self._writers:
                each.call("close")
            with waits.on("drawing the run's page"):
                try_to_write(self._folder)

    def _seconds_before(self) -> float:
        """Returns the seconds of the epochs before a resume; 0 if they are not known."""
        with contextlib.suppress(OSError):
            records = json_lines.read(self._folder / "metrics.jsonl")
            return max((each.get("seconds", 0.0) for each in records), default=0.0)
        return 0.0
