"""Files of tfaccel's own in folders that others may write to: no link there leads it elsewhere.

Takes paths; opens or replaces what is there, and only that.

    number = open_own(path / "run.lock", os.O_RDWR | os.O_CREAT)
    replace(path / "config.json", b"{}")
"""

import contextlib
import errno
import os
import pathlib
import secrets
import stat

MODE = 0o644


def open_own(path: pathlib.Path, flags: int) -> int:
    """Opens a file for writing, and returns its descriptor. No link is followed.

    Args:
      path: of the file; the links of its folders are followed.
      flags: of `os.open`. With O_TRUNC, the file is emptied once it is known to be the right one.

    Raises:
      OSError: as of `os.open`; ELOOP where a symbolic link, or a file that has a second name, is
        there; EINVAL where it is a pipe, a device or a folder.
    """
    # O_NONBLOCK: a pipe that somebody put there would be waited for.
    wanted = flags & ~os.O_TRUNC | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    number = os.open(path, wanted, MODE)
    try:
        found = os.fstat(number)
        if not stat.S_ISREG(found.st_mode):
            raise OSError(errno.EINVAL, "it is no plain file", str(path))
        if found.st_nlink > 1:
            raise OSError(errno.ELOOP, "the file has a second name", str(path))
        if flags & os.O_TRUNC:
            os.ftruncate(number, 0)
    except BaseException:
        os.close(number)
        raise
    return number


def replace(path: pathlib.Path, data: bytes, *, mode: int = MODE) -> None:
    """Writes a whole file in place of what has its name, or leaves that as it is.

    Where a link has the name, the link is replaced, and what it leads to stays.

    Args:
      path: of the file.
      data: all that it is to hold.
      mode: of a file of its own; the process's umask takes from it.

    Raises:
      OSError: it cannot be written.
    """
    # Nobody knows the name before, and it must be new. What a killed process left is told by it.
    aside = path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(4)}")
    try:
        number = os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, mode)
        with open(number, "wb") as file:
            file.write(data)
        os.replace(aside, path)
    except OSError:
        with contextlib.suppress(OSError):
            aside.unlink()
        raise
