"""The stream below the loaders on the CPU: that it ends, wherever it is dropped."""

import gc
import subprocess
import sys
import threading
import time
import weakref

import numpy as np
import pytest
from conftest import in_new_process

from tfaccel.data.loaders.host import HostStream
from tfaccel.data.placement import Placement
from tfaccel.runtime.devices import Device

pytestmark = pytest.mark.usefixtures("quick_collector")

PLACEMENT = Placement(Device("/cpu:0", None), num_threads=2, seed=0)
SOON_S = 60


def numbers(number):
    return {"x": np.full(3, int(number), np.float32)}


def slow_numbers(number):
    time.sleep(0.3)
    return numbers(number)


def slow_numbers_that_end(number):
    if number == 3:
        raise OSError("no such disk")
    return slow_numbers(number)


def is_gone(reference):
    ends = time.monotonic() + SOON_S
    while reference() is not None and time.monotonic() < ends:
        time.sleep(0.01)
    return reference() is None


class Holder:
    """Garbage, once it is dropped, that only the collector finds, and is not soon done with."""

    def __init__(self, stream):
        self.before, self.stream, self.after = Slow(), stream, Slow()
        self.itself = self


class Slow:
    def __init__(self):
        self.itself = self

    def __del__(self):
        time.sleep(0.2)


def test_it_may_be_collected_in_a_thread_of_its_own(no_collector):
    """Of old that thread waited for itself, and nothing was collected in the process any more."""
    waited_for, back = threading.Event(), threading.Event()

    def begin(number):
        if number == 4:
            waited_for.wait()
            gc.collect()  # as it comes by itself, anywhere
            back.set()
        return numbers(number)

    holder = Holder(HostStream(begin, None, placement=PLACEMENT))
    np.testing.assert_array_equal(next(holder.stream)["x"], numbers(0)["x"])
    iterator = weakref.ref(holder.stream._held[-1])
    del holder
    assert iterator() is not None
    waited_for.set()
    assert back.wait(SOON_S)
    assert is_gone(iterator)


def test_it_may_be_collected_where_a_lock_is_held_that_it_needs(no_collector):
    lock, begun = threading.Lock(), threading.Semaphore(0)

    def begin(number):
        begun.release()
        with lock:
            return numbers(number)

    held = [Holder(HostStream(begin, None, placement=PLACEMENT))]
    iterator = weakref.ref(held[0].stream._held[-1])

    def collect():
        next(held[0].stream)
        while begun.acquire(timeout=1):
            pass  # all are made that are made ahead
        with lock:
            next(held[0].stream)
            begun.acquire()  # another one is begun, and waits for the lock
            held.clear()
            gc.collect()

    collecting = threading.Thread(target=collect, daemon=True)
    collecting.start()
    collecting.join(SOON_S)
    assert not collecting.is_alive()
    assert is_gone(iterator)


def test_what_is_dropped_otherwise_ends_at_once(no_collector):
    def begin(number):
        return numbers(number)

    stream = HostStream(begin, None, placement=PLACEMENT)
    next(stream)
    ended = [weakref.ref(each) for each in (stream._held[-1], begin)]
    del stream, begin
    assert [each() for each in ended] == [None, None]


def test_a_first_batch_that_fails_is_said():
    def begin(number):
        raise OSError("no such disk")

    with pytest.raises(OSError, match="disk"):
        HostStream(begin, None, placement=PLACEMENT)


@pytest.mark.parametrize("begin", [pytest.param("numbers", marks=pytest.mark.slow), "slow_numbers"])
@pytest.mark.parametrize("last", [pytest.param("stream", marks=pytest.mark.slow), "del stream"])
def test_python_ends_with_a_stream_that_is_in_use_and_with_one_just_dropped(last, begin):
    """One that was not ended before Python let no thread in any more waited for it for ever."""
    program = f"""
import sys
sys.path[:0] = ["tests", "tests/data/loaders"]
import test_host as here
stream = here.HostStream(here.{begin}, None, placement=here.PLACEMENT)
for number in range(5):
    next(stream)
print("drawn")
{last}
"""
    assert in_new_process(program) == "drawn\n"


@pytest.mark.slow  # a Python for each
@pytest.mark.parametrize("begin", ["slow_numbers", "slow_numbers_that_end"])
def test_python_ends_with_an_error_out_of_a_stream(begin):
    """Its frames held the iterator: also those of Ctrl-C, which finds a starved run in `next`."""
    program = f"""
import signal, sys, threading
sys.path[:0] = ["tests", "tests/data/loaders"]
import test_host as here
stream = here.HostStream(here.{begin}, None, placement=here.PLACEMENT)
next(stream)
signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored in a shell's background
threading.Timer(1, signal.raise_signal, (signal.SIGINT,)).start()
for number in range(100):
    next(stream)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode != 0
    error = "no such disk" if begin == "slow_numbers_that_end" else "KeyboardInterrupt"
    assert error in done.stderr
