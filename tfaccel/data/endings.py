"""What is dropped, ended in a thread of its own, which lives as long as the process.

The garbage collector drops what it finds in whichever thread it comes, between any two operations:
also in a thread that the end would wait for, or that holds a lock which the end needs. Such an end
waits for ever, and as Python collects in one thread at a time, nothing is collected any more.

    end_later = ender()     # before it is needed, since it may start the thread
    weakref.finalize(stream, end_later, pool.shutdown)
"""

import atexit
import functools
import gc
import queue
import threading
from collections.abc import Callable

EXIT_S = 30.0  # that Python's exit waits for ends that were asked for
_collecting = []  # the number of the thread in which the garbage collector is at work, if any


def is_collecting() -> bool:
    """Returns whether the garbage collector is at work in this thread.

    What ends at once elsewhere, so that its memory is free then, must not here. Known once `ender`
    was asked for.
    """
    return threading.get_ident() in _collecting


def _note_collection(phase: str, info: dict) -> None:
    _collecting[:] = [threading.get_ident()] if phase == "start" else []


@functools.cache  # a thread for a process
def ender() -> Callable[[Callable[[], object]], None]:
    """Returns what has a function called soon, and waits for nothing itself: no lock, no thread."""
    ends = queue.SimpleQueue()

    def call_all():
        while True:
            ends.get()()  # by no name, which would hold it until the next one comes

    thread = threading.Thread(target=call_all, name="endings", daemon=True)
    thread.start()
    gc.callbacks.append(_note_collection)
    atexit.register(_wait_for_all, thread, ends)
    return ends.put


def _wait_for_all(thread: threading.Thread, ends: queue.SimpleQueue) -> None:
    """Lets what was dropped last end before Python does: threads of TensorFlow's may call it."""
    if thread.is_alive():  # not so in a forked child
        over = threading.Event()
        ends.put(over.set)
        over.wait(EXIT_S)
