"""What outputs share that a stopped program continues: a lock, settings, and errors in words.

with locked(folder / "lock", folder=folder, output=output) as descriptor:
    check_settings(file, file.read_bytes(), settings, folder=folder)
    with errors_in_words(output):
        ...
"""

import contextlib
import fcntl
import json
import os
import pathlib
from collections.abc import Iterator, Mapping

from tfaccel.common.disk_errors import not_written
from tfaccel.common.errors import RunError, UserError
from tfaccel.common.own_files import open_own


@contextlib.contextmanager
def locked(file: pathlib.Path, *, folder: pathlib.Path, output: pathlib.Path) -> Iterator[int]:
    """Opens a file, makes it if needed, and keeps other processes out within the context.

    Yields its descriptor, to read and write.

    Raises:
      RunError: another process writes to the folder, or the file cannot be made.
    """
    with errors_in_words(output):
        lock = open_own(file, os.O_RDWR | os.O_CREAT)
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise RunError(
                f"another process writes to {folder}; wait for it, or give another output"
            ) from None
        yield lock
    finally:
        os.close(lock)


def check_settings(
    file: pathlib.Path, written: bytes, settings: Mapping[str, object], *, folder: pathlib.Path
) -> None:
    """Raises UserError if a file of JSON is damaged, or has other settings than these."""
    try:
        before = json.loads(written)
    except ValueError:
        before = None
    if not isinstance(before, dict):
        raise UserError(f"{file} is damaged; remove {folder}")
    names = [name for name in settings if before.get(name) != settings[name]]
    if names:
        raise UserError(
            f"{folder} has the first part of another output: its {', '.join(names)} differ; give "
            "the same files and flags to continue it, or remove it to start again"
        )


@contextlib.contextmanager
def errors_in_words(output: pathlib.Path) -> Iterator[None]:
    """Raises RunError for an OSError within the context."""
    try:
        yield
    except OSError as error:
        raise RunError(
            f"output {output} {not_written(error, output.parent)}; then run the same command "
            "again, which continues"
        ) from error
