"""What a run says of itself: in short where a person looks, all of it in a file.

Takes the records of the logger "tfaccel"; gives standard error those that matter, and a workdir's
log.txt all of them, those from before the workdir was known too.

    run_log.show()
    run_log.summary("device: %s", ...)           # seen, and in the file
    log.info("compile cache: %s", ...)           # in the file; seen where everything is asked for
    with run_log.kept() as kept:
        ...
        kept.write_to(workdir / "log.txt")

A choice that tfaccel makes is always logged with its reason; TFACCEL_VERBOSE=1 shows all at once. A
program with handlers of its own, for "tfaccel" or for all logs, has all records, and decides alone.
"""

import contextlib
import logging
import os
import pathlib
import shutil
import sys
import textwrap
from collections.abc import Iterator

from tfaccel.common.own_files import open_own
from tfaccel.common.redact import Redacted

log = logging.getLogger("tfaccel")

SUMMARY = 25  # between INFO and WARNING
VARIABLE = "TFACCEL_VERBOSE"
FILE = "log.txt"  # in a workdir
MOST_KEPT = 10_000  # records, before there is a file for them

logging.addLevelName(SUMMARY, "SUMMARY")


def summary(message: str, *arguments: object) -> None:
    """Logs what a person is to see without asking, as `log.info` takes it."""
    log.log(SUMMARY, message, *arguments, stacklevel=2)


def shows_all() -> bool:
    """Returns whether all records are to be seen, by TFACCEL_VERBOSE."""
    return os.environ.get(VARIABLE, "").lower() not in ("", "0", "false", "no", "off")


def show(*, speaks: bool = True) -> None:
    """Lets the log be seen on standard error, unless the program sends its own log elsewhere.

    Args:
      speaks: whether it is to say what matters; False for a worker beside the chief, which says
        the same: its warnings are seen alone.
    """
    if log.level == logging.NOTSET:
        log.setLevel(logging.INFO)
    others = [each for each in log.handlers if not isinstance(each, Kept | _OnStderr)]
    if others or logging.getLogger().handlers:
        return
    handler = next((each for each in log.handlers if isinstance(each, _OnStderr)), None)
    if handler is None:
        handler = _OnStderr()
        log.addHandler(handler)
        log.propagate = False
    handler.setLevel(
        logging.INFO if shows_all() else SUMMARY if speaks else logging.WARNING,
    )


class _OnStderr(logging.StreamHandler):
    """Writes to what is standard error now."""

    def __init__(self):
        super().__init__(sys.stderr)
        self.setFormatter(Redacted("tfaccel: %(message)s"))

    def format(self, record: logging.LogRecord) -> str:
        return wrapped(super().format(record), self.stream)


def wrapped(text: str, stream) -> str:
    """Returns text broken between words at a terminal's width; as it is, where there is none.

    Words stay whole, to be copied. The lines that follow are indented.
    """
    if stream is None or not stream.isatty():
        return text
    width = max(20, shutil.get_terminal_size().columns)
    return "\n".join(_broken(line, width) for line in text.split("\n"))


def _broken(line: str, width: int) -> str:
    if len(line) <= width:
        return line
    return textwrap.fill(
        line,
        width,
        subsequent_indent="  ",
        break_long_words=False,
        break_on_hyphens=False,
        replace_whitespace=False,
    )


class Kept(logging.Handler):
    """Keeps the records, and writes them where it is told to.

    That they cannot be written is said once, and ends nothing.
    """

    def __init__(self):
        """Keeps what comes, in memory."""
        super().__init__(logging.INFO)
        self.setFormatter(Redacted("%(asctime)s %(levelname)s %(message)s"))
        self._waiting, self._file, self._path, self._has_failed = [], None, None, False

    def write_to(self, path: pathlib.Path) -> None:
        """Adds what was kept to a file, and from now on what comes."""
        self._path = path
        try:
            number = open_own(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            self._file = open(number, "ab", buffering=0)  # noqa: SIM115  closed by `close`
        except OSError as error:
            return self._fail(error)
        waiting, self._waiting = self._waiting, []
        return self._write("".join(waiting))

    def emit(self, record: logging.LogRecord) -> None:
        """Writes the record, or keeps it."""
        line = f"{self.format(record)}\n"
        if self._file is not None:
            self._write(line)
        elif self._path is None and len(self._waiting) < MOST_KEPT:
            self._waiting.append(line)

    def close(self) -> None:
        """Closes the file."""
        if self._file is not None:
            self._file.close()
            self._file = None
        super().close()

    def _write(self, text: str) -> None:
        try:
            self._file.write(text.encode(errors="replace"))
        except OSError as error:
            self._fail(error)

    def _fail(self, error: OSError) -> None:
        if not self._has_failed:
            self._has_failed = True  # before the next line, which comes here too
            log.warning(
                "log: %s cannot be written (%s); the run goes on", self._path, error.strerror
            )


@contextlib.contextmanager
def kept() -> Iterator[Kept]:
    """Within the context, all records are kept, and written once it is known where to."""
    if log.level == logging.NOTSET:
        log.setLevel(logging.INFO)
    handler = Kept()
    log.addHandler(handler)
    try:
        yield handler
    finally:
        log.removeHandler(handler)
        handler.close()
