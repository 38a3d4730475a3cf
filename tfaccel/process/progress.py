"""Reports this process's progress to its launcher, through a file. Without one it does nothing.

    progress.beat("train", step=57)        # step 57 begins
    with progress.within("save"): ...      # only this process may be doing this
    progress.read(path).phase              # in the launcher

Both processes map the file into memory. A beat costs 3 us (2 cores, 2026-11-23), and the launcher
sees it even if this process hangs a moment later. The times are those of the machine's monotonic
clock, which all processes share. A rank's children know the file, too. The first process that
reports owns the file until it ends or calls `let_go`. The owner prints the stacks of its threads at
SIGUSR2, unless the program uses that signal itself.
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

VARIABLE = "TFACCEL_HEARTBEAT"  # the path of the file
PHASES = ("start", "train", "evaluation", "save", "export", "own", "end")
STACKS_SIGNAL = signal.SIGUSR2  # SIGUSR1 is a request to save and stop
_STDERR = 2  # the descriptor, because `sys.stderr` may be the program's own object, or None
_LAYOUT = struct.Struct("<6qd")


@dataclasses.dataclass(frozen=True)
class Progress:
    """The progress of a process.

    Attributes:
      beats: number of beats. It is the same at the same place in all workers of a job.
      phase: one of PHASES; "start" until the first step has ended, which compiles; "own" for a
        script's code after `fit`, `evaluate` or `predict`; "end" after a stop that was asked for.
      step: the newest step that has begun, from 1; 0 before the first.
      lost: the worker whose loss ends this process, -1 if it is unknown; None if none was lost.
      asked: whether a signal to stop was heard.
      shows_stacks: the process id if STACKS_SIGNAL makes the process print its stacks; else 0.
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
    """Writes the file. The launcher does this before the process starts."""
    path.write_bytes(_packed(progress))


def read(path: pathlib.Path) -> Progress:
    """Returns the contents of the file. It reads until two readings agree, because of writers."""
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
    """Returns whether a process has a handler for a signal, in Python or in C."""
    try:
        lines = pathlib.Path(f"/proc/{pid}/status").read_bytes().splitlines()
    except OSError:  # the process has ended
        return False
    caught = next(line.split()[1] for line in lines if line.startswith(b"SigCgt:"))
    return bool(int(caught, 16) >> (number - 1) & 1)


@functools.cache  # a second check would find our own handler
def _registers_stacks() -> bool:
    """Makes STACKS_SIGNAL print all threads' stacks; returns False if the program uses it."""
    # Python does not know handlers in C, such as another `faulthandler.register`.
    if not _is_default_in_python() or catches(os.getpid(), STACKS_SIGNAL):
        return False
    faulthandler.register(STACKS_SIGNAL, file=_STDERR, all_threads=True, chain=False)
    return True


def _shows_stacks() -> bool:
    """Returns whether STACKS_SIGNAL is ours now; a program may take it at any time."""
    return _registers_stacks() and _is_default_in_python()


def _is_default_in_python() -> bool:
    # `signal.getsignal` would make an enum, which costs 1 us more per beat.
    return _signal.getsignal(STACKS_SIGNAL) == signal.SIG_DFL


class _Reporter:
    """Keeps the file of this process up to date, if there is one."""

    def __init__(self, path: str | None):
        self._path, self._fd, self._memory, self._now = path, None, None, Progress()
        # Shared by the main thread and the one that hears signals; a signal handler may use it too.
        self._lock = threading.RLock()
        self.calls, self.compiled, self._pid = 0, set(), os.getpid()

    @property
    def phase(self) -> str:
        return self._now.phase

    @property
    def is_launched(self) -> bool:
        return self._path is not None

    def change(self, *, beats: int = 0, **changes) -> str:
        """Writes the changes and returns the previous phase."""
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
        """Opens the file and reads its values; returns whether this process owns it."""
        try:
            self._fd = os.open(self._path, os.O_RDWR)
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._memory = mmap.mmap(self._fd, _LAYOUT.size)
        except BlockingIOError:  # another process of this rank owns it
            os.close(self._fd)
            return False
        except (OSError, ValueError) as error:
            log.warning("progress: no longer reported, because the launcher is gone (%s)", error)
            self._path = None
            return False
        self._now = _unpacked(self._memory[:])
        return True

    def let_go(self) -> None:
        with self._lock:
            if self._memory is not None:
                self._memory.close()
                fcntl.flock(self._fd, fcntl.LOCK_UN)  # else a forked child would keep the lock
                os.close(self._fd)
                self._memory = None


def _renew() -> None:
    global _own
    _own = _Reporter(os.environ.get(VARIABLE))


_renew()
os.register_at_fork(after_in_child=_renew)  # a child must not write to its parent's memory


def is_launched() -> bool:
    """Returns whether a launcher watches this process or a parent of it."""
    return _own.is_launched


def beat(phase: str, **step: int) -> None:
    """Reports that this process has reached the next place that all workers of the job reach.

    Args:
      phase: the phase that begins now, one of PHASES.
      **step: `step` is the step that begins; without it, the step stays the same.
    """
    _own.change(beats=1, phase=phase, **step)


def beat_of_loop(step: int | None = None, *, phase: str = "train") -> None:
    """Tells `tfaccel launch` that your own loop begins a step. This is `tfaccel.beat`.

    Call it in every rank before each step. `fit`, `evaluate` and `predict` of a model that
    `run.compile` compiled do so themselves. Without a launcher it does nothing.

    Args:
      step: the number of the step that begins, from 1; None keeps the last number.
      phase: "train" or "evaluation", with the limits --step-timeout and --evaluation-timeout. The
        first step of each compiles, and has --start-timeout. So does "own", for all other work.

    Raises:
      UserError: an argument is wrong.
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
    """Reports a phase within the context, which perhaps only this process enters."""
    before = _own.change(phase=phase)
    try:
        yield
    finally:
        _own.change(phase=before)


@contextlib.contextmanager
def call() -> Iterator[None]:
    """Surrounds `fit`, `evaluate` or `predict`. After the outermost call, the phase is "own"."""
    _own.calls += 1
    has_returned = False
    try:
        yield
        has_returned = True
    finally:
        _own.calls -= 1
        if has_returned:
            beat("train" if _own.calls else "own")
        elif not _own.calls and _own.phase != "end":
            # Not a beat, because the other workers may not fail here.
            _own.change(phase="own")


def let_go() -> None:
    """Lets a child own the file. This process continues its counts when it reports again."""
    _own.let_go()


def lost(worker_index: int = -1) -> None:
    """Reports that this process ends because a worker is lost; its index is -1 if unknown."""
    _own.change(lost=worker_index)


def asked() -> None:
    """Reports that this process has heard a signal to stop."""
    _own.change(asked=True)
