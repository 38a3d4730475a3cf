"""A program in a process of its own that has a limit, and that this process does not leave behind.

Takes a command; gives its exit code and what it said on standard error.

    exit_code, said = run([sys.executable, "program.py"], environment=os.environ, limit_s=600)

`tfaccel.isolate` is for functions of ours; this is for a program that must not import tfaccel.
"""

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence

from tfaccel.launch.ranks import DIES_WITH
from tfaccel.table_text import in_figures

KILLED_S = 10.0  # from SIGKILL to the end: within a stuck disk even that has to wait


def run(
    command: Sequence[str], *, environment: Mapping[str, str], limit_s: float
) -> tuple[int, str]:
    """Runs the command until it ends; however this returns or raises, its process group has ended.

    The program dies with this process too, even by SIGKILL; what it starts in turn is then on its
    own.

    Args:
      command: the program, an absolute path, and its arguments.
      environment: of the process.
      limit_s: seconds after which it is ended.

    Raises:
      TimeoutError: it had not ended by then.
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
        _, said = process.communicate(timeout=limit_s)
    except subprocess.TimeoutExpired as error:
        raise TimeoutError(f"{command[0]} did not end within {in_figures(limit_s)} s") from error
    finally:
        _end(process)
    return process.returncode, said.decode(errors="replace")


def _end(process: subprocess.Popen) -> None:
    """Ends a process that was not waited for, as after Ctrl-C, and all of its group."""
    if process.returncode is None:  # or the group may be anybody's
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.communicate(timeout=KILLED_S)
