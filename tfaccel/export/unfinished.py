"""The folder that an export is filled in: whole under its name or not there, and none left behind.

Takes the path of an export that is not there yet; gives a folder beside it, which has that name as
soon as it is whole.

    with whole_or_not_at_all(path) as folder: ...

    .1.tfaccel-x7c2k9ab/               being filled, or left by a process that was killed
    .1.tfaccel-x7c2k9ab/export.lock    held by the process that fills it, gone when it is whole
    1.tfaccel-x7c2k9ab.rejected/       answers otherwise than its model, and is kept to be looked at
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
from tfaccel.training.checkpoint.folder import to_disk

log = logging.getLogger("tfaccel")

LOCK = "export.lock"
# What an export holds; some of it is written under a longer name first.
_OURS = re.compile(
    r"(export\.lock|saved_model\.pb|fingerprint\.pb|variables|assets|model\.keras|model\.onnx"
    r"|tfaccel\.json).*"
)


@contextlib.contextmanager
def whole_or_not_at_all(path: pathlib.Path) -> Iterator[pathlib.Path]:
    """Within the context, a folder beside `path` is filled; it then has that name, or is gone.

    What a killed process left there is removed first.

    Raises:
      UserError: the folder cannot be made.
      RunError: it cannot be written, as on a full disk.
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
        # What TensorFlow says of a model, not of a file, has none of the system's words.
        if isinstance(error, tf.errors.OpError) and cause.errno == errno.EIO:
            raise
        raise RunError(
            f"export path {path} {not_written(cause, path.parent)}, or give another"
        ) from error
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)  # it is there only after a failure


def check_can_be_made(path: pathlib.Path) -> None:
    """Tries whether a folder for an export can be made there, and leaves nothing behind.

    Raises:
      UserError: it cannot, in the words of `whole_or_not_at_all`.
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
    """Gives a folder that is not to become `path` a name under which it stays, and returns that."""
    (unfinished / LOCK).unlink(missing_ok=True)
    return unfinished.rename(path.with_name(f"{unfinished.name[1:]}.rejected"))


@contextlib.contextmanager
def _held(folder: pathlib.Path) -> Iterator[None]:
    """Within the context the folder is a live process's: however that ends, the system lets go."""
    lock, new = folder / LOCK, folder / f"{LOCK}.new"
    file = os.open(new, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            new.rename(lock)  # not before it is held, or another might take it for a dead one's
        except OSError as error:
            new.unlink()
            log.info("export: %s cannot be locked (%s); killed, it would stay", folder, error)
        yield
    finally:
        os.close(file)


def _cannot_be_made(path: pathlib.Path, error: OSError) -> UserError:
    return UserError(
        f"export path {path} cannot be made ({error.strerror}): {cure(error, path.parent)}, or "
        "give another"
    )


def _prefix(path: pathlib.Path) -> str:
    return f".{path.name}.tfaccel-"


def _unfinished(path: pathlib.Path) -> list[pathlib.Path]:
    """Returns the folders, of whichever process, that are to become `path`."""
    name = re.compile(re.escape(_prefix(path)) + r"[a-z0-9_]{8}")  # as tempfile makes them
    return [each for each in path.parent.iterdir() if name.fullmatch(each.name)]


def _remove_if_left(folder: pathlib.Path) -> None:
    """Removes a folder whose process has ended, unless others put files there."""
    if not _holds_ours_alone(folder):
        return
    try:
        file = os.open(folder / LOCK, os.O_RDWR | os.O_NOFOLLOW)
    except OSError:  # there is none, as where it begins or has just been finished
        return
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.fstat(file).st_nlink:  # or another process has just removed it
            _remove(folder)
            log.info("export: %s is removed, which an export that was killed had left", folder)
    except BlockingIOError:  # a live one's
        return
    except OSError as error:
        log.warning("export: %s, which is not finished, cannot be removed (%s)", folder, error)
    finally:
        os.close(file)


def _holds_ours_alone(folder: pathlib.Path) -> bool:
    """Returns whether it is a folder, not a link to one, of what is named as we name it."""
    if folder.is_symlink() or not folder.is_dir():
        return False
    with contextlib.suppress(OSError):  # it is gone, or not to be read
        return all(_OURS.fullmatch(name) for name in os.listdir(folder))
    return False


def _remove(folder: pathlib.Path) -> None:
    """Removes it, its lock last: should this process be killed, the next one goes on."""
    for each in folder.iterdir():
        if each.is_dir() and not each.is_symlink():
            shutil.rmtree(each)
        elif each.name != LOCK:
            each.unlink()
    (folder / LOCK).unlink()
    folder.rmdir()
