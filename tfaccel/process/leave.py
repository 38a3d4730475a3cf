"""Ends this process at once, although threads of libraries hang or must not be waited for.

    leave.finish_first(thread)      # a write that is worth a wait
    with leave.calling_first(end):  # end(1) is called if the process ends within this context
    leave.now(1)                    # flushes the output; no exit handler runs

Python cannot end a thread that waits in C++, and its own end waits for such threads.
"""

import contextlib
import logging
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from typing import NoReturn

WAIT_S = 60.0  # for what is being written; a checkpoint of 1 GB takes seconds

_calls: list[Callable[[int], object]] = []
_writes: "weakref.WeakSet[threading.Thread]" = weakref.WeakSet()


def finish_first(thread: threading.Thread) -> None:
    """Makes `now` wait until a thread has ended, if it has begun; for WAIT_S at most."""
    _writes.add(thread)


@contextlib.contextmanager
def calling_first(call: Callable[[int], object]) -> Iterator[None]:
    """Within the context, `now` first calls a function with the exit code, in a thread.

    Like a write, it has WAIT_S at most.
    """
    _calls.append(call)
    try:
        yield
    finally:
        _calls.remove(call)


def now(code: int, *, wait_s: float = WAIT_S) -> NoReturn:
    """Ends the process with an exit code, after the writes, the calls and the output.

    Args:
      code: the exit code.
      wait_s: the longest wait for all threads of `finish_first` and all calls together, in
        seconds.
    """
    until = time.monotonic() + wait_s
    calls = [threading.Thread(target=each, args=(code,), daemon=True) for each in [*_calls]]
    for each in calls:
        each.start()
    for each in [*calls, *(each for each in _writes if each.is_alive())]:
        each.join(max(0.0, until - time.monotonic()))
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, AttributeError):  # closed, or there is none
            stream.flush()
    os._exit(code)
