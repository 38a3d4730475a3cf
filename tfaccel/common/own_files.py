"""Writes tfaccel's own files in folders to which other users may write, without following links.

A link that somebody put there cannot lead a write to another file.

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
    """Opens a file for writing and returns its descriptor. The name itself must not be a link.

    Args:
      path: the file. Links among its folders are followed.
      flags: the flags of `os.open`. O_TRUNC takes effect after the checks of the file.

    Raises:
      OSError: `os.open` fails; or ELOOP for a symbolic link or a file with a second name, EINVAL
        for a pipe, a device or a folder.
    """
    # O_NONBLOCK: otherwise os.open would wait if somebody put a pipe there.
    wanted = flags & ~os.O_TRUNC | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    number = os.open(path, wanted, MODE)
    try:
        found = os.fstat(number)
        if not stat.S_ISREG(found.st_mode):
            raise OSError(errno.EINVAL, "it is not a regular file", str(path))
        if found.st_nlink > 1:
            raise OSError(errno.ELOOP, "the file has a second name", str(path))
        if flags & os.O_TRUNC:
            os.ftruncate(number, 0)
    except BaseException:
        os.close(number)
        raise
    return number


def replace(path: pathlib.Path, data: bytes, *, mode: int = MODE) -> None:
    """Writes a whole file in place of the old one; on failure, the old file stays as it is.

    If the path is a link, the link is replaced, and its target stays.

    Args:
      path: the file.
      data: the whole contents.
      mode: the mode of the new file, before the process's umask.

    Raises:
      OSError: the file cannot be written.
    """
    # A random name, so that nobody can prepare it. The name shows what a killed process left.
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
