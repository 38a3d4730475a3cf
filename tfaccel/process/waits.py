"""Says what the program does while nothing else is to be seen, so that it is never silent for long.

    with waits.on("tracing the step", of="resnet50, 256 x 224 x 224 x 3"):
        ...                      # tfaccel: tracing the step: 5 s (last time 8 s)
        waits.now("compiling the step")
        ...                      # tfaccel: compiling the step: 12 s (last time 92 s)
    with waits.on("decoding images"):
        waits.reached("512 of 60,000")
        ...                      # tfaccel: decoding images: 5 s, 512 of 60,000

After four seconds of silence a line names the newest wait. It has the seconds so far, and those of
the last such wait on this machine. On a terminal and in a notebook the line changes each second,
and the next line replaces it. A file has a new line after 4, 12, 28 and 60 seconds, and then each
minute.

One thread serves all waits, and looks twice a second. A wait costs its beginner 5 us (2 CPU cores,
2026-11-29).
"""

import contextlib
import dataclasses
import json
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator

from tfaccel.common import own_files, run_log
from tfaccel.process.cache_folder import cache_folder

log = logging.getLogger("tfaccel")

SILENCE_S = 4.0  # before a wait is named
YOUNG_S = 1.0  # waits that are younger are not named
LOOK_S = 0.5
LONGEST_S = 32.0  # between two lines in a file, the first time; then a minute
MINUTE_S = 60.0
WORTH_S = 2.0  # shorter waits are neither kept nor logged
MOST_KEPT = 500
FILE = "waits.json"


@dataclasses.dataclass(eq=False)
class Wait:
    """What the program waits for.

    Attributes:
      what: what is being done, in words.
      of: what its time depends on, or a function that returns it; the time of the last such wait
        is kept under both.
      is_usual: whether it happens again and again, such as a step. Its time is not kept or logged.
      thread: the thread that waits.
      begun: `time.monotonic()` of its beginning.
      young_until: `time.monotonic()` before which it is not named.
      last_s: the seconds that it took last time on this machine; None if that is not known.
      reached: how far it is, in words, or nothing.
    """

    what: str
    of: str | Callable[[], str] = ""
    is_usual: bool = False
    thread: int = dataclasses.field(default_factory=threading.get_ident)
    begun: float = dataclasses.field(default_factory=time.monotonic)
    young_until: float = dataclasses.field(default_factory=lambda: time.monotonic() + YOUNG_S)
    last_s: float | None = None
    reached: str = ""
    _is_looked_up: bool = False

    def now(self, what: str) -> None:
        """Ends this wait and begins another in its place."""
        self._end()
        self.what, self.begun, self.is_usual = what, time.monotonic(), False
        self.last_s, self.reached, self._is_looked_up = None, "", False

    def text(self) -> str:
        """Returns the line that names the wait."""
        if not self._is_looked_up:
            self._is_looked_up, self.last_s = True, _kept().get(self._key)
        last = "" if self.last_s is None else f" (last time {self.last_s:,.0f} s)"
        reached = f", {self.reached}" if self.reached else ""
        return f"{self.what}: {self._seconds:,.0f} s{reached}{last}"

    @property
    def _key(self) -> str:
        of = self.of() if callable(self.of) else self.of
        return f"{self.what} | {of}" if of else self.what

    @property
    def _seconds(self) -> float:
        return time.monotonic() - self.begun

    def _end(self) -> None:
        if (seconds := self._seconds) >= WORTH_S and not self.is_usual:
            log.info("%s: %.1f s", self.what, seconds)
            _keep(self._key, seconds)


_waits: list[Wait] = []  # of all threads; the newest is last
_thread: threading.Thread | None = None
_beginning = threading.Lock()


@contextlib.contextmanager
def on(what: str, *, of: str | Callable[[], str] = "", is_usual: bool = False) -> Iterator[None]:
    """Says what the program does within the context, if it takes long.

    Args:
      what: a few words that go before a colon, such as "XLA compiles the training step".
      of: what the time depends on, such as the model and the batch; or a function that returns
        it, which is called only if the wait is long.
      is_usual: whether it happens again and again, such as a step. A slow step would otherwise
        write a file and a line of the log each time.
    """
    wait = Wait(what, of, is_usual)
    _waits.append(wait)
    _begin_thread()
    try:
        yield
        wait._end()
    finally:
        _waits.remove(wait)
        run_log.pass_on()


def now(what: str) -> None:
    """Begins another wait in place of this thread's newest one, if there is one."""
    if (wait := _own()) is not None:
        wait.now(what)


def reached(words: str) -> None:
    """Says how far this thread's newest wait is, such as "512 of 60,000", if there is one."""
    if (wait := _own()) is not None:
        wait.reached = words


def traced(function: Callable, name: str, *, xla: bool) -> Callable:
    """Returns a function to trace, so that the wait for its first call tells what is being done.

    Args:
      function: the function, which TensorFlow traces once and then builds.
      name: what it computes, such as "training step".
      xla: whether XLA compiles it.
    """

    def told(*arguments):
        now(f"tracing the {name}")
        outputs = function(*arguments)
        now(f"{'XLA compiles' if xla else 'TensorFlow builds'} the {name}")
        return outputs

    return told


def _begin_thread() -> None:
    global _thread
    with _beginning:
        if _thread is None or not _thread.is_alive():  # a fork has no threads
            _thread = threading.Thread(target=_tell, name="tfaccel-waits", daemon=True)
            with contextlib.suppress(RuntimeError):  # the interpreter ends
                _thread.start()


def _tell() -> None:
    told, pause_s = run_log.spoke_at() or time.monotonic(), SILENCE_S
    while True:
        time.sleep(LOOK_S)
        wait, now = _newest(), time.monotonic()
        if run_log.spoke_at() > told:
            told, pause_s = run_log.spoke_at(), SILENCE_S
        if wait is None:
            pause_s = SILENCE_S
        elif now - told >= SILENCE_S and now >= wait.young_until:
            if run_log.let_pass(wait.text()):
                continue
            if now - told >= pause_s:
                run_log.summary("%s", wait.text())
                told = time.monotonic()
                pause_s = min(2 * pause_s, LONGEST_S) if pause_s < LONGEST_S else MINUTE_S


def _newest() -> Wait | None:
    try:
        return _waits[-1]
    except IndexError:
        return None


def _own() -> Wait | None:
    own = threading.get_ident()
    return next((each for each in reversed(_waits) if each.thread == own), None)


def _forget() -> None:
    """Forgets the waits and the lock of the parent, of which a fork has no thread."""
    global _beginning
    _waits.clear()
    _beginning = threading.Lock()


# The seconds that waits took, from the newest process that had each.


def _kept() -> dict[str, float]:
    try:
        kept = json.loads((cache_folder("waits") / FILE).read_bytes())
        return {str(key): float(value) for key, value in kept.items()}
    except (OSError, ValueError, AttributeError, TypeError):
        return {}


def _keep(key: str, seconds: float) -> None:
    kept = _kept()
    kept.pop(key, None)
    kept = dict([*kept.items(), (key, round(seconds, 1))][-MOST_KEPT:])
    folder = cache_folder("waits")
    with contextlib.suppress(OSError):  # it is only for the words
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        own_files.replace(folder / FILE, json.dumps(kept, indent=0).encode())


os.register_at_fork(after_in_child=_forget)
