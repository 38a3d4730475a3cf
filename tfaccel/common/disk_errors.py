"""The reason why a file cannot be written, and how to fix it, as the end of an error sentence.

The functions take an OSError or an error of TensorFlow.

    raise RunError(f"{path} {not_written(error, path.parent)}, or give another --workdir")
    # "/runs/a/x cannot be written (Disk quota exceeded): remove some of your files there, ..."
"""

import errno
import os
import pathlib
import shutil

from tfaccel.common.errors import UserError

OF_DISKS = frozenset(
    (
        *(errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.ESTALE, errno.EIO),
        *(errno.EMFILE, errno.ENFILE, errno.ENAMETOOLONG),
    )
)


def not_written(error: OSError, where: pathlib.Path, *, num_bytes: int | None = None) -> str:
    """Returns "cannot be written (reason): how to fix it", without a full stop.

    Args:
      error: the system's error.
      where: the folder of the file; it may not exist.
      num_bytes: the size of the file; None if it is unknown.
    """
    return (
        f"cannot be written ({error.strerror or error}): {cure(error, where, num_bytes=num_bytes)}"
    )


def cure(error: OSError, where: pathlib.Path, *, num_bytes: int | None = None) -> str:
    """Returns how to fix an error that occurred while a file was written."""
    needs = f"it needs {mib(num_bytes)}; " if num_bytes is not None else ""
    folder = existing(where)
    match error.errno or _number_in(str(error)):
        case errno.ENOSPC:
            return _full(folder, num_bytes)
        case errno.EDQUOT:
            return f"{needs}remove some of your files on that disk, or ask for a larger quota"
        case errno.EFBIG:
            return (
                f"{needs}the file would exceed the largest allowed size; raise the limit (ulimit "
                "-f), or use a file system that allows larger files"
            )
        case errno.EROFS:
            return f"{folder} is on a file system that is mounted read-only; mount it for writing"
        case errno.ESTALE:
            return (
                f"the network file system lost {folder}, perhaps because its server removed it or "
                "exported it again; mount it again"
            )
        case errno.EPERM | errno.EACCES:
            return (
                f"this user has no permission, or an attribute or a security rule of {folder} "
                "forbids it; change the permissions or the rule"
            )
        case errno.EIO:
            return f"the disk or network that holds {folder} fails; see the system's log"
        case errno.EMFILE | errno.ENFILE:
            return "too many files are open; raise the limit (ulimit -n)"
        case errno.ENAMETOOLONG:
            return "the name is too long for the file system; use a shorter one"
        case errno.ELOOP:
            return "there is a link in place of one of tfaccel's files; remove the link"
        case errno.ENOENT | errno.ENOTDIR:
            return f"its folder does not exist or is a file; the nearest folder is {folder}"
    return "fix the problem that the system reports"


def from_tensorflow(error: Exception, path: pathlib.Path) -> OSError:
    """Returns an error of TensorFlow's file system as an OSError with an error number.

    TensorFlow hides the system's error number but keeps its text: "...; File too large". An error
    without such a text becomes EIO with TensorFlow's message.
    """
    message = getattr(error, "message", str(error)).partition(" [Op:")[0]
    message = message.rpartition("}} ")[2]  # cut off the name of a generated function
    if number := _number_in(message):
        return OSError(number, os.strerror(number), str(path))
    if type(error).__name__ == "ResourceExhaustedError":
        return OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
    return OSError(errno.EIO, message, str(path))


def _number_in(message: str) -> int | None:
    """Returns the system's error number for the text of its error in a library's message."""
    of_words = {os.strerror(each).lower(): each for each in (*OF_DISKS, errno.EPERM, errno.EACCES)}
    return next((number for words, number in of_words.items() if words in message.lower()), None)


def mib(num_bytes: int) -> str:
    """Returns a number of bytes as text in MiB."""
    return f"{num_bytes / 2**20:,.1f} MiB"


def free_bytes(folder: pathlib.Path) -> int:
    """Returns the bytes that this user can still write on the disk of the folder."""
    return shutil.disk_usage(existing(folder)).free


def check_free(folder: pathlib.Path, num_bytes: float, *, what: str, fix: str) -> int:
    """Returns the bytes that are free in a folder, which may not exist yet, if they suffice.

    Args:
      folder: where something will be written.
      num_bytes: the bytes that it takes.
      what: what needs them, for the error: "a checkpoint needs".
      fix: what helps beside more room, for the error: "give another folder".

    Raises:
      UserError: fewer bytes are free.
    """
    free = free_bytes(folder)
    if free < num_bytes:
        raise UserError(
            f"{what} {mib(num_bytes)} in {folder}, which has {mib(free)} free; make room, or {fix}"
        )
    return free


def _full(folder: pathlib.Path, num_bytes: int | None) -> str:
    found = os.statvfs(folder)
    if found.f_files and not found.f_favail:
        return (
            f"the file system of {folder} has no inodes left, so it cannot hold more files; remove "
            "some files there"
        )
    needs = f"it needs {mib(num_bytes)}, and " if num_bytes is not None else ""
    return f"{needs}{mib(found.f_bavail * found.f_frsize)} are free there; make room"


def existing(folder: pathlib.Path) -> pathlib.Path:
    """Returns the folder, or else the nearest folder above it that this process can see."""
    folder = pathlib.Path(folder).absolute()
    for each in (folder, *folder.parents):
        try:
            os.statvfs(each)
        except OSError:  # missing, or lost by a network file system
            continue
        if each.is_dir():
            return each
    return pathlib.Path("/")
