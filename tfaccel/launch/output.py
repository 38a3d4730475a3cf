"""Copies the output of a rank to the launcher's terminal and to a file, and keeps the last lines.

The input is a process with pipes. The first line that looks like an error is kept, too.

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
LONGEST_LINE = 2**16  # bytes; longer lines are split
SHOWN_OF_LINE = 500  # characters, in a tail
# TensorFlow's first line of an error within a function; the user's own error follows.
VAGUE = "Graph execution error:"
STACK = "(most recent call first):"  # faulthandler prints this above each thread
# The last line of a traceback, or an error of `tfaccel train`.
ERROR = re.compile(r"^(tfaccel: error: |(\w+\.)*\w*(Error|Exception|Interrupt|Exit)\b(:|$))")


class Output:
    """Copies both pipes of a process, each in a thread. Failed writes do not stop the copying.

    Attributes:
      num_stacks: number of thread stacks that were printed so far.
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
        """Starts to copy.

        Args:
          process: a process with pipes for stdout and stderr.
          prefix: the prefix of each line that is shown.
          log: the file to which the lines are appended without the prefix.
          header: the first line for this process in the file, which may have earlier launches.
          terminals: where the lines are shown.
        """
        self._prefix, self._path, self._has_complained = prefix.encode(), log, False
        self._last, self._first_error = collections.deque(maxlen=TAIL_LINES), None
        self.num_stacks = 0
        self._lock = threading.Lock()  # for the fields above; never held during a write
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
        """True if everything is copied, and the process has ended."""
        return not any(each.is_alive() for each in self._threads)

    def tail(self) -> tuple[str, ...]:
        """Returns the first error, or "" if there is none, then the last lines."""
        with self._lock:
            return (self._first_error or "", *self._last)

    def close(self, timeout_s: float) -> None:
        """Waits this long for the rest to be copied. The threads copy on after that."""
        ends = time.monotonic() + timeout_s
        for each in self._threads:
            each.join(max(0.0, ends - time.monotonic()))
        if self.is_done and self._log:
            self._log.close()

    def _copy(self, pipe, terminal: Terminal) -> None:
        # Read to the end in any case: a rank with a closed or full pipe would die or wait.
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
            is_open = self._first_error is None or self._first_error.endswith(VAGUE)
            if is_open and ERROR.match(text):
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
                "launch: cannot write %s (%s); the rank continues, and its output is only shown",
                self._path,
                error.strerror,
            )
