"""The launcher's stdout and stderr, written without ever waiting for a slow reader.

A thread per stream writes the lines.

    with Terminals() as terminals:
        terminals.out.show(b"[rank 0] loss 0.5\n")      # dropped if too much is waiting
        terminals.err.say(b"[launch] all ranks are done\n")
"""

import contextlib
import logging
import os
import select
import sys
import threading
import time
from typing import TextIO

from tfaccel.common.run_log import wrapped

log = logging.getLogger("tfaccel")

MOST_WAITING = 2**20  # bytes in each stream
# Wait this long for a slow reader: two ranks print 160000 lines/s, more than Python can copy
# (2026-11).
SLOW_READER_S = 1.0
CLOSE_S = 2.0


class Terminal:
    """A stream of the launcher."""

    def __init__(self, stream: TextIO | None, name: str):
        """Waits for lines. The stream is None if it is closed; the name is for messages."""
        # Use the descriptor: at exit Python waits for the stream's lock, which the thread may hold.
        self._fd, self._name = -1 if stream is None else stream.fileno(), name
        self._stream = stream if stream is not None and stream.isatty() else None
        self._waiting, self._size = [], 0
        self._num_left_out, self._is_closing, self._has_complained = 0, False, False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._write_all, daemon=True)
        self._thread.start()

    def show(self, line: bytes) -> None:
        """Takes a line of a rank. It may be dropped, because the rank's file has it."""
        line = self._fitted(line)
        with self._changed:
            # After the first dropped line, drop all until the waiting lines are written. This makes
            # one gap with one message, and one pause, not one per line.
            self._changed.wait_for(
                lambda: self._num_left_out or self._size <= MOST_WAITING, SLOW_READER_S
            )
            if self._num_left_out or self._size > MOST_WAITING:
                self._num_left_out += 1
            else:
                self._add(line)

    def say(self, line: bytes) -> None:
        """Takes a line of the launcher. It is never dropped, because no file has it."""
        line = self._fitted(line)
        with self._changed:
            self._add(line)

    def close(self, timeout_s: float) -> None:
        """Waits until everything is written, or the time is over."""
        with self._changed:
            self._is_closing = True
            self._changed.notify_all()
        self._thread.join(timeout_s)

    def _fitted(self, line: bytes) -> bytes:
        """Returns a line wrapped between words, because a terminal would break it anywhere."""
        if self._stream is None or b"\r" in line or b"\x1b" in line:
            return line
        text = line.decode(errors="surrogateescape")
        return wrapped(text, self._stream).encode(errors="surrogateescape")

    def _add(self, line: bytes) -> None:
        self._waiting.append(line)
        self._size += len(line)
        self._changed.notify_all()

    def _write_all(self) -> None:
        while lines := self._next():
            self._write(lines)

    def _next(self) -> bytes:
        """Waits for lines and returns them; returns nothing at the end."""
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._num_left_out or self._is_closing)
            if self._waiting:
                lines = b"".join(self._waiting)
                self._waiting, self._size = [], 0
                self._changed.notify_all()
                return lines
            count, self._num_left_out = self._num_left_out, 0
        if not count:
            return b""
        why = "they were not read in time; the ranks' files have all lines"
        return f"[launch] {count} lines are dropped here: {why}\n".encode()

    def _write(self, data: bytes) -> None:
        try:
            while data:
                data = data[self._write_some(data) :]
        except OSError as error:
            if not self._has_complained:
                self._has_complained = True
                log.warning(
                    "launch: cannot write to %s (%s); the ranks' files have all lines",
                    self._name,
                    error.strerror,
                )

    def _write_some(self, data: bytes) -> int:
        try:
            return os.write(self._fd, data)
        except BlockingIOError:  # another process has made the terminal non-blocking
            select.select((), (self._fd,), ())
            return 0


class Terminals(contextlib.AbstractContextManager):
    """Both streams.

    Attributes:
      out: stdout.
      err: stderr. It is the same object if both are one file, so that lines keep their order.
    """

    def __init__(self):
        """Waits for lines."""
        self.out = Terminal(sys.stdout, "stdout")
        self.err = self.out if _are_one() else Terminal(sys.stderr, "stderr")

    def __exit__(self, *_):
        """Writes the waiting lines, for at most CLOSE_S."""
        ends = time.monotonic() + CLOSE_S
        for each in (self.out, self.err):
            each.close(max(0.0, ends - time.monotonic()))


def _are_one() -> bool:
    both = (sys.stdout, sys.stderr)
    return None not in both and os.path.sameopenfile(*(each.fileno() for each in both))
