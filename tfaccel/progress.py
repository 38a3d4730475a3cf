"""How far this process has come, in a file that its launcher reads; nothing without a launcher.

Takes what the rooms of a run say of themselves; gives a `Progress` to whoever reads the file.

    progress.beat("train", step=57)        # about to begin step 57
    with progress.within("save"): ...      # what this process alone may be busy with
    progress.read(path).phase              # in the launcher

The file is memory that both processes map, so that a beat costs 2 us (2 cores, 2026-11-22) and is
there although this process hangs a moment later. Its clock is the machine's, one for all processes.
"""

import contextlib
import dataclasses
import mmap
import os
import pathlib
import struct
import time
from collections.abc import Iterator

VARIABLE = "TFACCEL_HEARTBEAT"  # the file's path
PHASES = ("start", "train", "evaluation", "save", "export", "end")
_LAYOUT = struct.Struct("<5qd")


@dataclasses.dataclass(frozen=True)
class Progress:
    """Where a process stands.

    Attributes:
      beats: how many there were: the same, at the same place, in all workers of a job.
      phase: one of PHASES; "start" until the first step has ended, which compiles.
      step: the newest that was begun, from 1; 0 before there is one.
      lost: the worker for whose sake this one ends, -1 for one that it does not know; else None.
      asked: whether it has heard a signal that asks to stop.
      since: `time.monotonic()` of the newest beat.
    """

    beats: int = 0
    phase: str = "start"
    step: int = 0
    lost: int | None = None
    asked: bool = False
    since: float = 0.0


def write(path: pathlib.Path, progress: Progress) -> None:
    """Writes the file, as a launcher does before the process starts."""
    path.write_bytes(_packed(progress))


def read(path: pathlib.Path) -> Progress:
    """Returns what the file says, once two readings agree: its process may be writing."""
    before, now = None, path.read_bytes()
    while now != before:
        before, now = now, path.read_bytes()
    beats, phase, step, lost, asked, since = _LAYOUT.unpack(now)
    return Progress(beats, PHASES[phase], step, None if lost == -2 else lost, bool(asked), since)


def _packed(progress: Progress) -> bytes:
    return _LAYOUT.pack(
        progress.beats,
        PHASES.index(progress.phase),
        progress.step,
        -2 if progress.lost is None else progress.lost,
        progress.asked,
        progress.since,
    )


class _Reporter:
    """Keeps the file of this process up to date, if it has one."""

    def __init__(self, path: str | None):
        self._memory, self._now = None, Progress()
        if path:
            with open(path, "r+b") as file:
                self._memory = mmap.mmap(file.fileno(), _LAYOUT.size)
            self._now = read(pathlib.Path(path))  # of a child of the rank: it counts on

    def change(self, *, beats: int = 0, **changes) -> None:
        if self._memory is None:
            return
        now = self._now
        self._now = Progress(
            now.beats + beats,
            changes.get("phase", now.phase),
            changes.get("step", now.step),
            changes.get("lost", now.lost),
            changes.get("asked", now.asked),
            time.monotonic(),
        )
        self._memory[:] = _packed(self._now)

    @property
    def phase(self) -> str:
        return self._now.phase


_own = _Reporter(os.environ.get(VARIABLE))


def beat(phase: str, **step: int) -> None:
    """Says that this process has come a place further, where each worker of the job comes too.

    Args:
      phase: what begins now, of PHASES.
      **step: `step`, the one that begins; left out, it stays.
    """
    _own.change(beats=1, phase=phase, **step)


@contextlib.contextmanager
def within(phase: str) -> Iterator[None]:
    """Says that this process, and perhaps no other, is busy so within the context."""
    before = _own.phase
    _own.change(phase=phase)
    try:
        yield
    finally:
        _own.change(phase=before)


def lost(worker_index: int = -1) -> None:
    """Says that this process ends for the sake of another worker, whose fault it is.

    Args:
      worker_index: which; -1 for one that is not known.
    """
    _own.change(lost=worker_index)


def asked() -> None:
    """Says that a signal that asks to stop was heard here."""
    _own.change(asked=True)
