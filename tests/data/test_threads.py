"""`mapped`: whatever it chooses, the results are those of `map`; and it chooses what is quicker."""

import collections
import io
import threading
import time

import PIL.Image
import pytest

from tfaccel.data import threads
from tfaccel.data.threads import mapped

NUM_THREADS = 4
WAIT_S, HELD_S = 0.002, 0.004  # of an item, in one thread
BEHIND = 3  # times as long takes what waits for Python's lock behind other threads


class Planted:
    """Work whose time is planted, and its clock: a machine that others use cannot change it."""

    def __init__(self, monkeypatch):
        self.now, self._own, self._lock = 0.0, threading.get_ident(), threading.Lock()
        monkeypatch.setattr(threads, "time", self)

    def perf_counter(self):
        return self.now

    def waited(self, item):
        self._passes(WAIT_S, elsewhere=WAIT_S / NUM_THREADS)
        return item

    def held(self, item):
        self._passes(HELD_S, elsewhere=HELD_S * BEHIND)
        return threading.get_ident()

    def _passes(self, seconds, *, elsewhere):
        with self._lock:
            self.now += seconds if threading.get_ident() == self._own else elsewhere


class Real:
    """Work that takes its time: Pillow's own holds the lock on any machine."""

    perf_counter = staticmethod(time.perf_counter)

    def __init__(self, monkeypatch):
        file = io.BytesIO()
        PIL.Image.new("L", (8, 8)).save(file, "PNG")
        self._icon = file.getvalue()

    def waited(self, item):
        return _waited(item)

    def held(self, item):
        """Decodes an icon some times, mostly with the lock; returns who did it."""
        for _ in range(40):
            with PIL.Image.open(io.BytesIO(self._icon)) as icon:
                icon.convert("L")
        return threading.get_ident()


# Of real work, a busy machine may have another way be the quicker one.
@pytest.fixture(params=[Planted, pytest.param(Real, marks=pytest.mark.slow)])
def work(request, monkeypatch):
    return request.param(monkeypatch)


@pytest.mark.parametrize("num_threads", [1, 2, 16])
@pytest.mark.parametrize("number", [0, 1, 2, 3, 7, 1000])
def test_results_come_in_order(number, num_threads):
    found = mapped(lambda item: item * item, range(number), num_threads=num_threads)

    assert list(found) == [item * item for item in range(number)]


def test_work_that_waits_is_done_in_threads(work):
    began = work.perf_counter()

    assert list(mapped(work.waited, range(200), num_threads=NUM_THREADS)) == [*range(200)]

    assert work.perf_counter() - began < 0.7 * 200 * WAIT_S


def test_work_that_holds_pythons_lock_is_done_in_one_thread_and_it_is_said(work, caplog):
    caplog.set_level("INFO", logger="tfaccel")
    by = collections.Counter(mapped(work.held, range(300), num_threads=NUM_THREADS))

    assert by[threading.get_ident()] > 0.9 * by.total()
    (said,) = caplog.messages
    assert said.startswith("data: one thread is used, because 4 took ")


def test_the_choice_is_made_anew_where_later_items_are_others(work, monkeypatch, caplog):
    """A folder of icons, then one of photographs."""
    caplog.set_level("INFO", logger="tfaccel")
    monkeypatch.setattr(threads, "HOLD_S", 0.2)

    def either(item):
        return work.held(item) if item < 300 else (work.waited(item), threading.get_ident())[1]

    by = list(mapped(either, range(700), num_threads=NUM_THREADS))

    own = threading.get_ident()
    assert by[100:300].count(own) > 50
    assert by[500:].count(own) < 100
    assert caplog.messages[0].startswith("data: one thread is used")
    assert caplog.messages[-1] == "data: 4 threads are used again, because they are faster now"


def test_what_a_busy_moment_chose_is_not_gone_on_with_for_long(monkeypatch):
    work = Planted(monkeypatch)

    def disturbed(item):
        if item == 2:  # of the sample of one thread
            work.now += 1.0
        return work.held(item)

    by = list(mapped(disturbed, range(1000), num_threads=NUM_THREADS))

    assert threading.get_ident() not in by[3:40]  # it was mistaken
    assert by[100:].count(threading.get_ident()) > 800


@pytest.mark.parametrize("bad", [0, 1, 4, 60])
def test_an_error_ends_it_and_what_was_not_begun(bad):
    done = []

    def work(item):
        # What is begun before the error is seen takes so long that a busy machine sees it in time.
        time.sleep(0.3 if item > bad else WAIT_S)
        if item == bad:
            raise ValueError("bad")
        done.append(item)

    with pytest.raises(ValueError, match="bad"):
        list(mapped(work, range(1000), num_threads=NUM_THREADS))

    assert len(done) < bad + 10 * NUM_THREADS


def test_no_thread_is_left_where_the_results_are_not_all_taken():
    before = set(threading.enumerate())
    found = mapped(_waited, range(1000), num_threads=NUM_THREADS)
    for _ in range(50):
        next(found)

    found.close()

    assert set(threading.enumerate()) <= before  # an earlier test's may have ended meanwhile


def _waited(item):
    time.sleep(WAIT_S)
    return item
