"""The stream below the loaders on the CPU: that it ends, wherever it is dropped."""

import threading
import time
import weakref

import numpy as np
import pytest
from conftest import in_new_process

from tfaccel.data.loaders.host import HostStream
from tfaccel.data.placement import Placement
from tfaccel.runtime import Device

PLACEMENT = Placement(Device("/cpu:0", None), num_threads=2, seed=0)
SOON_S = 60


def numbers(number):
    return {"x": np.full(3, int(number), np.float32)}


def is_gone(reference):
    ends = time.monotonic() + SOON_S
    while reference() is not None and time.monotonic() < ends:
        time.sleep(0.01)
    return reference() is None


def test_it_may_be_collected_in_a_thread_of_its_own(no_collector):
    """Of old that thread waited for itself, and nothing was collected in the process any more."""
    held, waited_for, back = {}, threading.Event(), threading.Event()

    def begin(number):
        if number == 4:
            waited_for.wait()
            held.clear()  # as the garbage collector does, anywhere
            back.set()
        return numbers(number)

    held["stream"] = HostStream(begin, None, placement=PLACEMENT)
    np.testing.assert_array_equal(next(held["stream"])["x"], numbers(0)["x"])
    iterator = weakref.ref(held["stream"]._iterator)
    waited_for.set()
    assert back.wait(SOON_S)
    assert is_gone(iterator)


def test_it_may_be_collected_where_a_lock_is_held_that_it_needs(no_collector):
    lock, begun = threading.Lock(), threading.Semaphore(0)

    def begin(number):
        begun.release()
        with lock:
            return numbers(number)

    held = {"stream": HostStream(begin, None, placement=PLACEMENT)}
    iterator = weakref.ref(held["stream"]._iterator)

    def collect():
        next(held["stream"])
        while begun.acquire(timeout=1):
            pass  # all are made that are made ahead
        with lock:
            next(held["stream"])
            begun.acquire()  # another one is begun, and waits for the lock
            held.clear()

    collecting = threading.Thread(target=collect, daemon=True)
    collecting.start()
    collecting.join(SOON_S)
    assert not collecting.is_alive()
    assert is_gone(iterator)


def test_a_first_batch_that_fails_is_said():
    def begin(number):
        raise OSError("no such disk")

    with pytest.raises(OSError, match="disk"):
        HostStream(begin, None, placement=PLACEMENT)


@pytest.mark.parametrize("last", ["stream", "del stream"])
def test_python_ends_with_a_stream_that_is_in_use_and_with_one_just_dropped(last):
    program = f"""
import sys
sys.path[:0] = ["tests", "tests/data/loaders"]
import test_host as here
stream = here.HostStream(here.numbers, None, placement=here.PLACEMENT)
for number in range(5):
    next(stream)
print("drawn")
{last}
"""
    assert in_new_process(program) == "drawn\n"
