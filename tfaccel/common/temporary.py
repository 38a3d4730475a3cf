"""Folders in the temp folder that go with their process, however that ends.

Takes what a folder is for; gives a new one, and removes those that killed processes left.

    with folder("export") as shared: ...        # /tmp/tfaccel-export-x7c2k9ab.held
    own = Held("xla"); own.path; own.remove()

A live process holds a lock on each of its folders, which the system drops when the process ends. So
a folder whose name says that it was held, and that nobody holds, is a dead process's. The lock is
known to all containers of a machine that share the folder; a process number is not.
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
    """Closes a forked child's copies: a lock is kept for as long as anybody has it open."""
    while _numbers:
        os.close(_numbers.pop())


os.register_at_fork(after_in_child=_let_go)


class Held:
    """A new folder in the temp folder, of this user alone.

    Attributes:
      path: of it.
    """

    def __init__(self, kind: str, *, parent: str | os.PathLike | None = None):
        """Makes it, and removes first what killed processes left there.

        Args:
          kind: what it is for: a word of small letters.
          parent: the folder that it is made in; None for the temp folder.

        Raises:
          OSError: it cannot be made.
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
            except OSError:  # a file system without locks: this folder stays if it is killed
                os.close(number)
                self.path = pathlib.Path(new)
            else:
                _numbers.add(number)
                self._number = number
                os.rename(
                    new, self.path
                )  # not before it is held, or it would look like a dead one's
        except BaseException:
            shutil.rmtree(new, ignore_errors=True)
            raise
        # At the end of Python too, but not in a forked child.
        self._finalizer = weakref.finalize(self, _remove, self.path, self._number, os.getpid())

    def remove(self) -> None:
        """Removes it with all that is in it. A second call does nothing."""
        self._finalizer()


@contextlib.contextmanager
def folder(kind: str) -> Iterator[pathlib.Path]:
    """Within the context there is a new folder, of this user alone: see Held."""
    held = Held(kind)
    try:
        yield held.path
    finally:
        held.remove()


def remove_left(parent: pathlib.Path | None = None) -> None:
    """Removes the folders of this user's processes that have ended without removing them.

    Args:
      parent: where they are; None for the temp folder.
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
        fcntl.flock(number, fcntl.LOCK_EX | fcntl.LOCK_NB)  # BlockingIOError of a live one's
        shutil.rmtree(path)  # which follows no link
        log.debug("temp: %s is removed, which a killed process had left", path)
    finally:
        os.close(number)


def _remove(path: pathlib.Path, number: int | None, process: int) -> None:
    if os.getpid() != process:
        return
    shutil.rmtree(path, ignore_errors=True)
    if number in _numbers:
        _numbers.remove(number)
        os.close(number)
