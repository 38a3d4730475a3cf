"""Ends in a thread of their own: in order, held by nothing afterwards, and before Python's own."""

import gc
import threading
import weakref

from conftest import in_new_process

from tfaccel.data.endings import ender, is_collecting

SOON_S = 60


def test_each_is_called_in_order_in_another_thread():
    called, over = [], threading.Event()
    for number in range(3):
        ender()(lambda number=number: called.append((number, threading.current_thread())))
    ender()(over.set)
    assert over.wait(SOON_S)
    assert [number for number, _ in called] == [0, 1, 2]
    assert {thread for _, thread in called} != {threading.current_thread()}
    assert len({thread for _, thread in called}) == 1


def test_nothing_holds_what_was_called():
    def end():
        pass

    called, over, end_later = weakref.ref(end), threading.Event(), ender()
    end_later(end)
    del end
    end_later(over.set)
    assert over.wait(SOON_S)
    assert called() is None


def test_it_is_known_where_the_collector_is_at_work(quick_collector):
    class Garbage:
        def __init__(self):
            self.itself = self

        def __del__(self):
            found.append((is_collecting(), in_another()))

    def in_another():
        said = []
        thread = threading.Thread(target=lambda: said.append(is_collecting()))
        thread.start()
        thread.join()
        return said[0]

    ender()
    found = []
    Garbage()
    gc.collect()
    dropped = Garbage()
    dropped.itself = None
    del dropped
    assert found == [(True, False), (False, False)]
    assert not is_collecting()


def test_python_ends_after_what_was_asked_for():
    program = """
import time
from tfaccel.data.endings import ender
ender()(lambda: time.sleep(0.5))
ender()(lambda: print("ended", flush=True))
"""
    assert in_new_process(program) == "ended\n"


def test_a_forked_child_which_has_no_such_thread_does_not_wait():
    program = """
import os, signal
from tfaccel.data.endings import ender
ender()
if (child := os.fork()) == 0:
    signal.alarm(300)  # should it wait: for nothing that comes
else:
    print(os.waitpid(child, 0)[1])
"""
    assert in_new_process(program) == "0\n"
