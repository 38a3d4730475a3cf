"""Files of bytes, opened without waiting: a FIFO or a device of that name is refused at once.

Takes paths of users' files; opens or reads them. A plain `open` of a FIFO waits until another
process writes to it, perhaps for ever; a device may give bytes without end.

    with open_regular("train.csv") as file: ...
    data = read_regular("train.csv")
"""

import errno
import os
import stat
from collections.abc import Iterable
from typing import BinaryIO

NOT_REGULAR = "not a regular file, but a FIFO, a device or the like"


def open_regular(file: str | os.PathLike, *, buffering: int = -1) -> BinaryIO:
    """Opens a file for reading, as `open` does, and never waits for one that is no file of bytes.

    Args:
      file: its path. A link is followed.
      buffering: as of `open`.

    Raises:
      OSError: it cannot be opened, or is a FIFO, a device or a socket.
    """
    # Without O_NONBLOCK a FIFO is opened when another process writes to it: perhaps never.
    opened = open(  # noqa: SIM115 - the caller closes it
        file, "rb", buffering, opener=lambda path, flags: os.open(path, flags | os.O_NONBLOCK)
    )
    if not stat.S_ISREG(os.fstat(opened.fileno()).st_mode):
        opened.close()
        raise OSError(errno.EINVAL, NOT_REGULAR, os.fspath(file))
    return opened


def read_regular(file: str | os.PathLike) -> bytes:
    """Returns a file's bytes.

    Raises:
      OSError: as `open_regular`.
    """
    with open_regular(file) as opened:
        return opened.read()


def check_regular(files: Iterable[str | bytes | os.PathLike]) -> None:
    """Looks at files that another library is to open: 2 us each on a local disk.

    Raises:
      OSError: for the first that is not there, or is a FIFO, a device or a socket.
    """
    for file in files:
        mode = os.stat(file).st_mode
        if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):  # of a folder, every library says so
            raise OSError(errno.EINVAL, NOT_REGULAR, os.fsdecode(file))


def is_special(path: str | os.PathLike) -> bool:
    """Returns whether a path leads to a FIFO, a device or a socket. It need not be there."""
    try:
        mode = os.stat(path).st_mode
    except (OSError, ValueError):
        return False
    return not (stat.S_ISREG(mode) or stat.S_ISDIR(mode))
