"""A function of each of many items, in threads where they are quicker, and else in one.

    for faults in mapped(decode_block, starts, num_threads=16):
        ...

A thread that lets go of Python's lock for some microseconds, as to read or to decode an icon, must
wait for it behind all others: 60,000 MNIST PNGs took 3.4 s in one thread, 6.3 s in two and 11 s in
16 (2 cores, 2026-11-24), and 16 s in 16 on 16 cores. Photographs are decoded without the lock
mostly, and files of a network's disk are waited for without it: there threads are quicker. What the
next items are nobody knows, nor who else uses the machine, so both ways are timed, again and again.
"""

import itertools
import logging
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

Item, Result = TypeVar("Item"), TypeVar("Result")

SAMPLE = 2  # items that one thread is timed with; many are timed with one for each
FIRST_HOLD_S = 0.5  # for which the quicker way is gone on with; then twice as long each time
HOLD_S = 10.0  # at most

log = logging.getLogger("tfaccel")


def mapped(
    function: Callable[[Item], Result], items: Iterable[Item], *, num_threads: int
) -> Iterator[Result]:
    """Yields the results in the items' order.

    Args:
      function: of an item; at best some milliseconds of work, so that handing it on costs little.
      items: taken as they are needed, those of `HOLD_S` at most ahead.
      num_threads: that may be used.

    Raises:
      Exception: as `function` does, of the first item that fails; what is not begun is left.
    """
    items, num_before, hold_s = iter(items), num_threads, min(FIRST_HOLD_S, HOLD_S)
    yield from map(function, itertools.islice(items, 1 if num_threads > 1 else None))  # cold
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
            quicker = min(seconds, key=seconds.get)
            _tell(quicker, num_before, seconds)
            num_before, run = quicker, ways[quicker][0]
            most = int(hold_s / seconds[quicker]) + 1
            yield from run(function, itertools.islice(_until(items, hold_s), most))
            hold_s = min(2 * hold_s, HOLD_S)
    finally:
        pool.shutdown(cancel_futures=True)


def _until(items: Iterator[Item], hold_s: float) -> Iterator[Item]:
    """Yields the next items; those of one thread may come to take far longer than its sample."""
    ends = time.perf_counter() + hold_s
    while time.perf_counter() < ends:
        try:
            yield next(items)
        except StopIteration:
            return


def _tell(number: int, num_before: int, seconds: dict[int, float]) -> None:
    """Logs what changes."""
    if number == num_before:
        return
    if number == 1:
        most = max(seconds)
        ratio = seconds[most] / seconds[1]
        log.info("data: in one thread, as %d took %.1f times as long", most, ratio)
    else:
        log.info("data: in %d threads again, which are quicker now", number)
