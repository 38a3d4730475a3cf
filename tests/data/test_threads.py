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


@pytest.mark.parametrize("num_threads", [1, 2, 16])
@pytest.mark.parametrize("number", [0, 1, 2, 3, 7, 1000])
def test_results_come_in_order(number, num_threads):
    found = mapped(lambda item: item * item, range(number), num_threads=num_threads)

    assert list(found) == [item * item for item in range(number)]


def test_work_that_waits_is_done_in_threads():
    began = time.monotonic()

    assert list(mapped(_waited, range(200), num_threads=NUM_THREADS)) == [*range(200)]

    assert time.monotonic() - began < 0.7 * 200 * WAIT_S


def test_work_that_holds_pythons_lock_is_done_in_one_thread_and_it_is_said(caplog):
    caplog.set_level("INFO", logger="tfaccel")
    by = collections.Counter(mapped(_held, range(300), num_threads=NUM_THREADS))

    assert by[threading.get_ident()] > 0.9 * by.total()
    (said,) = caplog.messages
    assert said.startswith("data: in one thread, as 4 took ")


def test_the_choice_is_made_anew_where_later_items_are_others(monkeypatch, caplog):
    """A folder of icons, then one of photographs."""
    caplog.set_level("INFO", logger="tfaccel")
    monkeypatch.setattr(threads, "HOLD_S", 0.2)

    def work(item):
        return _held(item) if item < 300 else (_waited(item), threading.get_ident())[1]

    by = list(mapped(work, range(700), num_threads=NUM_THREADS))

    own = threading.get_ident()
    assert by[100:300].count(own) > 50
    assert by[500:].count(own) < 100
    assert caplog.messages[0].startswith("data: in one thread")
    assert caplog.messages[-1] == "data: in 4 threads again, which are quicker now"


@pytest.mark.parametrize("bad", [0, 1, 4, 60])
def test_an_error_ends_it_and_what_was_not_begun(bad):
    done = []

    def work(item):
        _waited(item)
        if item == bad:
            raise ValueError("bad")
        done.append(item)

    with pytest.raises(ValueError, match="bad"):
        list(mapped(work, range(1000), num_threads=NUM_THREADS))

    assert len(done) < bad + 10 * NUM_THREADS


def test_no_thread_is_left_where_the_results_are_not_all_taken():
    before = threading.active_count()
    found = mapped(_waited, range(1000), num_threads=NUM_THREADS)
    for _ in range(50):
        next(found)

    found.close()

    assert threading.active_count() == before


WAIT_S = 0.002


def _icon():
    file = io.BytesIO()
    PIL.Image.new("L", (8, 8)).save(file, "PNG")
    return file.getvalue()


ICON = _icon()


def _waited(item):
    time.sleep(WAIT_S)
    return item


def _held(item):
    """Decodes an icon some times, mostly with the lock; returns who did it."""
    for _ in range(40):
        with PIL.Image.open(io.BytesIO(ICON)) as icon:
            icon.convert("L")
    return threading.get_ident()
