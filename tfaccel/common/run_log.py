"""The log of a run: a summary on standard error, and everything in the workdir's log.txt.

All records go through the logger "tfaccel". Records from before the workdir is known also go to
log.txt.

    run_log.show()
    run_log.summary("device: %s", ...)           # on standard error and in the file
    log.info("compile cache: %s", ...)           # in the file; on standard error if TFACCEL_VERBOSE
    with run_log.kept() as kept:
        ...
        kept.write_to(workdir / "log.txt")

Every automatic choice is logged with its reason; TFACCEL_VERBOSE=1 shows all of them. A program
that has its own handlers, for "tfaccel" or the root logger, gets all records and decides itself.
"""

import contextlib
import logging
import os
import pathlib
import shutil
import sys
import textwrap
import time
from collections.abc import Iterator

from tfaccel.common.own_files import open_own
from tfaccel.common.redact import Redacted

log = logging.getLogger("tfaccel")

SUMMARY = 25  # between INFO and WARNING
VARIABLE = "TFACCEL_VERBOSE"
FILE = "log.txt"  # in a workdir
MOST_KEPT = 10_000  # records that are kept before there is a file

logging.addLevelName(SUMMARY, "SUMMARY")


def summary(message: str, *arguments: object) -> None:
    """Logs a message that is always shown. It takes the arguments of `log.info`."""
    log.log(SUMMARY, message, *arguments, stacklevel=2)


def spoke_at() -> float:
    """Returns `time.monotonic()` of the newest line on standard error; 0 before the first one."""
    return _OnStderr.spoke_at


def let_pass(text: str) -> bool:
    """Shows a text on the terminal, or in the notebook, until the next line replaces it.

    Returns:
      Whether standard error is a terminal or a notebook. If not, or if the program has log handlers
      of its own, the text is not shown.
    """
    handler = _on_stderr()
    return handler is not None and handler.let_pass(text)


def pass_on() -> None:
    """Removes the text that `let_pass` shows, if there is one."""
    handler = _on_stderr()
    if handler is not None:
        handler.pass_on()


def _on_stderr() -> "_OnStderr | None":
    return next((each for each in log.handlers if isinstance(each, _OnStderr)), None)


def shows_all() -> bool:
    """Returns whether TFACCEL_VERBOSE asks to show all records."""
    return os.environ.get(VARIABLE, "").lower() not in ("", "0", "false", "no", "off")


def show(*, speaks: bool = True) -> None:
    """Shows the log on standard error, unless the program has log handlers of its own.

    Args:
      speaks: whether to show the summary. It is False for workers other than the chief, which would
        repeat the chief's summary; only their warnings are shown.
    """
    if log.level == logging.NOTSET:
        log.setLevel(logging.INFO)
    others = [each for each in log.handlers if not isinstance(each, Kept | _OnStderr)]
    if others or logging.getLogger().handlers:
        return
    handler = _on_stderr()
    if handler is None:
        handler = _OnStderr()
        log.addHandler(handler)
        log.propagate = False
    handler.setLevel(
        logging.INFO if shows_all() else SUMMARY if speaks else logging.WARNING,
    )


class _OnStderr(logging.StreamHandler):
    """Writes to the current standard error."""

    spoke_at = 0.0

    def __init__(self):
        super().__init__(sys.stderr)
        self.setFormatter(Redacted("tfaccel: %(message)s"))
        self._passing = ""  # the text that the next line replaces

    def emit(self, record: logging.LogRecord) -> None:
        self._clear()
        super().emit(record)
        _OnStderr.spoke_at = time.monotonic()

    def let_pass(self, text: str) -> bool:
        """See the function."""
        if not _redraws(self.stream):
            return False
        if self.level <= SUMMARY:
            with self.lock:
                text = f"tfaccel: {text}"[: max(20, shutil.get_terminal_size().columns) - 1]
                if text != self._passing:
                    self._clear()
                    self._write(text)
                    self._passing = text
        return True

    def pass_on(self) -> None:
        """See the function."""
        with self.lock:
            self._clear()

    def _clear(self) -> None:
        if self._passing:
            blanks = " " * len(self._passing)
            self._write(f"\r{blanks}\r" if _is_notebook(self.stream) else "\r\x1b[K")
            self._passing = ""

    def _write(self, text: str) -> None:
        with contextlib.suppress(OSError, ValueError):  # closed
            self.stream.write(text)
            self.stream.flush()

    def format(self, record: logging.LogRecord) -> str:
        return wrapped(super().format(record), self.stream)


def _redraws(stream) -> bool:
    """Returns whether a line can be replaced: on a terminal, and in the output of a notebook."""
    if _is_notebook(stream):
        return True
    with contextlib.suppress(ValueError):  # closed
        return stream.isatty()
    return False


def _is_notebook(stream) -> bool:
    """Returns whether a stream is the output of a notebook, which knows no codes but `\\r`."""
    return type(stream).__module__.partition(".")[0] == "ipykernel"


def wrapped(text: str, stream) -> str:
    """Returns text wrapped between words at a terminal's width; unchanged without a terminal.

    Words are never broken, so that they can be copied. All lines but the first are indented.
    """
    if stream is None or not stream.isatty():
        return text
    width = max(20, shutil.get_terminal_size().columns)
    wrapper = textwrap.TextWrapper(
        width,
        subsequent_indent="  ",
        break_long_words=False,
        break_on_hyphens=False,
        replace_whitespace=False,
    )
    lines = text.split("\n")
    return "\n".join(line if len(line) <= width else wrapper.fill(line) for line in lines)


class Kept(logging.Handler):
    """A log handler that keeps the records until it is told the file to write them to.

    A file that cannot be written causes one warning and no error.
    """

    def __init__(self):
        """Starts to keep records in memory."""
        super().__init__(logging.INFO)
        self.setFormatter(Redacted("%(asctime)s %(levelname)s %(message)s"))
        self._waiting, self._file, self._path, self._has_failed = [], None, None, False

    def write_to(self, path: pathlib.Path) -> None:
        """Appends the kept records to a file, and from now on every new record."""
        self._path = path
        try:
            number = open_own(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            self._file = open(number, "ab", buffering=0)  # noqa: SIM115  closed by `close`
        except OSError as error:
            return self._fail(error)
        waiting, self._waiting = self._waiting, []
        return self._write("".join(waiting))

    def emit(self, record: logging.LogRecord) -> None:
        """Writes the record, or keeps it until there is a file."""
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
            self._has_failed = True  # the warning below comes here too
            log.warning(
                "log: %s cannot be written (%s); the run continues", self._path, error.strerror
            )


@contextlib.contextmanager
def kept() -> Iterator[Kept]:
    """Keeps all records within the context; call `write_to` when the file is known."""
    if log.level == logging.NOTSET:
        log.setLevel(logging.INFO)
    handler = Kept()
    log.addHandler(handler)
    try:
        yield handler
    finally:
        log.removeHandler(handler)
        handler.close()
