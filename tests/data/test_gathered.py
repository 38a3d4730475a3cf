"""Batches are gathered in order, a launch or two ahead of the step, and no further."""

import threading
import time
import weakref

import numpy as np
import pytest
import tensorflow as tf

from tfaccel.data import gathered
from tfaccel.data.gathered import Allowance, Gathered, Launches, Places, fitting, taken, why_not

SOON_S = 60  # what takes milliseconds; what is waited for in vain never comes
PLACES = Places(devices=("/cpu:1",), cut=lambda batch: [batch], join=lambda parts: parts[0])


class Counted:
    """Batches, which counts how many were read."""

    def __init__(self, number, *, rows=lambda _: 2, fails=None):
        self.number, self.rows, self.fails, self.read = number, rows, fails, 0

    def __iter__(self):
        return self

    def __next__(self):
        if self.read == self.fails:
            raise KeyError("of the user")
        if self.read == self.number:
            raise StopIteration
        self.read += 1
        batch = np.full((self.rows(self.read - 1), 3), self.read - 1)
        return {"x": tf.constant(batch, tf.int32)}, None

    def comes_to(self, number):
        """Waits until so many were read, and a little for more."""
        ends = time.monotonic() + SOON_S
        while self.read < number and time.monotonic() < ends:
            time.sleep(0.001)
        time.sleep(0.05)
        return self.read


def gathered_of(batches, *, most=4, left=float("inf"), launches=None, places=PLACES):
    allowance = Allowance()
    allowance.left = left
    settings = {"launches": launches or Launches(most), "allowance": allowance, "places": places}
    return Gathered(lambda _: batches, **settings), allowance


def all_of(iterator, most=4):
    """The batches' numbers, launch by launch."""
    found = []
    while True:
        if (deferred := iterator.take(most)) is not None:
            (own,) = deferred
            found.append([int(own.at(index)[0]["x"][0, 0]) for index in range(len(own))])
        elif (batch := next(iterator, None)) is not None:
            found.append(int(batch[0]["x"][0, 0]))
        else:
            return found


@pytest.mark.parametrize(
    ("number", "wanted"),
    [
        (8, [[0, 1, 2, 3], [4, 5, 6, 7]]),
        (7, [[0, 1, 2, 3], [4, 5, 6]]),
        (5, [[0, 1, 2, 3], 4]),
        (0, []),
    ],
)
def test_a_launch_is_an_execution_or_the_rest(number, wanted):
    iterator, _ = gathered_of(Counted(number))
    assert all_of(iterator) == wanted
    assert iterator.take(4) is None
    assert next(iterator, None) is None


def test_batches_of_a_launch_have_one_shape(caplog):
    rows = [2, 2, 2, 2, 2, 3, 3, 2, 3, 2, 2, 2, 2]
    iterator, _ = gathered_of(Counted(13, rows=rows.__getitem__))
    # Of two rows: four, and then one; three, as the second length. Of three rows: two and one.
    with caplog.at_level("INFO", "tfaccel"):
        assert all_of(iterator) == [[0, 1, 2, 3], 4, [5, 6], 7, 8, [9, 10, 11], 12]
    assert caplog.text.count("several launches where the shapes of its batches differ") == 1


def test_few_lengths_are_compiled_for_a_shape():
    launches = Launches(10)
    assert [launches.cut("a", each) for each in (10, 3, 9, 2, 7)] == [
        [10],
        [3],
        [3, 3, 3],
        [1, 1],
        [3, 3, 1],
    ]
    assert launches.cut("b", 9) == [9]


def test_what_may_not_wait_comes_one_by_one():
    iterator, _ = gathered_of(Counted(6))
    found = []
    assert iterator.take(4, may_wait=False) is None
    for batch in iterator:
        found.append(int(batch[0]["x"][0, 0]))
    assert found == list(range(6))


def test_the_rest_of_a_launch_comes_one_by_one():
    """When XLA was turned off after launches were gathered."""
    iterator, _ = gathered_of(Counted(12))
    assert len(iterator.take(4)[0]) == 4
    found = []
    while iterator.take(4, may_wait=False) is None and (batch := next(iterator, None)):
        found.append(int(batch[0]["x"][0, 0]))
        assert batch[0]["x"].dtype == tf.int32
        assert batch[1] is None
    assert found == list(range(4, 12))


def test_two_launches_are_read_ahead_and_no_more():
    batches = Counted(100)
    iterator, _ = gathered_of(batches)
    assert batches.read == 0
    iterator.take(4)
    assert batches.comes_to(12) == 12  # the one that was taken, and two that wait
    iterator.take(4)
    assert batches.comes_to(16) == 16


def test_nothing_is_read_beyond_the_epoch():
    batches = Counted(100)
    iterator, allowance = gathered_of(batches, left=8)
    iterator.take(4)
    assert batches.comes_to(8) == 8
    iterator.take(4)
    assert batches.comes_to(8) == 8
    assert allowance.left == 0
    allowance.left = 8  # the next epoch
    iterator.take(4)
    assert batches.comes_to(16) == 16


def test_a_batch_before_the_first_epoch_is_read_alone():
    batches = Counted(100)
    iterator, _ = gathered_of(batches, left=0)
    assert int(next(iterator)[0]["x"][0, 0]) == 0
    assert batches.comes_to(1) == 1


@pytest.mark.parametrize("fails", [0, 3, 4, 9])
def test_an_error_comes_after_the_batches_before_it(fails):
    iterator, _ = gathered_of(Counted(100, fails=fails))
    found = []

    def read():
        while True:
            deferred = iterator.take(4)
            found.append(len(deferred[0]) if deferred else len([next(iterator)]))

    with pytest.raises(KeyError, match="of the user"):
        read()
    assert sum(found) == fails
    assert next(iterator, None) is None


def test_it_tells_whether_batches_were_read_in_vain():
    tells = []

    def begin(is_behind):
        tells.append(is_behind)
        return batches

    batches, allowance = Counted(8), Allowance()
    iterator = Gathered(begin, launches=Launches(4), allowance=allowance, places=PLACES)
    allowance.left = 8
    iterator.take(4)
    batches.comes_to(8)
    assert tells[0]()
    iterator.take(4)
    assert not tells[0]()


def test_copies_do_not_hold_up_the_reader(monkeypatch):
    """A copy waits for a device that is busy."""
    free, stack_to = threading.Event(), gathered.stack_to

    def waits(*arguments):
        assert free.wait(SOON_S)
        return stack_to(*arguments)

    batches = Counted(100)
    iterator, _ = gathered_of(batches)
    iterator.take(4)
    batches.comes_to(12)
    monkeypatch.setattr(gathered, "stack_to", waits)
    iterator.take(4)  # was copied before
    iterator.take(4)
    assert batches.comes_to(20) == 20
    free.set()
    assert len(iterator.take(4)[0]) == 4


def test_a_dropped_iterator_takes_its_threads_along(no_collector):
    before = set(threading.enumerate())  # with those of other tests, which nobody has collected
    iterator, _ = gathered_of(Counted(100))
    iterator.take(4)
    dropped = weakref.ref(iterator)
    names = ("tfaccel-gathering", "tfaccel-copying")
    own = [each for each in set(threading.enumerate()) - before if each.name.startswith(names)]
    assert len(own) >= 2
    del iterator
    assert dropped() is None
    ends = time.monotonic() + SOON_S
    while any(each.is_alive() for each in own):
        assert time.monotonic() < ends
        time.sleep(0.001)


def test_few_batches_go_together_that_are_large(monkeypatch, caplog):
    monkeypatch.setattr(gathered, "MOST_BYTES", 3 << 20)
    assert fitting(4, 1 << 20)[0] == 2
    assert fitting(3, 1 << 20) == (3, "")
    number, why = fitting(5, 1 << 20)
    assert number == 1
    assert "5 batches would take 5 MiB on a replica, more than 3 MiB, and no smaller number" in why
    assert fitting(4, 4 << 20)[0] == 1
    launches = Launches(4)
    with caplog.at_level("INFO", "tfaccel"):
        assert [launches.fitting(1 << 20) for _ in range(2)] == [2, 2]
    assert caplog.text.count("a launch takes 2 batches, because 4 batches would take 4 MiB") == 1


def test_what_makes_batches_is_equal_for_equal_structures():
    batch = {"b": tf.zeros(2), "a": (tf.zeros(2, tf.int32), None)}
    again = {"b": tf.zeros(1), "a": (tf.ones(5, tf.int32), None)}
    other = {"b": tf.zeros(1), "a": (tf.ones(5, tf.int64), None)}
    assert taken(batch) == taken(again)
    assert hash(taken(batch)) == hash(taken(again))
    assert taken(batch) != taken(other)


@pytest.mark.parametrize(
    ("spec", "reason"),
    [
        ({"x": tf.TensorSpec((None, 3), tf.int32), "y": None}, None),
        ((tf.TensorSpec((2,), tf.bfloat16), tf.OptionalSpec(None)), None),
        (tf.RaggedTensorSpec((None, None)), "a batch has a RaggedTensor"),
        (tf.SparseTensorSpec((2, 3)), "a batch has a SparseTensor"),
        (tf.TensorSpec((2,), tf.string), "a batch has values of dtype string"),
    ],
)
def test_dense_numbers_can_be_gathered(spec, reason):
    assert why_not(spec) == reason


@pytest.mark.gpu
def test_on_a_gpu_the_next_launches_are_copied_while_one_runs():
    """The host reads and copies the next launches although the GPU is busy for seconds."""
    places = Places(("/gpu:0",), lambda batch: [batch], lambda parts: parts[0])
    batches = Counted(100)
    iterator, _ = gathered_of(batches, places=places)
    with tf.device("/gpu:0"):
        x = tf.random.normal((8192, 8192)) / 100
        tf.linalg.matmul(x, x).numpy()
        iterator.take(4)
        batches.comes_to(12)
        began = time.perf_counter()
        for _ in range(50):
            x = tf.linalg.matmul(x, x) / 100
        (own,) = iterator.take(4)  # was copied before the GPU got busy
        took = time.perf_counter() - began
        assert batches.comes_to(16) == 16
        x.numpy()
        busy = time.perf_counter() - began
    assert took < busy / 2
    assert len(own) == 4
