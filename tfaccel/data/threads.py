"""Maps a function over many items, in several threads or in one, whichever is faster.

    for faults in mapped(decode_block, starts, num_threads=16):
        ...

A thread that releases Python's lock for a few microseconds, to read a file or to decode an icon,
must wait behind all other threads to get it back. 60,000 MNIST PNGs took 3.4 s in one thread, 6.3 s
in two and 11 s in 16 (2 cores, 2026-11-24), and 16 s in 16 threads on 16 cores. Several threads are
faster for photographs, which are mostly decoded without the lock, and for files on a network disk,
which are waited for without it. The next items and the load of the machine are unknown, so both
ways are timed again and again.
"""

import itertools
import logging
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

Item, Result = TypeVar("Item"), TypeVar("Result")

SAMPLE = 2  # items that time one thread; several threads are timed with one item each
FIRST_HOLD_S = 0.5  # seconds for which the faster way is kept; this doubles each time
HOLD_S = 10.0  # the longest time for which it is kept

log = logging.getLogger("tfaccel")


def mapped(
    function: Callable[[Item], Result], items: Iterable[Item], *, num_threads: int
) -> Iterator[Result]:
    """Yields the results in the order of the items.

    Args:
      function: takes an item; it should take some milliseconds, to outweigh the cost of threads.
      items: read as they are needed, at most those of the next `HOLD_S` seconds.
      num_threads: the number of threads that may be used.

    Raises:
      Exception: what `function` raises for the first item that fails. Later items are dropped.
    """
    items, num_before, hold_s = iter(items), num_threads, min(FIRST_HOLD_S, HOLD_S)
    # The first item is not timed, because it may be slower than the others.
    yield from map(function, itertools.islice(items, 1 if num_threads > 1 else None))
    pool = ThreadPoolExecutor(num_threads)
    ways = {1: (map, SAMPLE), num_threads: (pool.map, num_threads)}
    try:
        while True:
            seconds = {}
            for number, (run, count) in ways.items():
                sample, began = list(itertools.islice(items, count)), time.perf_counter()
                if not sample:
                    return
                yield from run(function, sample)
                seconds[number] = (time.perf_counter() - began) / len(sample)
            faster = min(seconds, key=seconds.get)
            _log_change(faster, num_before, seconds)
            num_before, run = faster, ways[faster][0]
            most = int(hold_s / seconds[faster]) + 1
            yield from run(function, itertools.islice(_until(items, hold_s), most))
            hold_s = min(2 * hold_s, HOLD_S)
    finally:
        pool.shutdown(cancel_futures=True)


def _until(items: Iterator[Item], hold_s: float) -> Iterator[Item]:
    """Yields the next items for a limited time, as they may take far longer than the sample."""
    ends = time.perf_counter() + hold_s
    while time.perf_counter() < ends:
        try:
            yield next(items)
        except StopIteration:
            return


def _log_change(number: int, num_before: int, seconds: dict[int, float]) -> None:
    if number == num_before:
        return
    if number == 1:
        most = max(seconds)
        ratio = seconds[most] / seconds[1]
        log.info("data: one thread is used, because %d took %.1f times as long", most, ratio)
    else:
        log.info("data: %d threads are used again, because they are faster now", number)
