"""Ends the ranks, and everything that they started, if SIGKILL ends their launcher.

    guard = Guard()
    guard.watch(process.pid)
    guard.close()

The guard is a process that waits for the end of a pipe, which only the launcher holds open.
PR_SET_PDEATHSIG would reach only the rank itself, not its children. A parent process between the
launcher and each rank would have to pass on every signal and exit code.
"""

import contextlib
import subprocess
import sys

# The program ignores signals that a scheduler or a terminal sends to all processes.
PROGRAM = """
import os, signal, sys
for number in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
    signal.signal(number, signal.SIG_IGN)
for group in list(map(int, sys.stdin)):
    try:
        os.killpg(group, signal.SIGKILL)
    except OSError:
        pass
"""


class Guard:
    """Ends process groups when this process dies without `close`."""

    def __init__(self):
        """Starts the guard, which watches no group yet."""
        self._process = subprocess.Popen(
            [sys.executable, "-ISc", PROGRAM],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )

    def watch(self, group: int) -> None:
        """Adds a process group."""
        with contextlib.suppress(BrokenPipeError):  # the guard was killed
            self._process.stdin.write(f"{group}\n".encode())
            self._process.stdin.flush()

    def close(self) -> None:
        """Ends the guard; the groups stay."""
        self._process.kill()
        self._process.wait()
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
