"""Measures how fast files are read, without the page cache if the kernel allows it.

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

NUM_THREADS = 8  # about as many as a loader has
NUM_LISTED = 4096  # the files to choose from
MAX_BYTES = 256 << 20
MAX_BYTES_OF_FILE = 32 << 20  # only the beginning of a shard is read
CHUNK = 1 << 20


@dataclasses.dataclass(frozen=True)
class Reading:
    """The amount and the time of a reading.

    Attributes:
      num_files: the number of files that were read, wholly or in part.
      num_bytes: the bytes that were read from all files.
      seconds: the time that it took.
      from_device: the bytes that the kernel read from a disk or a server; None if it does not
        report them. If this is less than num_bytes, the rest came from memory.
    """

    num_files: int
    num_bytes: int
    seconds: float
    from_device: int | None


def read(folder: pathlib.Path, *, seconds: float, max_bytes: int = MAX_BYTES) -> Reading:
    """Reads files below a folder, several at a time, in random order.

    Args:
      folder: the folder of the data.
      seconds: the time after which no piece is started. Listing the files may take as long again.
      max_bytes: the bytes after which no piece is started. Each thread may read one piece more.
    """
    files = _listed(folder, seconds)
    random.Random(0).shuffle(files)  # neighbours on a disk are read faster than training reads
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
    elapsed, after = time.perf_counter() - began, _fetched()
    return Reading(
        num_files=num_files,
        num_bytes=num_bytes,
        seconds=elapsed,
        from_device=None if before is None or after is None else after - before,
    )


def _listed(folder: pathlib.Path, seconds: float) -> list[str]:
    began = time.perf_counter()
    walk = (os.path.join(root, name) for root, _, names in os.walk(folder) for name in names)
    in_time = itertools.takewhile(lambda _: time.perf_counter() - began < seconds, walk)
    return list(itertools.islice(in_time, NUM_LISTED))


def _pieces(path: str) -> Iterator[int]:
    """Reads a file from its device, and yields the number of bytes of each piece."""
    try:
        number = os.open(path, os.O_RDONLY | os.O_NONBLOCK)  # does not wait for a named pipe
    except OSError:
        return
    try:
        os.posix_fadvise(number, 0, 0, os.POSIX_FADV_DONTNEED)
        left = MAX_BYTES_OF_FILE
        while left > 0 and (piece := len(os.read(number, CHUNK))):
            left -= piece
            yield piece
    except OSError:
        return  # a link to a folder, or a pipe
    finally:
        os.close(number)


def _fetched() -> int | None:
    try:
        return psutil.Process().io_counters().read_bytes
    except (psutil.Error, OSError, NotImplementedError):
        return None  # some containers hide the counter


def stages(arguments: Mapping) -> dict[str, Callable[[], Any]]:
    """Returns the reading as a child's stage, because a lost network file system never answers."""
    folder, seconds = pathlib.Path(arguments["folder"]), arguments["seconds"]
    return {"data": lambda: dataclasses.asdict(read(folder, seconds=seconds))}
