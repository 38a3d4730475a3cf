"""TensorBoard's event files, for its runs "train" and "validation".

Takes records; gives the tags of Keras's own callback, so the charts are the same: epoch_loss in
both runs, which share a chart, and batch_loss in "train". The x axis of every chart is the step,
counted across epochs.

    TensorBoard(workdir / "tensorboard")    # tensorboard --logdir runs

When a run resumes, the events of later steps are removed from the files, because they are written
again. An event that tells TensorBoard to forget them would not be enough: the faster of its two
readers (2.21, 2026-11-21), which is the default, ignores such events and keeps the old points up to
the first new one. If TensorBoard runs while a run is resumed, it has the old files open, and may
show the old points until it is restarted.
"""

import functools
import pathlib
import typing

from tfaccel.training.logs import Record, Writer

if typing.TYPE_CHECKING:
    from tfaccel.training.logs.event_files import EventFiles


class TensorBoard(Writer):
    """Writes two folders of event files."""

    def __init__(self, folder: pathlib.Path):
        """Takes the folder for both runs."""
        self.name, self._folder = folder.name, folder

    def resume_at(self, *, step: int, epoch: int) -> None:
        """Removes the later events from the files."""
        for run in self._runs:
            run.resume_at(step=step, epoch=epoch)

    def steps(self, record: Record) -> None:
        """Writes to "train"."""
        self._runs[0].write(record, "batch_", record)

    def epoch(self, record: Record) -> None:
        """Writes the validation's values to "validation", and all other values to "train"."""
        train = {name: value for name, value in record.items() if not name.startswith("val_")}
        tested = {name: record[f"val_{name}"] for name in train if f"val_{name}" in record}
        self._runs[0].write(record, "epoch_", train)
        if tested:
            self._runs[1].write(record, "epoch_", tested)

    def close(self) -> None:
        """Closes the files."""
        for run in self.__dict__.get("_runs", ()):  # they may not have been needed
            run.close()

    @functools.cached_property
    def _runs(self) -> "tuple[EventFiles, EventFiles]":
        """The runs "train" and "validation", once there is something to write."""
        from tfaccel.training.logs.event_files import EventFiles  # 0.2 s, of no use to the start

        return EventFiles(self._folder / "train"), EventFiles(self._folder / "validation")
