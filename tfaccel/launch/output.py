"""What a rank prints: shown by its launcher with a prefix, kept in a file, and the last of it.

Takes a process with pipes; gives its last lines, and the first that looks like an error.

    output = Output(process, prefix="[rank 1] ", log=path, header="...", terminals=terminals)
    output.tail()       # ("ValueError: ...", "...", ...)
    output.close(5)     # when the process has ended
"""

import collections
import logging
import os
import pathlib
import re
import subprocess
import threading
import time
from typing import BinaryIO

from tfaccel.common.own_files import open_own
from tfaccel.launch.terminal import Terminal, Terminals

log = logging.getLogger("tfaccel")

TAIL_LINES = 15
LONGEST_LINE = 2**16  # bytes; what is longer comes in pieces
SHOWN_OF_LINE = 500  # characters, in a tail
STACK = "(most recent call first):"  # what faulthandler says above each thread
# The last line of a traceback, and what `tfaccel train` says.
ERROR = re.compile(r"^(tfaccel: error: |(\w+\.)*\w*(Error|Exception|Interrupt|Exit)\b(:|$))")


class Output:
    """Copies both pipes of a process, each in a thread, whatever becomes of the copies.

    Attributes:
      num_stacks: threads whose stacks were printed so far.
    """

    def __init__(
        self,
        process: subprocess.Popen,
        *,
        prefix: str,
        log: pathlib.Path,
        header: str,
        terminals: Terminals,
    ):
        """Begins to copy.

        Args:
          process: whose stdout and stderr are pipes.
          prefix: of each line that is shown.
          log: a file to which the lines are added as they are.
          header: its first line of this process: another launch may have written before.
          terminals: where lines are shown.
        """
        self._prefix, self._path, self._has_complained = prefix.encode(), log, False
        self._last, self._first_error = collections.deque(maxlen=TAIL_LINES), None
        self.num_stacks = 0
        self._lock = threading.Lock()  # of those; never held while something is written
        self._log = self._opened()
        self._write(f"{header}\n".encode(errors="replace"))
        pairs = ((process.stdout, terminals.out), (process.stderr, terminals.err))
        self._threads = [
            threading.Thread(target=self._copy, args=pair, daemon=True) for pair in pairs
        ]
        for each in self._threads:
            each.start()

    @property
    def is_done(self) -> bool:
        """Whether all is copied, of a process that has ended."""
        return not any(each.is_alive() for each in self._threads)

    def tail(self) -> tuple[str, ...]:
        """Returns the first error, if there is one, then the last lines."""
        with self._lock:
            return (self._first_error or "", *self._last)

    def close(self, timeout_s: float) -> None:
        """Copies what is left, for as long; what comes later goes on to be copied."""
        ends = time.monotonic() + timeout_s
        for each in self._threads:
            each.join(max(0.0, ends - time.monotonic()))
        if self.is_done and self._log:
            self._log.close()

    def _copy(self, pipe, terminal: Terminal) -> None:
        # To its end in any case: a rank whose pipe is closed or full would die of it, or wait.
        with pipe:
            while line := pipe.readline(LONGEST_LINE):
                self._remember(line)
                self._write(line)
                terminal.show(self._prefix + line.removesuffix(b"\n") + b"\n")

    def _remember(self, line: bytes) -> None:
        text = line.decode(errors="replace").rstrip("\r\n")[:SHOWN_OF_LINE]
        with self._lock:
            self._last.append(text)
            self.num_stacks += text.endswith(STACK)
            if self._first_error is None and ERROR.match(text):
                self._first_error = text

    def _opened(self) -> BinaryIO | None:
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            number = open_own(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            return open(number, "ab", buffering=0)
        except OSError as error:
            self._complain(error)
            return None

    def _write(self, data: bytes) -> None:
        try:
            if self._log:
                self._log.write(data)
        except OSError as error:
            self._complain(error)

    def _complain(self, error: OSError) -> None:
        if not self._has_complained:
            self._has_complained = True
            log.error(
                "launch: cannot write %s (%s); the rank goes on, and what it prints is only shown",
                self._path,
                error.strerror,
            )
