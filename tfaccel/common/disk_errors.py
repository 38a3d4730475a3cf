"""Why a file cannot be written, and what to do about it, in words that follow from the error.

Takes an OSError or an error of TensorFlow's; gives the end of a sentence.

    raise RunError(f"{path} {not_written(error, path.parent)}, or give another --workdir")
    # "/runs/a/x cannot be written (Disk quota exceeded): remove files of yours there, ..."
"""

import errno
import os
import pathlib
import shutil

OF_DISKS = frozenset(
    (
        *(errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.ESTALE, errno.EIO),
        *(errno.EMFILE, errno.ENFILE, errno.ENAMETOOLONG),
    )
)


def not_written(error: OSError, where: pathlib.Path, *, num_bytes: int | None = None) -> str:
    """Returns "cannot be written (the cause): what to do", without a full stop.

    Args:
      error: what the system said.
      where: the folder of the file; it may not exist.
      num_bytes: that the file needs; None where nobody knows.
    """
    return (
        f"cannot be written ({error.strerror or error}): {cure(error, where, num_bytes=num_bytes)}"
    )


def cure(error: OSError, where: pathlib.Path, *, num_bytes: int | None = None) -> str:
    """Returns what to do about an error that came while a file was written."""
    needs = f"it needs {mib(num_bytes)}" if num_bytes is not None else ""
    folder = existing(where)
    match error.errno or _number_in(str(error)):
        case errno.ENOSPC:
            return _full(folder, needs)
        case errno.EDQUOT:
            said = "remove files of yours on that disk, or ask for a larger quota"
            return f"{needs}; {said}" if needs else said
        case errno.EFBIG:
            said = (
                "the file would be larger than a file may be; raise the limit (ulimit -f), or "
                "use a file system that takes larger files"
            )
            return f"{needs}; {said}" if needs else said
        case errno.EROFS:
            return f"{folder} is on a file system that is mounted read-only; mount it for writing"
        case errno.ESTALE:
            return (
                f"the network file system no longer knows {folder}, as after its server removed "
                "or exported it anew; mount it again"
            )
        case errno.EPERM | errno.EACCES:
            return (
                f"this user, or an attribute or security rule of {folder}, does not allow it; "
                "change that"
            )
        case errno.EIO:
            return f"the disk or network that holds {folder} fails; look into the system's log"
        case errno.EMFILE | errno.ENFILE:
            return "too many files are open; raise the limit (ulimit -n)"
        case errno.ENAMETOOLONG:
            return "the name is longer than the file system takes; use a shorter one"
        case errno.ELOOP:
            return "there is a link where a file of tfaccel's belongs; remove the link"
        case errno.ENOENT | errno.ENOTDIR:
            return f"its folder is gone, or one of its folders is a file; {folder} is there"
    return "mend what the system names"


def from_tensorflow(error: Exception, path: pathlib.Path) -> OSError:
    """Returns an error of TensorFlow's file system as Python's, with the number of its cause.

    TensorFlow keeps the system's number to itself, but writes its words: "...; File too large". An
    error without such words is EIO, with TensorFlow's words.
    """
    message = getattr(error, "message", str(error)).partition(" [Op:")[0]
    message = message.rpartition("}} ")[2]  # before it, the name of a generated function
    if number := _number_in(message):
        return OSError(number, os.strerror(number), str(path))
    if type(error).__name__ == "ResourceExhaustedError":
        return OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
    return OSError(errno.EIO, message, str(path))


def _number_in(message: str) -> int | None:
    """Returns the number of the system's error that some library tells by its words alone."""
    of_words = {os.strerror(each).lower(): each for each in (*OF_DISKS, errno.EPERM, errno.EACCES)}
    return next((number for words, number in of_words.items() if words in message.lower()), None)


def mib(num_bytes: int) -> str:
    """Returns bytes in MiB, in words."""
    return f"{num_bytes / 2**20:,.1f} MiB"


def free_bytes(folder: pathlib.Path) -> int:
    """Returns what is free for this user where the folder is, or would be."""
    return shutil.disk_usage(existing(folder)).free


def _full(folder: pathlib.Path, needs: str) -> str:
    found = os.statvfs(folder)
    if found.f_files and not found.f_favail:
        return (
            f"the file system of {folder} has no inode left, so that it takes no more files; "
            "remove some files there"
        )
    free = f"{mib(found.f_bavail * found.f_frsize)} are free there; make room"
    return f"{needs}, and {free}" if needs else free


def existing(folder: pathlib.Path) -> pathlib.Path:
    """Returns the nearest folder, upwards, that this process can see."""
    folder = pathlib.Path(folder).absolute()
    for each in (folder, *folder.parents):
        try:
            os.statvfs(each)
        except OSError:  # also of a network file system that has lost it
            continue
        if each.is_dir():
            return each
    return pathlib.Path("/")
