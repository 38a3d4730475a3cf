"""TensorBoard's event files: runs "train" and "validation", over steps.

Takes records; gives the tags that Keras's own callback gives, for the same charts: epoch_loss in
both runs, so that they share one, and batch_loss in "train". Everything is over the step, counted
over epochs.

    TensorBoard(workdir / "tensorboard")    # tensorboard --logdir runs

A resume takes out of the files what is written again. Events that tell TensorBoard to forget it
would not do: of its two readers (2.21, 2026-11-21) the faster one, which is the default, knows no
such event, and keeps points up to the first new one. A TensorBoard that runs while a run is resumed
has open what was there, and may show those points until it is started anew.
"""

import io
import pathlib
import struct
import time
from collections.abc import Iterator

from google.protobuf.message import DecodeError
from tensorboard.compat.proto.event_pb2 import Event, SourceMetadata
from tensorboard.plugins.scalar.summary_v2 import scalar_pb
from tensorboard.summary.writer.record_writer import RecordWriter
from tensorboard.util import tensor_util

from tfaccel.common.own_files import replace
from tfaccel.common.regular_file import read_regular
from tfaccel.training.logs import Record, Writer
from tfaccel.training.logs.appended import Appended

NO_CHARTS = ("step", "epoch", "seconds", "images", "eta_s")  # they are the charts' own axes
EPOCH = "epoch"  # the tag by which an event is known for an epoch's
PREFIX, SUFFIX = "events.out.tfevents.", ".tfaccel"  # TensorBoard reads them in order of names


class TensorBoard(Writer):
    """Writes two folders of event files."""

    def __init__(self, folder: pathlib.Path):
        """Takes the folder of both runs."""
        self.name = folder.name
        self._train, self._validation = _Run(folder / "train"), _Run(folder / "validation")

    def resume_at(self, *, step: int, epoch: int) -> None:
        """Takes the later events out of the files."""
        for run in (self._train, self._validation):
            run.resume_at(step=step, epoch=epoch)

    def steps(self, record: Record) -> None:
        """Writes to "train"."""
        self._train.write(record, "batch_", record)

    def epoch(self, record: Record) -> None:
        """Writes what is of validation to "validation", all else to "train"."""
        train = {name: value for name, value in record.items() if not name.startswith("val_")}
        tested = {name: record[f"val_{name}"] for name in train if f"val_{name}" in record}
        self._train.write(record, "epoch_", train)
        if tested:
            self._validation.write(record, "epoch_", tested)

    def close(self) -> None:
        """Closes the files."""
        self._train.close()
        self._validation.close()


class _Run:
    """A folder of event files, to which this process adds one."""

    def __init__(self, folder: pathlib.Path):
        self._folder, self._file = folder, None
        self._begins_anew = True

    def resume_at(self, *, step: int, epoch: int) -> None:
        self.close()
        for path in self._folder.glob(f"{PREFIX}*{SUFFIX}"):
            kept = [
                record
                for record, event in _read(path)
                if event.HasField("file_version") or _stays(event, step=step, epoch=epoch)
            ]
            replace(path, b"".join(kept))
        self._begins_anew = False

    def write(self, record: Record, prefix: str, values: Record) -> None:
        event = Event(step=record["step"], wall_time=time.time())
        for name, value in values.items():
            if name not in NO_CHARTS:
                event.summary.MergeFrom(scalar_pb(prefix + name, value))
        if prefix == "epoch_":
            event.summary.MergeFrom(scalar_pb(EPOCH, record["epoch"]))
        self._append(event)

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def _append(self, event: Event) -> None:
        if self._begins_anew:
            self.resume_at(step=0, epoch=0)
        if self._file is None:
            self._file = _open(self._folder)
        self._file.append(_bytes(event))


def _open(folder: pathlib.Path) -> Appended:
    """Returns a new event file, named after all that are there, even where the clock went back."""
    there = [each.name[len(PREFIX) : -len(SUFFIX)] for each in folder.glob(f"{PREFIX}*{SUFFIX}")]
    newest = max((int(each) for each in there if each.isdigit()), default=0)
    file = Appended(folder / f"{PREFIX}{max(int(time.time()), newest + 1):010d}{SUFFIX}")
    source = SourceMetadata(writer="tfaccel")
    file.append(
        _bytes(Event(file_version="brain.Event:2", wall_time=time.time(), source_metadata=source))
    )
    return file


def _read(path: pathlib.Path) -> Iterator[tuple[bytes, Event]]:
    """Yields each whole record of a file, and its event."""
    data, start = read_regular(path), 0
    while start + 12 <= len(data):
        (size,) = struct.unpack_from("<Q", data, start)  # then 4 bytes of CRC, the event, 4 more
        end = start + 12 + size + 4
        if end > len(data):
            return  # torn by a kill
        try:
            event = Event.FromString(data[start + 12 : end - 4])
        except DecodeError:
            return  # where one is damaged, the next cannot be found
        yield data[start:end], event
        start = end


def _stays(event: Event, *, step: int, epoch: int) -> bool:
    """Returns whether a resume at `step`, after `epoch` complete epochs, keeps an event."""
    for value in event.summary.value:
        if value.tag == EPOCH:
            return float(tensor_util.make_ndarray(value.tensor)) <= epoch
    return event.step <= step


def _bytes(event: Event) -> bytes:
    buffer = io.BytesIO()
    RecordWriter(buffer).write(event.SerializeToString())
    return buffer.getvalue()
