"""A file that grows by whole records, whatever happens to the disk.

Takes bytes; gives a file that holds all of them or none.

    file = Appended(path)    # what was there goes; Appended(path, keep=True) goes on with it
    file.append(b'{"step": 50}\n')
"""

import contextlib
import os
import pathlib

from tfaccel.common.own_files import open_own


class Appended:
    """An open file. It is not buffered: what was appended outlives the process."""

    def __init__(self, path: pathlib.Path, *, keep: bool = False):
        """Opens the file, and makes its folder.

        Args:
          path: of the file.
          keep: whether what is there stays.

        Raises:
          OSError: it cannot be opened.
        """
        path.parent.mkdir(parents=True, exist_ok=True)
        how = os.O_APPEND if keep else os.O_TRUNC
        number = open_own(path, os.O_WRONLY | os.O_CREAT | how)
        self._file = open(number, "ab" if keep else "wb", buffering=0)  # noqa: SIM115

    def append(self, data: bytes) -> None:
        """Adds `data` as a whole.

        Raises:
          OSError: there is no room for it; the file is as before.
        """
        end = os.fstat(self._file.fileno()).st_size
        left = memoryview(data)
        try:
            while left:
                left = left[self._file.write(left) :]  # a full disk may take a part
        except OSError:
            with contextlib.suppress(OSError):  # the first is the one to tell
                self._file.truncate(end)
                self._file.seek(end)
            raise

    def close(self) -> None:
        """Closes the file."""
        self._file.close()
