"""TensorBoard's event files: a folder of them, to which a process adds one.

    run = EventFiles(workdir / "tensorboard" / "train")
    run.write({"step": 10, "loss": 0.5}, "batch_", {"loss": 0.5})

This module imports TensorBoard, which takes 0.2 s (2 CPU cores, 2026-11-29).
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
from tfaccel.training.logs import Record
from tfaccel.training.logs.appended import Appended

NO_CHARTS = ("step", "epoch", "seconds", "images", "eta_s")  # fields of a record without a chart
EPOCH = "epoch"  # the tag that only an epoch's event has
PREFIX, SUFFIX = "events.out.tfevents.", ".tfaccel"  # TensorBoard reads files in order of names


class EventFiles:
    """A folder of event files, to which this process adds a file."""

    def __init__(self, folder: pathlib.Path):
        """Takes the folder, which may not exist yet."""
        self._folder, self._file = folder, None
        self._overwrites = True

    def resume_at(self, *, step: int, epoch: int) -> None:
        """Removes the later events from the files."""
        self.close()
        for path in self._folder.glob(f"{PREFIX}*{SUFFIX}"):
            kept = [
                record
                for record, event in _read(path)
                if event.HasField("file_version") or _stays(event, step=step, epoch=epoch)
            ]
            replace(path, b"".join(kept))
        self._overwrites = False

    def write(self, record: Record, prefix: str, values: Record) -> None:
        """Writes values of a record, each with the prefix before its name."""
        event = Event(step=record["step"], wall_time=time.time())
        for name, value in values.items():
            if name not in NO_CHARTS:
                event.summary.MergeFrom(scalar_pb(prefix + name, value))
        if prefix == "epoch_":
            event.summary.MergeFrom(scalar_pb(EPOCH, record["epoch"]))
        self._append(event)

    def close(self) -> None:
        """Closes the file."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def _append(self, event: Event) -> None:
        if self._overwrites:
            self.resume_at(step=0, epoch=0)
        if self._file is None:
            self._file = _open(self._folder)
        self._file.append(event_bytes(event))


def _open(folder: pathlib.Path) -> Appended:
    """Returns a new event file. Its name sorts after all others, even if the clock went back."""
    there = [each.name[len(PREFIX) : -len(SUFFIX)] for each in folder.glob(f"{PREFIX}*{SUFFIX}")]
    newest = max((int(each) for each in there if each.isdigit()), default=0)
    file = Appended(folder / f"{PREFIX}{max(int(time.time()), newest + 1):010d}{SUFFIX}")
    source = SourceMetadata(writer="tfaccel")
    file.append(
        event_bytes(
            Event(file_version="brain.Event:2", wall_time=time.time(), source_metadata=source)
        )
    )
    return file


def _read(path: pathlib.Path) -> Iterator[tuple[bytes, Event]]:
    """Yields each complete record of a file, and its event."""
    data, start = read_regular(path), 0
    while start + 12 <= len(data):
        (size,) = struct.unpack_from("<Q", data, start)  # then 4 bytes of CRC, the event, 4 more
        end = start + 12 + size + 4
        if end > len(data):
            return  # a killed process left an incomplete record
        try:
            event = Event.FromString(data[start + 12 : end - 4])
        except DecodeError:
            return  # the next record cannot be found after a damaged one
        yield data[start:end], event
        start = end


def _stays(event: Event, *, step: int, epoch: int) -> bool:
    """Returns whether a resume after `step`, with `epoch` complete epochs, keeps an event."""
    for value in event.summary.value:
        if value.tag == EPOCH:
            return float(tensor_util.make_ndarray(value.tensor)) <= epoch
    return event.step <= step


def event_bytes(event: Event) -> bytes:
    """Returns an event as a record of a file."""
    buffer = io.BytesIO()
    RecordWriter(buffer).write(event.SerializeToString())
    return buffer.getvalue()
