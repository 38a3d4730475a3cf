"""How fast real files are read, past the page cache where the kernel lets.

reading = read(pathlib.Path("/data/imagenet"), seconds=5)
reading.num_bytes / reading.seconds
"""

import dataclasses
import itertools
import os
import pathlib
import random
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import psutil

NUM_THREADS = 8  # files at once, about as a loader's threads
NUM_LISTED = 4096  # files of which some are read
MAX_BYTES = 256 << 20
MAX_BYTES_OF_FILE = 32 << 20  # of shards, the beginnings
CHUNK = 1 << 20


@dataclasses.dataclass(frozen=True)
class Reading:
    """What was read.

    Attributes:
      num_files: of which something was read.
      num_bytes: in all of them.
      seconds: it took.
      from_device: bytes that the kernel fetched for it, from a disk or a server; None if it does
        not tell. Less than num_bytes came from memory.
    """

    num_files: int
    num_bytes: int
    seconds: float
    from_device: int | None


def read(folder: pathlib.Path, *, seconds: float, max_bytes: int = MAX_BYTES) -> Reading:
    """Reads files below a folder, some at once, in an order of no meaning.

    Args:
      folder: of the data.
      seconds: after which no further piece is begun; another such time at most is for the listing.
      max_bytes: likewise. A piece in each thread may come on top.
    """
    files = _listed(folder, seconds)
    random.Random(0).shuffle(files)  # neighbours on a disk come faster than what training asks for
    began, before, lock = time.perf_counter(), _fetched(), threading.Lock()
    num_bytes = num_files = 0

    def is_over() -> bool:
        return num_bytes >= max_bytes or time.perf_counter() - began > seconds

    def read_one(path: str) -> None:
        nonlocal num_bytes, num_files
        if is_over():
            return
        for number, piece in enumerate(_pieces(path)):
            with lock:
                num_bytes, num_files = num_bytes + piece, num_files + (number == 0)
            if is_over():
                return

    with ThreadPoolExecutor(NUM_THREADS) as pool:
        list(pool.map(read_one, files))
    taken, after = time.perf_counter() - began, _fetched()
    return Reading(
        num_files=num_files,
        num_bytes=num_bytes,
        seconds=taken,
        from_device=None if before is None or after is None else after - before,
    )


def _listed(folder: pathlib.Path, seconds: float) -> list[str]:
    began = time.perf_counter()
    walk = (os.path.join(root, name) for root, _, names in os.walk(folder) for name in names)
    in_time = itertools.takewhile(lambda _: time.perf_counter() - began < seconds, walk)
    return list(itertools.islice(in_time, NUM_LISTED))


def _pieces(path: str) -> Iterator[int]:
    """Yields the bytes of each piece of a file, which is read from its device again."""
    try:
        number = os.open(path, os.O_RDONLY | os.O_NONBLOCK)  # of a named pipe, do not wait
    except OSError:
        return
    try:
        os.posix_fadvise(number, 0, 0, os.POSIX_FADV_DONTNEED)
        left = MAX_BYTES_OF_FILE
        while left > 0 and (piece := len(os.read(number, CHUNK))):
            left -= piece
            yield piece
    except OSError:
        return  # a folder's link, a pipe
    finally:
        os.close(number)


def _fetched() -> int | None:
    try:
        return psutil.Process().io_counters().read_bytes
    except (psutil.Error, OSError, NotImplementedError):
        return None  # some containers hide it


def stages(arguments: Mapping) -> dict[str, Callable[[], Any]]:
    """Returns the reading, for a child: a network file system that is gone never answers."""
    folder, seconds = pathlib.Path(arguments["folder"]), arguments["seconds"]
    return {"data": lambda: dataclasses.asdict(read(folder, seconds=seconds))}
