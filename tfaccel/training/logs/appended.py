"""Appends complete records to a file, even if the disk is full.

Takes a record's bytes; the file then has all of them or none.

    file = Appended(path)    # overwrites the file; Appended(path, keep=True) appends to it
    file.append(b'{"step": 50}\n')
"""

import contextlib
import os
import pathlib

from tfaccel.common.own_files import open_own


class Appended:
    """An open file. It is not buffered, so appended records survive the process."""

    def __init__(self, path: pathlib.Path, *, keep: bool = False):
        """Opens the file, and makes its folder if needed. Old records stay only with `keep`.

        Raises:
          OSError: the file cannot be opened.
        """
        path.parent.mkdir(parents=True, exist_ok=True)
        how = os.O_APPEND if keep else os.O_TRUNC
        number = open_own(path, os.O_WRONLY | os.O_CREAT | how)
        self._file = open(number, "ab" if keep else "wb", buffering=0)  # noqa: SIM115

    def append(self, data: bytes) -> None:
        """Adds all of `data`, or nothing.

        Raises:
          OSError: there is no room for it; the file is unchanged.
        """
        end = os.fstat(self._file.fileno()).st_size
        left = memoryview(data)
        try:
            while left:
                left = left[self._file.write(left) :]  # a full disk may accept a part
        except OSError:
            with contextlib.suppress(OSError):  # the first error is the one to report
                self._file.truncate(end)
                self._file.seek(end)
            raise

    def close(self) -> None:
        """Closes the file."""
        self._file.close()
