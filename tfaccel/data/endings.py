"""Ends dropped objects in a separate thread, which lives as long as the process.

The garbage collector drops objects in any thread and between any two operations. That thread may be
one that the ending waits for, or it may hold a lock that the ending needs. Such an ending waits for
ever. Python collects in one thread at a time, so nothing is collected from then on.

    end_later = ender()     # call it early, because it may start the thread
    weakref.finalize(stream, end_later, pool.shutdown)
"""

import atexit
import functools
import gc
import queue
import threading
from collections.abc import Callable

EXIT_S = 30.0  # seconds for which Python's exit waits for endings that are queued
_collecting = []  # the id of the thread in which the garbage collector runs, if any


def is_collecting() -> bool:
    """Returns whether the garbage collector runs in this thread; known after a call of `ender`.

    An object that normally ends at once, to free its memory, must not do so in this case.
    """
    return threading.get_ident() in _collecting


def _note_collection(phase: str, info: dict) -> None:
    _collecting[:] = [threading.get_ident()] if phase == "start" else []


@functools.cache  # one thread for each process
def ender() -> Callable[[Callable[[], object]], None]:
    """Returns a function that calls another one soon. It waits for no lock and no thread."""
    ends = queue.SimpleQueue()

    def call_all():
        while True:
            ends.get()()  # without a name, which would keep the function until the next one

    thread = threading.Thread(target=call_all, name="endings", daemon=True)
    thread.start()
    gc.callbacks.append(_note_collection)
    atexit.register(_wait_for_all, thread, ends)
    return ends.put


def _wait_for_all(thread: threading.Thread, ends: queue.SimpleQueue) -> None:
    """Finishes the queued endings before Python exits, as TensorFlow's threads may call Python."""
    if thread.is_alive():  # a forked child does not have the thread
        over = threading.Event()
        ends.put(over.set)
        over.wait(EXIT_S)
