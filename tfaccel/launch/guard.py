"""What ends the ranks, with all they have started, where their launcher was ended by SIGKILL.

Takes process groups; gives nothing, unless this process is gone without having closed it.

    guard = Guard()
    guard.watch(process.pid)
    guard.close()

A process of its own that waits for the end of a pipe, which only the launcher holds.
PR_SET_PDEATHSIG reaches a rank alone, not the rank's own children; and a parent between the
launcher and each rank would have to pass every signal and exit code on.
"""

import contextlib
import subprocess
import sys

# It ignores what a scheduler or a terminal sends to all.
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
    """Ends process groups when this process dies."""

    def __init__(self):
        """Watches none yet."""
        self._process = subprocess.Popen(
            [sys.executable, "-ISc", PROGRAM],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )

    def watch(self, group: int) -> None:
        """Watches a group too."""
        with contextlib.suppress(BrokenPipeError):  # somebody has killed it
            self._process.stdin.write(f"{group}\n".encode())
            self._process.stdin.flush()

    def close(self) -> None:
        """Ends nobody any more."""
        self._process.kill()
        self._process.wait()
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
