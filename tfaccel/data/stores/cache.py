"""A folder of fetched files that never takes more than a number of bytes.

    cache = BoundedCache(folder, most_bytes=50 << 30)
    with cache.opened("5c2a...", size, fetch) as file:     # fetched, if it is not there
        data = file.read()

Several processes may share the folder. A file is fetched under another name and renamed when it is
whole, by one process only. Room is reserved before a file is fetched. The name is a digest of the
URL and the version, so a changed file has another name.

If the folder is full, files give way in this order: those that nobody has used since this process
began, the longest unused first; those that this process fetched into a full folder and has read;
and those that are longest unused. The second rule makes the folder keep a part of the data that is
read again in each epoch. If the longest unused file always gave way, half of the data would be
found in the folder 15% of the time and not 50%, because each epoch has a new order.
"""

import collections
import contextlib
import fcntl
import os
import pathlib
import struct
import threading
import time
from collections.abc import Callable, Iterator
from typing import BinaryIO

from tfaccel.common.disk_errors import mib, not_written
from tfaccel.common.errors import RunError, UserError
from tfaccel.common.regular_file import open_regular

PART = ".part"  # ends the name of a file that is not whole
COUNT = "bytes"  # the file that has the number of bytes
POLL_S = 0.02
WAIT_S = 120.0  # for room, while all files are in use
_NUMBER = struct.Struct("<q")


class NoRoomError(Exception):
    """All files in the folder are in use."""


class BoundedCache:
    """A folder of files with a bound. Several threads and processes may use it at once."""

    def __init__(self, folder: pathlib.Path, most_bytes: int, *, wait_s: float = WAIT_S):
        """Makes no folder yet.

        Args:
          folder: the folder, which need not exist.
          most_bytes: the most bytes that it may hold.
          wait_s: the longest wait for room while all files are in use.
        """
        self.folder, self.most_bytes, self.wait_s = folder, most_bytes, wait_s
        self._began_ns = time.time_ns()
        self._lock = threading.Lock()  # of the next three
        self._passing: dict[str, bool] = {}  # fetched into a full folder; whether it has been read
        self._read = collections.deque()  # those of `_passing` that have been read
        self._by_age: list[tuple[int, str]] = []  # time of use and path, the longest unused last

    def has(self, name: str) -> bool:
        """Returns whether a file is there, and whole."""
        return os.path.exists(self._path(name))

    def opened(
        self,
        name: str,
        size: int | None,
        fetch: Callable[[str], None],
        *,
        what: str,
        ahead: bool = False,
        lasts: bool = False,
    ) -> BinaryIO:
        """Returns an open file, whose name is its path. While it is open, no process removes it.

        Args:
          name: the name of the file in the folder.
          size: in bytes; None if it is unknown.
          fetch: writes the file to a path.
          what: names the file in errors: its URL.
          ahead: whether the file is fetched before it is needed.
          lasts: whether the file is read many times in an epoch.

        Raises:
          NoRoomError: all files are in use, and `ahead`.
          UserError: the file is larger than the folder may be.
          RunError: the folder cannot be written, the file has another size than the store said, or
            all files have been in use for WAIT_S.
          Exception: whatever `fetch` raises.
        """
        self._check_size(size or 0, what)
        path, end = self._path(name), time.monotonic() + self.wait_s
        while True:
            try:
                file = self._found(path, size)
                if file is not None:
                    self._note_read(path, ahead=ahead)
                    return file
                file = self._added(path, size, fetch, what=what, ahead=ahead, lasts=lasts)
            except NoRoomError:
                if ahead:
                    raise
                if time.monotonic() > end:
                    raise RunError(
                        f"{what} finds no room in {self.folder}: all files there, "
                        f"{mib(self.most_bytes)}, are in use; raise data.store_cache_gib "
                        "(cache_gib= in a script)"
                    ) from None
            except OSError as error:
                if isinstance(error, FileNotFoundError) and error.filename == what:
                    raise  # the store has no such file
                raise RunError(f"{path} {not_written(error, self.folder)}") from error
            if file is not None:
                return file
            time.sleep(POLL_S)  # another thread or process is fetching it

    def _check_size(self, size: int, what: str) -> None:
        if size > self.most_bytes:
            raise UserError(
                f"{what} has {mib(size)}, more than the {mib(self.most_bytes)} that the cache may "
                "take; raise data.store_cache_gib (cache_gib= in a script)"
            )

    def _path(self, name: str) -> str:
        return os.path.join(self.folder, name[:2], name)

    def _found(self, path: str, size: int | None) -> BinaryIO | None:
        """Returns the whole file, open, or None. A file of a wrong size is removed."""
        try:
            file = open_regular(path, buffering=0)
        except FileNotFoundError:
            return None
        if not _held(path, file):
            file.close()
            return None
        if size is not None and os.fstat(file.fileno()).st_size != size:
            file.close()
            with self._counted() as count:
                count[0] -= _removed(path)
            return None
        with contextlib.suppress(PermissionError):  # another user's file
            os.utime(file.fileno())
        return file

    def _added(self, path: str, size, fetch, *, what: str, ahead: bool, lasts: bool):
        """Returns the file, fetched and open, or None while another one fetches it."""
        os.makedirs(os.path.dirname(path), exist_ok=True)
        # A reader of the folder learns from the name how many bytes are reserved.
        part = f"{path}.{size or 0}{PART}"
        file = open(part, "a+b", buffering=0)  # noqa: SIM115 - the caller closes it
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.close()
            return None
        try:
            if not _is(part, file) or os.path.exists(path):
                # The other one has just finished or given up.
                if _is(part, file):
                    os.unlink(part)
                file.close()
                return None
            is_passing = self._reserved(size or 0) and not lasts
            try:
                fetch(part)
                found = os.path.getsize(part)
                if size is not None and found != size:
                    raise RunError(
                        f"{what} has {found:,} bytes and not {size:,} as the store said, so it has "
                        "changed; start again"
                    )
            except BaseException:
                self._release(size or 0)
                raise
            if size is None:
                self._check_size(found, what)
                self._reserved(found)
            os.replace(part, path)
            if is_passing:
                with self._lock:
                    self._passing[path] = False
                self._note_read(path, ahead=ahead)
            if not _held(path, file):  # or the store's library has written another file there
                file.close()
                return None
            file.seek(0)
            file.name = path
            return file
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(part)
            file.close()
            raise

    def _note_read(self, path: str, *, ahead: bool) -> None:
        if ahead or path not in self._passing:
            return
        with self._lock:
            if self._passing.get(path) is False:
                self._passing[path] = True
                self._read.append(path)

    # The number of bytes, and who gives way.

    @contextlib.contextmanager
    def _counted(self, *, own: int = 0) -> Iterator[list[int]]:
        """Within the context, this thread alone changes the number of bytes: a list of one.

        Args:
          own: bytes of an unfinished file of this thread that are not reserved yet.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        place = os.open(self.folder / COUNT, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666)
        try:
            fcntl.flock(place, fcntl.LOCK_EX)
            said = os.pread(place, _NUMBER.size, 0)
            count = [_NUMBER.unpack(said)[0] if len(said) == _NUMBER.size else self._scan() - own]
            try:
                yield count
            finally:
                os.pwrite(place, _NUMBER.pack(max(0, count[0])), 0)
        finally:
            os.close(place)

    def _reserved(self, size: int) -> bool:
        """Reserves bytes, and returns whether files had to give way for them."""
        with self._counted(own=size) as count:
            is_full = count[0] + size > self.most_bytes
            if is_full:
                self._make_room(count, self.most_bytes - size, own=size)
            count[0] += size
        return is_full

    def _release(self, size: int) -> None:
        with self._counted() as count:
            count[0] -= size

    def _make_room(self, count: list[int], most: int, *, own: int) -> None:
        """Removes files until the others have at most `most` bytes."""
        scanned = False
        while count[0] > most:
            if self._by_age and self._by_age[-1][0] < self._began_ns:
                count[0] -= self._removed_if_unused(*self._by_age.pop())
            elif (path := self._next_read()) is not None:
                count[0] -= _removed(path)
            elif self._by_age:
                count[0] -= self._removed_if_unused(*self._by_age.pop())
            elif not scanned:
                scanned, count[0] = True, self._scan() - own
            else:
                raise NoRoomError

    def _next_read(self) -> str | None:
        with self._lock:
            if not self._read:
                return None
            path = self._read.popleft()
            self._passing.pop(path, None)
            return path

    def _removed_if_unused(self, used_ns: int, path: str) -> int:
        try:
            same = os.stat(path).st_mtime_ns == used_ns
        except OSError:
            return 0
        return _removed(path) if same else 0

    def _scan(self) -> int:
        """Lists the folder's files by age, and returns their bytes; removes what is left over."""
        self._by_age, total = [], 0
        for folder in [each for each in _entries(self.folder) if each.is_dir()]:
            for each in _entries(folder.path):
                with contextlib.suppress(FileNotFoundError):
                    if each.name.endswith(PART):
                        total += _left_over(each.path)
                        continue
                    status = each.stat()
                    total += status.st_size
                    self._by_age.append((status.st_mtime_ns, each.path))
        self._by_age.sort(reverse=True)
        return total


def _entries(folder: str | os.PathLike) -> list[os.DirEntry]:
    try:
        with os.scandir(folder) as entries:
            return list(entries)
    except FileNotFoundError:
        return []


def _is(path: str, file: BinaryIO) -> bool:
    """Returns whether a path still leads to an open file."""
    try:
        return os.path.samestat(os.stat(path), os.fstat(file.fileno()))
    except FileNotFoundError:
        return False


def _held(path: str, file: BinaryIO) -> bool:
    """Locks an open file, and returns whether its path leads to it from now on.

    Another thread or process may have removed it after it was opened. DALI would then not find it.
    """
    try:
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:  # it is being removed, or has just been added
        return False
    return _is(path, file)


def _removed(path: str) -> int:
    """Removes a file that no one has open through the cache; returns its bytes, or 0."""
    try:
        with open_regular(path, buffering=0) as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if not _is(path, file):  # others have removed it, and perhaps fetched it again
                return 0
            os.unlink(path)
            return os.fstat(file.fileno()).st_size
    except OSError:  # it is in use, or gone already
        return 0


def _left_over(part: str) -> int:
    """Returns the bytes that are reserved for an unfinished file; 0, and removes it, if the process
    that wrote it is gone."""
    with open(part, "rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return int(part.removesuffix(PART).rpartition(".")[2])
        os.unlink(part)
        return 0
