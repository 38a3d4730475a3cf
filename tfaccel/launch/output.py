"""What a rank prints: shown by its launcher with a prefix, kept in a file, and the last of it.

Takes a process with pipes; gives its last lines, and the first that looks like an error.

    output = Output(process, prefix="[rank 1] ", log=pathlib.Path("launch/attempt-0/rank-1.log"))
    output.tail()       # ("ValueError: ...", "...", ...)
    output.close()      # when the process has ended
"""

import collections
import contextlib
import pathlib
import re
import subprocess
import sys
import threading
import time

TAIL_LINES = 15
LONGEST_LINE = 2**16  # bytes; what is longer comes in pieces
SHOWN_OF_LINE = 500  # characters, in a tail
CLOSE_S = 5.0  # for a pipe that something else than the rank's group holds open
# The last line of a traceback, and what `tfaccel train` says.
ERROR = re.compile(r"^(tfaccel: error: |(\w+\.)*\w*(Error|Exception|Interrupt|Exit)\b(:|$))")

_writing = threading.Lock()  # one line at a time, of all ranks


class Output:
    """Copies both pipes of a process, each in a thread."""

    def __init__(self, process: subprocess.Popen, *, prefix: str, log: pathlib.Path):
        """Begins to copy.

        Args:
          process: whose stdout and stderr are pipes.
          prefix: of each line that is shown.
          log: a file to which the lines are added as they are.
        """
        self._prefix, self._log = prefix.encode(), log.open("ab", buffering=0)
        self._last, self._first_error = collections.deque(maxlen=TAIL_LINES), None
        pairs = ((process.stdout, sys.stdout), (process.stderr, sys.stderr))
        self._threads = [
            threading.Thread(target=self._copy, args=pair, daemon=True) for pair in pairs
        ]
        for each in self._threads:
            each.start()

    def tail(self) -> tuple[str, ...]:
        """Returns the first error, if there is one, then the last lines."""
        with _writing:
            last = tuple(self._last)
        return (self._first_error or "", *last)

    def wait(self, timeout_s: float) -> None:
        """Returns when all is copied of a process that has ended, or the time is over."""
        ends = time.monotonic() + timeout_s
        for each in self._threads:
            each.join(max(0.0, ends - time.monotonic()))

    def close(self) -> None:
        """Copies what is left; then nothing more."""
        self.wait(CLOSE_S)
        self._log.close()

    def _copy(self, pipe, shown) -> None:
        with pipe, contextlib.suppress(ValueError):  # of a log that was closed meanwhile
            while line := pipe.readline(LONGEST_LINE):
                self._take(line, shown)

    def _take(self, line: bytes, shown) -> None:
        text = line.decode(errors="replace").rstrip("\r\n")[:SHOWN_OF_LINE]
        with _writing:
            self._log.write(line)
            self._last.append(text)
            if self._first_error is None and ERROR.match(text):
                self._first_error = text
            # Nobody may read it any more, as after `| head`; the log has it.
            with contextlib.suppress(BrokenPipeError):
                shown.buffer.write(self._prefix + line.removesuffix(b"\n") + b"\n")
                shown.flush()
