"""A program in a process of its own that has a limit, and that this process does not leave behind.

Takes a command; gives its exit code and what it said on standard error.

    exit_code, said = run([sys.executable, "program.py"], environment=os.environ, limit_s=600)

`tfaccel.process.isolate` is for functions of ours; this is for a program that must not import
tfaccel.
"""

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence

from tfaccel.common.tables import in_figures
from tfaccel.launch.ranks import DIES_WITH

POLL_S = 0.2  # between two looks at whether it is to stop
KILLED_S = 10.0  # from SIGKILL to the end: within a stuck disk even that has to wait


class Stopped(Exception):  # noqa: N818  it is no error: somebody asked for it
    """The program was ended because `stop` was set."""


def run(
    command: Sequence[str],
    *,
    environment: Mapping[str, str],
    limit_s: float,
    stop: threading.Event | None = None,
) -> tuple[int, str]:
    """Runs the command until it ends; however this returns or raises, its process group has ended.

    The program dies with this process too, even by SIGKILL; what it starts in turn is then on its
    own.

    Args:
      command: the program, an absolute path, and its arguments.
      environment: of the process.
      limit_s: seconds after which it is ended.
      stop: ends it, too, once it is set by another thread.

    Raises:
      TimeoutError: it had not ended by then.
      Stopped: `stop` was set.
    """
    process = subprocess.Popen(
        [sys.executable, "-ISc", DIES_WITH, str(os.getpid()), *command],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        env=dict(environment),
        process_group=0,
    )
    try:
        said = _said(process, time.monotonic() + limit_s, stop)
    except subprocess.TimeoutExpired as error:
        raise TimeoutError(f"{command[0]} did not end within {in_figures(limit_s)} s") from error
    finally:
        _end(process)
    return process.returncode, said.decode(errors="replace")


def _said(process: subprocess.Popen, ends: float, stop: threading.Event | None) -> bytes:
    """Waits for the end of a process, and returns what it said on standard error."""
    while True:
        left_s = ends - time.monotonic()
        try:
            return process.communicate(timeout=left_s if stop is None else min(left_s, POLL_S))[1]
        except subprocess.TimeoutExpired:
            if stop is not None and stop.is_set():
                raise Stopped from None
            if time.monotonic() >= ends:
                raise


def _end(process: subprocess.Popen) -> None:
    """Ends a process that was not waited for, as after Ctrl-C, and all of its group."""
    if process.returncode is None:  # or the group may be anybody's
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.communicate(timeout=KILLED_S)
