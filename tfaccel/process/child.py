"""A child process that is always ended: with a time limit, and with its process group.

    with Child([sys.executable, "program.py"], stderr=log) as child:     # ended on the way out
        in_time = child.wait(600)
    how_it_ended(child.exit_code())     # "was ended by SIGSEGV"

The child dies with this process, even if that is killed by SIGKILL. Processes that the child starts
do not. Other modules add a way to return results: isolate.py returns a function's result, the
doctor reads lines of a file, and `tfaccel compare` and tools/bench.py read one file per answer.
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

# PR_SET_PDEATHSIG (Linux, prctl(2)) survives the exec. It refers to the thread that starts the
# child.
_DIES_WITH = (
    "import ctypes, os, sys; ctypes.CDLL(None).prctl(1, 9); "
    "os.getppid() == int(sys.argv[1]) or os._exit(1); os.execvp(sys.argv[2], sys.argv[2:])"
)
POLL_S = 0.02
KILLED_S = 10.0  # after SIGKILL: a stuck driver or disk delays even that


class Stopped(Exception):  # noqa: N818  not an error, but a request
    """The program was ended because `stop` was set."""


def dying_with_this(command: Sequence[str]) -> list[str]:
    """Returns a command that the kernel ends together with the thread that starts it."""
    return [sys.executable, "-ISc", _DIES_WITH, str(os.getpid()), *command]


def run(
    command: Sequence[str],
    *,
    environment: Mapping[str, str],
    limit_s: float,
    stop: threading.Event | None = None,
) -> tuple[int, str]:
    """Returns a command's exit code, -n for signal n, and its standard error.

    The command's process group has ended when this returns or raises.

    Args:
      command: the program and its arguments.
      environment: the environment of the process.
      limit_s: seconds after which the process is ended.
      stop: an event that ends the process when another thread sets it.

    Raises:
      TimeoutError: the process did not end in time.
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


class Child(contextlib.AbstractContextManager):
    """A process and its group. Leaving the context, or calling `end`, ends both.

    Attributes:
      process: the subprocess.Popen object, for its pipes.
      pid: the number of the process and of its group.
      pause: called with the seconds to wait between two polls; may read pipes meanwhile.
    """

    def __init__(
        self,
        command: Sequence[str],
        *,
        grace_s: float = 0.0,
        killed_s: float | None = KILLED_S,
        **options,
    ):
        """Starts the process.

        Args:
          command: the program and its arguments.
          grace_s: seconds from SIGTERM to SIGKILL; 0 sends SIGKILL at once.
          killed_s: seconds to wait for the end after SIGKILL; None waits without limit.
          **options: options of subprocess.Popen. By default all streams are DEVNULL.
        """
        self._grace_s, self._killed_s = grace_s, killed_s
        self._is_over, self.pause = False, time.sleep
        nothing = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.DEVNULL)
        self.process = subprocess.Popen(
            dying_with_this(command), **(nothing | options), process_group=0
        )
        self.pid = self.process.pid

    def __exit__(self, *_):
        """Ends the process and its group."""
        self.end()

    def exit_code(self) -> int | None:
        """Returns the exit code, -n for signal n; None while the process runs.

        The process stays a zombie until `end`. This keeps the number of its group from being
        reused, so that a signal to the group cannot reach another process.
        """
        if self.process.returncode is None:
            with contextlib.suppress(ChildProcessError):  # another waitpid has taken it
                ended = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
                if not ended:
                    return None
                return ended.si_status * (1 if ended.si_code == os.CLD_EXITED else -1)
            self.process.poll()
        return self.process.returncode

    def wait(self, limit_s: float | None = None, *, until: Callable[[], bool] = bool) -> bool:
        """Waits until the process has ended, or `until` returns True.

        Args:
          limit_s: seconds from now; None for no limit.
          until: is called at each poll.

        Returns:
          False if the time is over first.
        """
        ends = None if limit_s is None else time.monotonic() + limit_s
        while self.exit_code() is None and not until():
            if ends is not None and time.monotonic() >= ends:
                return False
            self.pause(POLL_S)
        return True

    def send(self, number: signal.Signals) -> None:
        """Sends a signal to the process group."""
        if self.process.returncode is None:  # else the number may be reused
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, number)

    def end(self) -> None:
        """Ends the process, if it still runs, and its group. A second call does nothing."""
        if self._is_over:
            return
        self._is_over = True
        try:
            if self._grace_s and self.exit_code() is None:
                self.send(signal.SIGTERM)
                self.wait(self._grace_s)
        finally:
            self.send(signal.SIGKILL)  # also to a group without its leader
            try:
                self.process.wait(self._killed_s)
            except subprocess.TimeoutExpired:
                log.error(
                    "process %d did not end: it still runs %g s after SIGKILL, perhaps in a driver "
                    "or on a lost disk; check it with ps",
                    *(self.pid, self._killed_s),
                )


def how_it_ended(exit_code: int) -> str:
    """Returns the meaning of an exit code, -n or a shell's 128 + n for signal n, in words."""
    is_negative = exit_code < 0
    number = -exit_code if is_negative else exit_code - 128
    try:
        name = signal.Signals(number).name
    except ValueError:
        signals = f"was ended by signal {number}"
        return signals if is_negative else f"ended with exit code {exit_code}"
    code = "" if is_negative else f", exit code {exit_code}"
    hint = " (perhaps the machine was out of memory)" if name == "SIGKILL" else ""
    return f"was ended by {name}{code}{hint}"
