"""The folder that an export is written to: it gets its name only when it is complete.

`whole_or_not_at_all` takes the path of a new export and gives a folder beside it. It renames the
folder to `path` at the end, and removes folders that killed exports left.

    with whole_or_not_at_all(path) as folder: ...

    .1.tfaccel-x7c2k9ab/               being written, or left by a killed process
    .1.tfaccel-x7c2k9ab/export.lock    held by the process that writes; removed at the end
    1.tfaccel-x7c2k9ab.rejected/       failed its checks, and is kept for you to look at
"""

import contextlib
import errno
import fcntl
import logging
import os
import pathlib
import re
import shutil
import tempfile
from collections.abc import Iterator

import tensorflow as tf

from tfaccel.common.disk_errors import cure, from_tensorflow, not_written
from tfaccel.common.errors import RunError, UserError
from tfaccel.process.out_of_memory import is_out_of_memory
from tfaccel.training.checkpoint.folder import holds_only, to_disk

log = logging.getLogger("tfaccel")

LOCK = "export.lock"
# The files of an export. Some are first written under a name with a suffix.
_OURS = re.compile(
    r"(export\.lock|saved_model\.pb|fingerprint\.pb|variables|assets|model\.keras"
    r"|model\.onnx|model\.tflite|tfaccel\.json).*"
)


@contextlib.contextmanager
def whole_or_not_at_all(path: pathlib.Path) -> Iterator[pathlib.Path]:
    """Yields a folder beside `path` to write to. It becomes `path`, or after an error is removed.

    Folders that killed processes left there are removed first.

    Raises:
      UserError: the folder cannot be created.
      RunError: it cannot be written, for example because the disk is full.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        for folder in _unfinished(path):
            _remove_if_left(folder)
        unfinished = pathlib.Path(tempfile.mkdtemp(prefix=_prefix(path), dir=path.parent))
    except OSError as error:
        raise _cannot_be_made(path, error) from error
    try:
        unfinished.chmod(0o755)  # mkdtemp's 0700 would hide it from a server
        with _held(unfinished):
            yield unfinished
            for each in unfinished.rglob("*"):
                to_disk(each)
            (unfinished / LOCK).unlink(missing_ok=True)
            to_disk(unfinished)
            unfinished.rename(path)
        to_disk(path.parent)
    except (OSError, tf.errors.OpError) as error:
        if is_out_of_memory(str(error)):
            raise
        cause = error if isinstance(error, OSError) else from_tensorflow(error, path)
        # An error of TensorFlow about a model, not a file, has no errno.
        if isinstance(error, tf.errors.OpError) and cause.errno == errno.EIO:
            raise
        raise RunError(
            f"export path {path} {not_written(cause, path.parent)}, or use another path"
        ) from error
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)  # after a success it no longer exists


def check_can_be_made(path: pathlib.Path) -> None:
    """Checks whether the folder of an export can be created, and leaves nothing behind.

    Raises:
      UserError: it cannot; the message is that of `whole_or_not_at_all`.
    """
    missing = [each for each in path.parents if not os.path.lexists(each)]
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        os.rmdir(tempfile.mkdtemp(prefix=_prefix(path), dir=path.parent))
    except OSError as error:
        raise _cannot_be_made(path, error) from error
    finally:
        with contextlib.suppress(OSError):  # another process may have put something there
            for each in missing:
                each.rmdir()


def keep_rejected(unfinished: pathlib.Path, path: pathlib.Path) -> pathlib.Path:
    """Renames a folder that failed its checks so that it stays, and returns its new path."""
    (unfinished / LOCK).unlink(missing_ok=True)
    return unfinished.rename(path.with_name(f"{unfinished.name[1:]}.rejected"))


@contextlib.contextmanager
def _held(folder: pathlib.Path) -> Iterator[None]:
    """Within the context this process holds the folder's lock; the system frees it at any end."""
    lock, new = folder / LOCK, folder / f"{LOCK}.new"
    file = os.open(new, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            new.rename(lock)  # renamed only when locked, or another process could take it for left
        except OSError as error:
            new.unlink()
            log.info(
                "export: cannot lock %s (%s); if killed, it would not be removed", folder, error
            )
        yield
    finally:
        os.close(file)


def _cannot_be_made(path: pathlib.Path, error: OSError) -> UserError:
    return UserError(
        f"export path {path} cannot be created ({error.strerror}): {cure(error, path.parent)}, or "
        "use another path"
    )


def _prefix(path: pathlib.Path) -> str:
    return f".{path.name}.tfaccel-"


def _unfinished(path: pathlib.Path) -> list[pathlib.Path]:
    """Returns all processes' unfinished folders for `path`."""
    name = re.compile(re.escape(_prefix(path)) + r"[a-z0-9_]{8}")  # as tempfile makes them
    return [each for each in path.parent.iterdir() if name.fullmatch(each.name)]


def _remove_if_left(folder: pathlib.Path) -> None:
    """Removes a folder if its process has ended and it has only an export's files."""
    try:
        if not holds_only(folder, _OURS, subfolders=True):
            return
        file = os.open(folder / LOCK, os.O_RDWR | os.O_NOFOLLOW)
    except OSError:  # it cannot be read, or has no lock: it has just been created or finished
        return
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.fstat(file).st_nlink:  # else another process has just removed it
            _remove(folder)
            log.info("export: removed %s, which a killed export left", folder)
    except BlockingIOError:  # a running process holds the lock
        return
    except OSError as error:
        log.warning("export: cannot remove %s, which is unfinished (%s)", folder, error)
    finally:
        os.close(file)


def _remove(folder: pathlib.Path) -> None:
    """Removes the folder, its lock last. If this process is killed, the next one continues."""
    for each in folder.iterdir():
        if each.is_dir():
            shutil.rmtree(each)
        elif each.name != LOCK:
            each.unlink()
    (folder / LOCK).unlink()
    folder.rmdir()
