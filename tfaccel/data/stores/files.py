"""The files of a source that are in a store: their versions, and their bytes through the cache.

    files = StoreFiles(store, names, sizes, versions, cache=cache)
    files.ahead([(0, None, None), (7, None, None)])     # fetches them in other threads
    files.read(0)                                       # waits until it is fetched

Units of the cache are whole files; of shards that do not all fit into the cache, they are single
examples, ranges of bytes.
"""

import functools
import hashlib
import os
import pathlib
import queue
import threading
import weakref
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import BinaryIO

import numpy as np

from tfaccel.common.checks import check_number
from tfaccel.common.disk_errors import mib
from tfaccel.common.errors import RunError, UserError
from tfaccel.common.run_log import summary
from tfaccel.common.tables import counted
from tfaccel.data.file_names import FileNames
from tfaccel.data.stores.cache import BoundedCache, NoRoomError
from tfaccel.data.stores.store import UNKNOWN, Entry, Store
from tfaccel.process.cache_folder import cache_folder

DEFAULT_CACHE_GIB = 50.0
NUM_FETCHERS = 32  # threads that wait for the store
# Files that are fetched after one that was not there although the one before it was just read.
NEXT_FILES = 64
AHEAD_SHARE = 0.25  # of the cache, for files that are fetched before they are read

# A file's number; and the offset and the size of a range, or None for the whole file.
Unit = tuple[int, int | None, int | None]


_counting, _fetched = threading.Lock(), [0, 0]  # by this process: units and bytes


def open_cache(cache_gib: float) -> BoundedCache:
    """Returns the cache of all stores on this host.

    Args:
      cache_gib: the most that it may take, in GiB.
    """
    check_number("cache_gib", cache_gib, above=0)
    return BoundedCache(cache_folder("stores"), int(cache_gib * 2**30))


@functools.cache
def _say_once(folder: pathlib.Path, most_bytes: int) -> None:
    summary(
        "data: files of the store are fetched into %s, which takes at most %.3g GiB "
        "(data.store_cache_gib)",
        *(folder, most_bytes / 2**30),
    )


def say_what_was_fetched() -> None:
    """Says how much this process has fetched from stores, if it has fetched anything."""
    with _counting:
        number, size = _fetched
    if number:
        summary("data: %s fetched from the store, %s", counted(number, "file"), mib(size))


def _count(size: int) -> None:
    with _counting:
        _fetched[0] += 1
        _fetched[1] += size


class StoreFiles:
    """Files of a store, by number. Several threads may use them at once.

    Attributes:
      names: the URLs.
      fit: whether all files together fit into the cache; else examples in shards are fetched alone.
    """

    def __init__(
        self,
        store: Store,
        names: FileNames,
        entries: Iterable[Entry] | None,
        *,
        cache: BoundedCache,
        are_shards: bool = False,
    ):
        """Fetches nothing yet.

        Args:
          store: the store.
          names: the URLs.
          entries: what the listing says of each file, in the order of the names; None if there was
            no listing. Then the store is asked for each file before its first use.
          cache: where fetched files lie.
          are_shards: whether each file holds many examples.
        """
        self.names, self._store, self._cache = names, store, cache
        self._are_shards = are_shards
        self._sizes = np.full(len(names), UNKNOWN, np.int64)
        self._versions = np.zeros(len(names), np.uint64)
        for number, each in enumerate(entries or ()):
            self._sizes[number], self._versions[number] = each.size, each.version
        self._asked = self._versions != 0  # of which files the version is known
        self.fit = bool((self._sizes != UNKNOWN).all() and self._sizes.sum() <= cache.most_bytes)
        self._lock = threading.Lock()  # of the next four
        self._later: dict[Unit, None] = {}  # to be fetched when there is room, in this order
        self._unread: dict[Unit, int] = {}  # fetched ahead, or in the queue: their bytes
        self._unread_bytes = 0
        self._typical = int(AHEAD_SHARE * cache.most_bytes / NUM_FETCHERS)  # of an unknown size
        self._recent = -2
        self._queue, self._num_threads = queue.SimpleQueue(), 0

    def __len__(self) -> int:
        """Returns the number of files."""
        return len(self.names)

    def taken(self, ids: np.ndarray) -> "StoreFiles":
        """Returns the files with the given numbers."""
        found = StoreFiles(self._store, self.names.taken(ids), None, cache=self._cache)
        for name in ("_sizes", "_versions", "_asked"):
            setattr(found, name, getattr(self, name)[ids])
        found.fit = self.fit
        return found

    def states(self) -> np.ndarray:
        """Returns [num_files, 2] int64: sizes and versions as far as they are known."""
        return np.stack([self._sizes, self._versions.astype(np.int64)], axis=1)

    def state(self, number: int) -> bytes:
        """Returns what changes with a file. The store is asked, unless the listing has said it.

        Raises:
          FileNotFoundError, UserError, RunError: as in `Store.entry`.
        """
        size, version = self._known(number)
        return self.names.encoded(number) + f"\0{size}\0{version}".encode()

    def learn(self) -> None:
        """Asks the store for the states of all files that are not known, several at once."""
        unknown = np.flatnonzero(~self._asked).tolist()
        with ThreadPoolExecutor(NUM_FETCHERS) as pool:
            list(pool.map(self._asked_for, unknown))

    def open(self, number: int, offset: int | None = None, size: int | None = None) -> BinaryIO:
        """Returns an open file with a unit's bytes: those of a file, or of a range.

        Raises:
          FileNotFoundError, UserError, RunError: as in `Store.fetch` and `BoundedCache.opened`.
        """
        follows, self._recent = number == self._recent + 1, number
        if offset is None and follows and not self._is_there(number):
            after = range(number + 1, min(number + 1 + NEXT_FILES, len(self)))
            self.ahead([(each, None, None) for each in after])
        unit = number, offset, size
        try:
            return self._opened(unit, ahead=False)
        finally:
            self._is_read(unit)

    def read(self, number: int, offset: int | None = None, size: int | None = None) -> bytes:
        """Returns the bytes of a file, or of a range in it; errors as in `open`.

        Raises:
          OSError: the file ends before the range does.
        """
        if offset is None:
            with self.open(number) as file:
                return file.readall()
        if not self.fit:
            with self.open(number, offset, size) as file:
                return file.readall()
        with self.open(number) as file:
            data = os.pread(file.fileno(), size, offset)
        if len(data) < size:
            raise OSError(f"{self.names[number]} ends at byte {offset + len(data)}")
        return data

    def ahead(self, units: Iterable[Unit]) -> None:
        """Begins to fetch units that are not there, in other threads, and returns at once.

        Units that are fetched and not yet read take at most AHEAD_SHARE of the cache: if there were
        more, they would give way before they are read. The others follow when these are read. A
        unit that cannot be fetched is left out. Reading it reports the error.
        """
        with self._lock:
            for unit in units:
                if unit not in self._unread:
                    self._later[unit] = None
            self._fetch_some()

    def _fetch_some(self) -> None:
        """Begins to fetch units as far as there is room. The caller holds the lock."""
        most = AHEAD_SHARE * self._cache.most_bytes
        while self._later:
            unit = next(iter(self._later))
            size = self._size_of(unit)
            there = self._asked[unit[0]] and self._cache.has(self._name(unit))
            if not there and size <= most:
                if self._unread_bytes + size > most:
                    return
                self._unread[unit] = size
                self._unread_bytes += size
                self._queue.put(unit)
                if self._num_threads < NUM_FETCHERS:
                    self._start_thread()
            del self._later[unit]

    def _size_of(self, unit: Unit) -> int:
        """Returns the bytes of a unit; if they are unknown, those of the last that was fetched."""
        number, _, size = unit
        size = int(self._sizes[number]) if size is None else size
        return self._typical if size == UNKNOWN else size

    def _is_read(self, unit: Unit) -> None:
        with self._lock:
            self._later.pop(unit, None)
            self._unread_bytes -= self._unread.pop(unit, 0)
            if self._later:
                self._fetch_some()

    def _start_thread(self) -> None:
        self._num_threads += 1
        if self._num_threads == 1:
            weakref.finalize(self, _end, self._queue)
        arguments = weakref.ref(self), self._queue
        # A daemon: Python's end does not wait for what nobody will read.
        threading.Thread(target=_fetch_all, args=arguments, daemon=True).start()

    def _fetch_ahead(self, unit: Unit) -> None:
        if unit not in self._unread:
            return  # somebody could not wait, and has read it
        try:
            with self._opened(unit, ahead=True) as file:
                self._typical = os.fstat(file.fileno()).st_size
        except (NoRoomError, OSError, UserError, RunError):
            self._is_read(unit)  # reading it reports the error

    def _opened(self, unit: Unit, *, ahead: bool) -> BinaryIO:
        number, offset, size = unit
        url = self.names[number]

        def fetch(path):
            if ahead and unit not in self._unread:
                raise NoRoomError  # it was read meanwhile, and has perhaps given way
            _say_once(self._cache.folder, self._cache.most_bytes)
            if offset is None:
                self._store.fetch(url, path)
                _count(os.path.getsize(path))
                return
            data = self._store.fetch_range(url, offset, offset + size)
            if len(data) < size:
                raise RunError(f"{url} ends at byte {offset + len(data)}, so it has changed")
            with open(path, "wb") as file:
                file.write(data)
            _count(size)

        known = self._known(number)[0]
        settings = {"what": url, "ahead": ahead, "lasts": offset is None and self._are_shards}
        if offset is None:
            size = None if known == UNKNOWN else known
        return self._cache.opened(self._name(unit), size, fetch, **settings)

    def _is_there(self, number: int) -> bool:
        return bool(self._asked[number]) and self._cache.has(self._name((number, None, None)))

    def _known(self, number: int) -> tuple[int, int]:
        """Returns the size and the version of a file."""
        if not self._asked[number]:
            self._asked_for(number)
        return int(self._sizes[number]), int(self._versions[number])

    def _asked_for(self, number: int) -> None:
        found = self._store.entry(self.names[number])
        self._sizes[number], self._versions[number] = found.size, found.version
        self._asked[number] = True

    def _name(self, unit: Unit) -> str:
        number, offset, size = unit
        text = self.names.encoded(number) + b"\0%d %d" % self._known(number)
        if offset is not None:
            text += b" %d %d" % (offset, size)
        return hashlib.blake2b(text, digest_size=16).hexdigest()


def _fetch_all(files: weakref.ref, waiting: queue.SimpleQueue) -> None:
    """Fetches what waits, until None comes or nobody has the files any more."""
    while (each := waiting.get()) is not None:
        if (alive := files()) is None:
            return
        alive._fetch_ahead(each)
        del alive


def _end(waiting: queue.SimpleQueue) -> None:
    for _ in range(NUM_FETCHERS):
        waiting.put(None)
