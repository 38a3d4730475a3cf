"""How far this process has come, in a file that its launcher reads; nothing without a launcher.

Takes what the rooms of a run say of themselves; gives a `Progress` to whoever reads the file.

    progress.beat("train", step=57)        # about to begin step 57
    with progress.within("save"): ...      # what this process alone may be busy with
    progress.read(path).phase              # in the launcher

The file is memory that both processes map, so that a beat costs 3 us (2 cores, 2026-11-23) and is
there although this process hangs a moment later. Its clock is the machine's, one for all processes.
A rank's children know of the file too: whoever speaks first has it, until it ends or lets go.
Whoever has it prints the stacks of its threads at SIGUSR2, unless that signal is the program's own.
"""

import _signal
import contextlib
import dataclasses
import faulthandler
import fcntl
import functools
import logging
import mmap
import os
import pathlib
import signal
import struct
import threading
import time
from collections.abc import Iterator

from tfaccel.common.checks import check_choice
from tfaccel.common.errors import UserError

log = logging.getLogger("tfaccel")

VARIABLE = "TFACCEL_HEARTBEAT"  # the file's path
PHASES = ("start", "train", "evaluation", "save", "export", "own", "end")
STACKS_SIGNAL = signal.SIGUSR2  # SIGUSR1 asks to save and stop
_STDERR = 2  # itself: `sys.stderr` may be a program's own object, or None
_LAYOUT = struct.Struct("<6qd")


@dataclasses.dataclass(frozen=True)
class Progress:
    """Where a process stands.

    Attributes:
      beats: how many there were: the same, at the same place, in all workers of a job.
      phase: one of PHASES; "start" until the first step has ended, which compiles; "own" for what
        a script does after `fit`, `evaluate` or `predict`; "end" once it was told to stop, and has.
      step: the newest that was begun, from 1; 0 before there is one.
      lost: the worker for whose sake this one ends, -1 for one that it does not know; else None.
      asked: whether it has heard a signal that asks to stop.
      shows_stacks: the number of the process if STACKS_SIGNAL makes it print its stacks; else 0.
      since: `time.monotonic()` of the newest beat.
    """

    beats: int = 0
    phase: str = "start"
    step: int = 0
    lost: int | None = None
    asked: bool = False
    shows_stacks: int = 0
    since: float = 0.0


def write(path: pathlib.Path, progress: Progress) -> None:
    """Writes the file, as a launcher does before the process starts."""
    path.write_bytes(_packed(progress))


def read(path: pathlib.Path) -> Progress:
    """Returns what the file says, once two readings agree: its process may be writing."""
    before, now = None, path.read_bytes()
    while now != before:
        before, now = now, path.read_bytes()
    return _unpacked(now)


def _unpacked(now: bytes) -> Progress:
    beats, phase, step, lost, asked, shows_stacks, since = _LAYOUT.unpack(now)
    lost = None if lost == -2 else lost
    return Progress(beats, PHASES[phase], step, lost, bool(asked), shows_stacks, since)


def _packed(progress: Progress) -> bytes:
    return _LAYOUT.pack(
        progress.beats,
        PHASES.index(progress.phase),
        progress.step,
        -2 if progress.lost is None else progress.lost,
        progress.asked,
        progress.shows_stacks,
        progress.since,
    )


def catches(pid: int, number: signal.Signals) -> bool:
    """Returns whether a process has a handler for a signal, Python's or another."""
    try:
        lines = pathlib.Path(f"/proc/{pid}/status").read_bytes().splitlines()
    except OSError:  # it has ended
        return False
    caught = next(line.split()[1] for line in lines if line.startswith(b"SigCgt:"))
    return bool(int(caught, 16) >> (number - 1) & 1)


@functools.cache  # once: a second look would find our own handler
def _registers_stacks() -> bool:
    """Makes STACKS_SIGNAL print all threads' stacks; returns False where it is somebody's."""
    # Python does not know of handlers in C, of which another `faulthandler.register` is one.
    if not _is_default_in_python() or catches(os.getpid(), STACKS_SIGNAL):
        return False
    faulthandler.register(STACKS_SIGNAL, file=_STDERR, all_threads=True, chain=False)
    return True


def _shows_stacks() -> bool:
    """Returns whether STACKS_SIGNAL is ours now: a program may take it at any time."""
    return _registers_stacks() and _is_default_in_python()


def _is_default_in_python() -> bool:
    # Of `_signal`: `signal.getsignal` makes an enum of it, 1 us more for each beat.
    return _signal.getsignal(STACKS_SIGNAL) == signal.SIG_DFL


class _Reporter:
    """Keeps the file of this process up to date, if it has one."""

    def __init__(self, path: str | None):
        self._path, self._fd, self._memory, self._now = path, None, None, Progress()
        # Of the main thread and the one that hears signals; a signal's handler may speak as well.
        self._lock = threading.RLock()
        self.calls, self.compiled, self._pid = 0, set(), os.getpid()

    @property
    def phase(self) -> str:
        return self._now.phase

    @property
    def is_launched(self) -> bool:
        return self._path is not None

    def change(self, *, beats: int = 0, **changes) -> str:
        """Writes the changes and returns the phase before."""
        if self._path is None:
            return self._now.phase
        with self._lock:
            if self._memory is None and not self._opens():
                return self._now.phase
            now = self._now
            self._now = Progress(
                now.beats + beats,
                changes.get("phase", now.phase),
                changes.get("step", now.step),
                changes.get("lost", now.lost),
                changes.get("asked", now.asked),
                self._pid if _shows_stacks() else 0,
                time.monotonic(),
            )
            self._memory[:] = _packed(self._now)
            return now.phase

    def _opens(self) -> bool:
        """Returns whether the file is this process's; it counts on from what is written there."""
        try:
            self._fd = os.open(self._path, os.O_RDWR)
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._memory = mmap.mmap(self._fd, _LAYOUT.size)
        except BlockingIOError:  # another process of this rank has it
            os.close(self._fd)
            return False
        except (OSError, ValueError) as error:
            log.warning("progress: nothing is said to a launcher, which has gone (%s)", error)
            self._path = None
            return False
        self._now = _unpacked(self._memory[:])
        return True

    def let_go(self) -> None:
        with self._lock:
            if self._memory is not None:
                self._memory.close()
                fcntl.flock(self._fd, fcntl.LOCK_UN)  # or a forked child would keep it locked
                os.close(self._fd)
                self._memory = None


def _renew() -> None:
    global _own
    _own = _Reporter(os.environ.get(VARIABLE))


_renew()
os.register_at_fork(after_in_child=_renew)  # which has its parent's memory, and would write there


def is_launched() -> bool:
    """Returns whether a launcher watches this process, or one that started it."""
    return _own.is_launched


def beat(phase: str, **step: int) -> None:
    """Says that this process has come a place further, where each worker of the job comes too.

    Args:
      phase: what begins now, of PHASES.
      **step: `step`, the one that begins; left out, it stays.
    """
    _own.change(beats=1, phase=phase, **step)


def beat_of_loop(step: int | None = None, *, phase: str = "train") -> None:
    """Says to `tfaccel launch` that a loop of your own begins a step: this is `tfaccel.beat`.

    Call it in every rank, before each step. `fit`, `evaluate` and `predict` of a model that
    `run.compile` has compiled do so themselves. Without a launcher it does nothing.

    Args:
      step: the one that begins, counted from 1; None leaves it out.
      phase: "train" or "evaluation", whose limits are --step-timeout and --evaluation-timeout;
        the first of each compiles and has --start-timeout, as has "own", what is neither.

    Raises:
      UserError: an argument is not what it may be.
    """
    check_choice("phase", phase, ("train", "evaluation", "own"))
    try:
        step = {} if step is None else {"step": int(step)}
    except (TypeError, ValueError) as error:
        raise UserError(
            f"step={step!r}; expected a whole number, outside of a tf.function"
        ) from error
    is_first = phase != "own" and phase not in _own.compiled
    _own.compiled.add(phase)
    beat("start" if is_first else phase, **step)


@contextlib.contextmanager
def within(phase: str) -> Iterator[None]:
    """Says that this process, and perhaps no other, is busy so within the context."""
    before = _own.change(phase=phase)
    try:
        yield
    finally:
        _own.change(phase=before)


@contextlib.contextmanager
def call() -> Iterator[None]:
    """Around a `fit`, `evaluate` or `predict`: what follows the outermost is the script's own."""
    _own.calls += 1
    has_returned = False
    try:
        yield
        has_returned = True
    finally:
        _own.calls -= 1
        _leave(has_returned)


def _leave(has_returned: bool) -> None:
    if has_returned:
        beat("train" if _own.calls else "own")
    elif not _own.calls and _own.phase != "end":
        # No place where all workers come.
        _own.change(phase="own")


def let_go() -> None:
    """Lets a child speak for this process, which counts on from there when it speaks again."""
    _own.let_go()


def lost(worker_index: int = -1) -> None:
    """Says that this process ends for the sake of another worker, whose fault it is.

    Args:
      worker_index: which; -1 for one that is not known.
    """
    _own.change(lost=worker_index)


def asked() -> None:
    """Says that a signal that asks to stop was heard here."""
    _own.change(asked=True)
