"""A child process that never stays behind: its limit of time, its group, its end in words.

    with Child([sys.executable, "program.py"], stderr=log) as child:     # ended on the way out
        in_time = child.wait(600)
    how_it_ended(child.exit_code())     # "was ended by SIGSEGV"

The child dies with this process, even by SIGKILL; what it starts in turn is then on its own. Three
rooms add how the answer comes back: isolate.py takes what a function returns, the doctor lines of a
file, and the arms of the comparison and of tools/bench.py a file for each answer.
"""

import contextlib
import logging
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence

from tfaccel.common.tables import in_figures

log = logging.getLogger("tfaccel")

# PR_SET_PDEATHSIG (Linux, prctl(2)) outlives the exec. It means the thread that started the child.
_DIES_WITH = (
    "import ctypes, os, sys; ctypes.CDLL(None).prctl(1, 9); "
    "os.getppid() == int(sys.argv[1]) or os._exit(1); os.execvp(sys.argv[2], sys.argv[2:])"
)
POLL_S = 0.02
KILLED_S = 10.0  # from SIGKILL to the end: within a stuck driver or disk even that has to wait


class Stopped(Exception):  # noqa: N818  it is no error: somebody asked for it
    """The program was ended because `stop` was set."""


def dying_with_this(command: Sequence[str]) -> list[str]:
    """Returns the command that the kernel ends with the thread that starts it.

    Args:
      command: the program and its arguments.
    """
    return [sys.executable, "-ISc", _DIES_WITH, str(os.getpid()), *command]


def run(
    command: Sequence[str],
    *,
    environment: Mapping[str, str],
    limit_s: float,
    stop: threading.Event | None = None,
) -> tuple[int, str]:
    """Returns a command's exit code, -n for signal n, and what it said on standard error.

    However this returns or raises, the command's process group has ended.

    Args:
      command: the program and its arguments.
      environment: of the process.
      limit_s: seconds after which it is ended.
      stop: ends it, too, once it is set by another thread.

    Raises:
      TimeoutError: it had not ended by then.
      Stopped: `stop` was set.
    """
    with tempfile.TemporaryFile() as said:
        with Child(command, env=dict(environment), stderr=said) as child:
            in_time = child.wait(limit_s, until=stop.is_set if stop else bool)
            if child.exit_code() is None:
                if in_time:
                    raise Stopped
                raise TimeoutError(f"{command[0]} did not end within {in_figures(limit_s)} s")
        said.seek(0)
        return child.exit_code(), said.read().decode(errors="replace")


class Child:
    """A process and its group. Leave its context, or call `end`, to end both.

    Attributes:
      process: as subprocess knows it, for its pipes.
      pid: its number, and its group's.
      pause: is given seconds to wait, between two looks; takes what comes through pipes.
    """

    def __init__(
        self,
        command: Sequence[str],
        *,
        grace_s: float = 0.0,
        killed_s: float | None = KILLED_S,
        **options,
    ):
        """Starts it.

        Args:
          command: the program and its arguments.
          grace_s: from SIGTERM to SIGKILL, where it is ended; 0 for SIGKILL at once.
          killed_s: from SIGKILL until it is left alone; None to wait for as long as it takes.
          **options: of subprocess.Popen. Nothing is read from here or shown, by default.
        """
        self._grace_s, self._killed_s = grace_s, killed_s
        self._is_over, self.pause = False, time.sleep
        nothing = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.DEVNULL)
        self.process = subprocess.Popen(
            dying_with_this(command), **(nothing | options), process_group=0
        )
        self.pid = self.process.pid

    def __enter__(self) -> "Child":
        """Returns itself."""
        return self

    def __exit__(self, *_):
        """Ends it."""
        self.end()

    def exit_code(self) -> int | None:
        """Returns it, -n for signal n; None while it runs.

        The process stays a zombie until `end`, so that the number of its group can become nobody
        else's, and a signal to the group reaches what is left of it, or no one.
        """
        if self.process.returncode is None:
            with contextlib.suppress(ChildProcessError):  # somebody else has waited for it
                ended = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
                if not ended:
                    return None
                return ended.si_status * (1 if ended.si_code == os.CLD_EXITED else -1)
            self.process.poll()
        return self.process.returncode

    def wait(self, limit_s: float | None = None, *, until: Callable[[], bool] = bool) -> bool:
        """Waits until it has ended, or `until` says so; returns False if the time is over before.

        Args:
          limit_s: seconds from now; None for no limit.
          until: is asked at each look.
        """
        ends = None if limit_s is None else time.monotonic() + limit_s
        while self.exit_code() is None and not until():
            if ends is not None and time.monotonic() >= ends:
                return False
            self.pause(POLL_S)
        return True

    def send(self, number: signal.Signals) -> None:
        """Sends a signal to the whole group."""
        if self.process.returncode is None:  # or the group may be anybody's
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, number)

    def end(self) -> None:
        """Ends it, if it still runs, and all of its group. A second call does nothing."""
        if self._is_over:
            return
        self._is_over = True
        try:
            if self._grace_s and self.exit_code() is None:
                self.send(signal.SIGTERM)
                self.wait(self._grace_s)
        finally:
            self.send(signal.SIGKILL)  # to a group whose leader has ended as well
            try:
                self.process.wait(self._killed_s)
            except subprocess.TimeoutExpired:
                log.error(
                    "process %d cannot be ended: it still runs %g s after SIGKILL, perhaps in a "
                    "driver or on a lost disk; look at it with ps",
                    *(self.pid, self._killed_s),
                )


def how_it_ended(exit_code: int) -> str:
    """Returns an exit code, -n for signal n, in words."""
    if exit_code >= 0:
        return f"ended with exit code {exit_code}"
    try:
        name = signal.Signals(-exit_code).name
    except ValueError:
        name = f"signal {-exit_code}"
    hint = " (perhaps the machine was out of memory)" if name == "SIGKILL" else ""
    return f"was ended by {name}{hint}"
