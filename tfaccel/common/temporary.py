"""Folders in the temp folder that disappear with their process, however it ends.

Making a folder also removes those that killed processes left.

    with folder("export") as shared: ...        # /tmp/tfaccel-export-x7c2k9ab.held
    own = Held("xla"); own.path; own.remove()

A live process holds a lock on each of its folders, and the system releases the lock when the
process ends. A folder with the suffix .held and no lock is therefore left over. All containers of a
machine that share the temp folder see the lock; process numbers would not work there.
"""

import contextlib
import fcntl
import logging
import os
import pathlib
import re
import shutil
import stat
import tempfile
import weakref
from collections.abc import Iterator

log = logging.getLogger("tfaccel")

_HELD = ".held"
_OURS = re.compile(rf"tfaccel-[a-z]+-\w{{8}}{re.escape(_HELD)}")

_numbers: set[int] = set()  # descriptors of this process's locks


def _let_go() -> None:
    """Closes a forked child's copies of the locks, because each copy keeps a lock."""
    while _numbers:
        os.close(_numbers.pop())


os.register_at_fork(after_in_child=_let_go)


class Held:
    """A new folder in the temp folder that only this user can read.

    Attributes:
      path: the path of the folder.
    """

    def __init__(self, kind: str, *, parent: str | os.PathLike | None = None):
        """Removes what killed processes left, and makes the folder.

        Args:
          kind: the purpose of the folder: a word of small letters.
          parent: the folder in which to make it; None for the temp folder.

        Raises:
          OSError: the folder cannot be made.
        """
        parent = pathlib.Path(parent or tempfile.gettempdir())
        remove_left(parent)
        new = tempfile.mkdtemp(prefix=f"tfaccel-{kind}-", dir=parent)
        self.path = pathlib.Path(f"{new}{_HELD}")
        self._number = None
        try:
            number = os.open(new, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                fcntl.flock(number, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:  # no locks here: the folder stays if the process is killed
                os.close(number)
                self.path = pathlib.Path(new)
            else:
                _numbers.add(number)
                self._number = number
                # Lock first, then rename: without a lock it would look like a left-over.
                os.rename(new, self.path)
        except BaseException:
            shutil.rmtree(new, ignore_errors=True)
            raise
        # This also runs when Python exits, but not in a forked child.
        self._finalizer = weakref.finalize(self, _remove, self.path, self._number, os.getpid())

    def remove(self) -> None:
        """Removes the folder with its contents. A second call does nothing."""
        self._finalizer()


@contextlib.contextmanager
def folder(kind: str) -> Iterator[pathlib.Path]:
    """Yields a new folder that only this user can read, and removes it afterwards; see Held."""
    held = Held(kind)
    try:
        yield held.path
    finally:
        held.remove()


def remove_left(parent: pathlib.Path | None = None) -> None:
    """Removes the folders that this user's processes left when they were killed.

    Args:
      parent: the folder to search; None for the temp folder.
    """
    parent = pathlib.Path(parent or tempfile.gettempdir())
    with contextlib.suppress(OSError), os.scandir(parent) as entries:
        for entry in entries:
            if _OURS.fullmatch(entry.name):
                with contextlib.suppress(OSError):
                    _remove_if_left(entry.path)


def _remove_if_left(path: str) -> None:
    number = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        found = os.fstat(number)
        if found.st_uid != os.geteuid() or not stat.S_ISDIR(found.st_mode):
            return
        fcntl.flock(number, fcntl.LOCK_EX | fcntl.LOCK_NB)  # BlockingIOError if its process lives
        shutil.rmtree(path)  # follows no links
        log.debug("temp: removed %s, which a killed process had left", path)
    finally:
        os.close(number)


def _remove(path: pathlib.Path, number: int | None, process: int) -> None:
    if os.getpid() != process:
        return
    shutil.rmtree(path, ignore_errors=True)
    if number in _numbers:
        _numbers.remove(number)
        os.close(number)
