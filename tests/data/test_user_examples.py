import threading
import time
import weakref

import keras
import numpy as np
import pytest
import tensorflow as tf

from tfaccel import UserError
from tfaccel.data import gathered
from tfaccel.data.placement import Placement
from tfaccel.data.user_examples import open_examples
from tfaccel.runtime.devices import Device

CPU = Device("/cpu:0", None)
ENDS_S = 60  # what takes 10 ms (2 cores, 2026-11-22); a lock that is waited for is never free


class Numbered:
    """37 images, uint8, all of the colour of their index; the index is the label."""

    def __len__(self):
        return 37

    def __getitem__(self, index):
        assert type(index) is int
        return np.full((4, 6, 3), index, np.uint8), index


class Table:
    """Any examples, in a list."""

    def __init__(self, *examples):
        self.examples = examples

    def __len__(self):
        return len(self.examples)

    def __getitem__(self, index):
        return self.examples[index]


def opened(source, *, size=8, replicas=1, shuffle=False, last_batch="pad", steps=None):
    return open_examples(
        source,
        global_batch_size=size,
        num_replicas=replicas,
        seed=3,
        shuffle=shuffle,
        last_batch=last_batch,
        steps_per_epoch=steps,
    )


def stream_of(data, *, replica=0, first=0, device=CPU, threads=3):
    return data.stream(Placement(device, threads, seed=0), data.feed(replica, first=first))


def launches_of(data, most, *, replica=0, first=0, device=CPU, threads=3):
    return data.deferred(Placement(device, threads, seed=0), data.feed(replica, first=first), most)


def draw(stream, num_batches):
    return [next(stream) for _ in range(num_batches)]


@pytest.mark.parametrize("replicas", [1, 2, 3])
@pytest.mark.parametrize("size", [6, 12])
def test_every_example_counts_once_in_each_epoch_in_the_plans_order(size, replicas):
    data = opened(Numbered(), size=size, replicas=replicas, shuffle=True)
    assert data.plan.num_examples == 37
    streams = [stream_of(data, replica=replica) for replica in range(replicas)]
    feeds = [data.feed(replica) for replica in range(replicas)]
    orders = []
    for epoch in range(3):
        labels = []
        for step in range(data.plan.num_steps):
            for stream, feed in zip(streams, feeds, strict=True):
                rows = feed.rows(epoch * data.plan.num_steps + step)
                image, label = next(stream)
                np.testing.assert_array_equal(label, rows.ids)
                np.testing.assert_array_equal(image[:, 3, 5, 2], rows.ids)
                labels += label.numpy()[rows.real].tolist()
        assert sorted(labels) == list(range(37))
        orders.append(tuple(labels))
    assert len(set(orders)) == 3


def test_order_does_not_depend_on_the_replicas():
    one, two = (opened(Numbered(), replicas=each, shuffle=True) for each in (1, 2))
    (_, whole), (_, left), (_, right) = (
        next(stream_of(data, replica=replica)) for data, replica in ((one, 0), (two, 0), (two, 1))
    )
    np.testing.assert_array_equal(whole, tf.concat([left, right], 0))


def test_values_stay_as_they_are_but_for_double_floats():
    dtypes = ["uint8", "int8", "int32", "int64", "float16", "float32", "bool"]
    data = opened(Table((tuple(np.ones(2, each) for each in dtypes),)), size=1)
    (values,) = next(stream_of(data))
    assert [each.dtype.name for each in values] == dtypes
    x, y = next(stream_of(opened(Table((np.pi, 7)), size=1)))
    assert (x.dtype, y.dtype) == (tf.float32, tf.int64)  # Python's own numbers are 64 bits wide
    assert x.numpy().tolist() == [np.float32(np.pi)]


@pytest.mark.parametrize(
    "example",
    [
        (np.ones((2, 3)), 1),
        (np.ones(2),),
        ({"b": np.ones(2), "a": (1, np.ones(3))}, {"out": 1.0}),
        (np.ones(2), 1, 0.5),
        ([1, 2, 3], np.float32(1)),  # a list is an array
    ],
)
def test_batches_have_the_structure_of_an_example(example):
    data = opened(Table(example, example), size=2)
    batch = next(stream_of(data))
    tf.nest.assert_same_structure(batch, data.spec)
    for tensor, spec in zip(tf.nest.flatten(batch), tf.nest.flatten(data.spec), strict=True):
        assert (tensor.shape, tensor.dtype) == (spec.shape, spec.dtype)
        assert tensor.shape[0] == 2


@pytest.mark.parametrize("first", [0, 3])
def test_a_launch_has_the_batches_that_come_one_by_one(first):
    data = opened(Numbered(), replicas=2, shuffle=True)  # five batches an epoch
    for replica in range(2):
        launches = launches_of(data, 3, replica=replica, first=first)
        one_by_one = stream_of(data, replica=replica, first=first)
        lengths = []
        for deferred in draw(launches, 4):
            lengths.append(len(deferred))
            for index in range(len(deferred)):
                for found, wanted in zip(deferred.at(index), next(one_by_one), strict=True):
                    assert found.dtype == wanted.dtype
                    np.testing.assert_array_equal(found, wanted)
        assert lengths == ([3, 2, 3, 2] if first == 0 else [2, 3, 2, 3])


def test_a_launch_ends_before_the_batch_of_a_fault():
    class Fails(Numbered):
        def __getitem__(self, index):
            if index == 20:
                raise KeyError("mine")
            return super().__getitem__(index)

    launches = launches_of(opened(Fails(), size=8), 4)
    assert len(next(launches)) == 2
    for _ in range(2):
        with pytest.raises(UserError, match="reading example 20 failed: KeyError"):
            next(launches)
    with pytest.raises(UserError, match="reading example 20 failed: KeyError"):
        next(launches_of(opened(Fails(), size=8), 4, first=2))


def test_large_batches_are_fewer_in_a_launch(monkeypatch):
    data, batch = opened(Numbered(), replicas=2), 4 * (4 * 6 * 3 + 8)
    assert data.at_a_time([CPU], 4) == (4, "")
    monkeypatch.setattr(gathered, "MOST_BYTES", 3 * batch)
    number, why = data.at_a_time([CPU], 4)
    assert number == 2
    assert why.startswith("4 batches would take 1 MiB on a replica")


def test_an_example_that_is_x_alone_becomes_a_tuple_of_one():
    (x,) = next(stream_of(opened(Table(np.ones(3), np.zeros(3)), size=2)))
    assert x.numpy().tolist() == [[1, 1, 1], [0, 0, 0]]
    (x,) = next(stream_of(opened(Table({"a": 1}, {"a": 2}), size=2)))
    assert x["a"].numpy().tolist() == [1, 2]


def test_rows_stay_in_order_when_some_take_longer():
    class Slow(Numbered):
        def __getitem__(self, index):
            time.sleep(0.01 * (index % 3 == 0))
            return super().__getitem__(index)

    labels = [label.numpy().tolist() for _, label in draw(stream_of(opened(Slow())), 4)]
    assert labels == np.arange(32).reshape(4, 8).tolist()


def test_the_source_is_read_by_all_threads_and_ahead():
    class Watched(Numbered):
        threads, read = set(), set()

        def __getitem__(self, index):
            self.threads.add(threading.current_thread().name)
            self.read.add(index)
            time.sleep(0.001)
            return super().__getitem__(index)

    stream = stream_of(opened(Watched()))
    next(stream)
    deadline = time.monotonic() + 300
    while len(Watched.read) < 24 and time.monotonic() < deadline:
        time.sleep(0.01)
    time.sleep(0.05)
    assert Watched.read == set(range(24))  # the batch that was taken, and two ahead
    assert len({each for each in Watched.threads if each.startswith("tfaccel")}) == 3


def test_a_reused_array_is_copied_in_time():
    class Reusing:
        def __init__(self):
            self.array = np.zeros(3)

        def __len__(self):
            return 16

        def __getitem__(self, index):
            self.array[:] = index
            return self.array

    (x,) = next(stream_of(opened(Reusing()), threads=1))
    np.testing.assert_array_equal(x[:, 0], np.arange(8))


# Endless.


def test_a_callable_counts_the_examples_of_all_replicas():
    for replicas in (1, 2, 4):
        data = opened(lambda index: (float(index), index), replicas=replicas, steps=3)
        assert (data.plan.num_examples, data.plan.num_steps) == (None, 3)
        streams = [stream_of(data, replica=replica) for replica in range(replicas)]
        for step in range(7):  # over the ends of epochs
            labels = np.concatenate([next(stream)[1] for stream in streams])
            np.testing.assert_array_equal(labels, np.arange(8 * step, 8 * step + 8))
            assert all(data.feed(replica).rows(step).real.all() for replica in range(replicas))


def test_a_late_start_goes_on_where_an_uninterrupted_run_would():
    for source, steps in ((Numbered(), None), (lambda index: (0, index), 3)):
        data = opened(source, replicas=2, steps=steps, shuffle=steps is None)
        expected = draw(stream_of(data, replica=1), 9)[7:]
        late = draw(stream_of(data, replica=1, first=7), 2)
        for one, other in zip(expected, late, strict=True):
            np.testing.assert_array_equal(one[1], other[1])


# Mistakes.


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (Numbered, r"Numbered is a class; give an object of it: Numbered\(\)"),
        ((np.ones(3), np.ones(3)), "a tuple of arrays is not a source; expected an object with"),
        ({"x": np.ones(3)}, "a dict of arrays is not a source"),
        (iter([1, 2]), "list_iterator cannot be indexed or called; expected an object with"),
        (None, "NoneType cannot be indexed or called"),
        (Table(), "Table has no examples; expected one or more"),
        (Table("text"), r"example 0: \[0\] has dtype <U4; expected numbers"),
        (Table((1, None)), r"example 0: \[1\] has dtype object; expected numbers"),
        (Table((1, 2, 3, 4)), r"example 0 has 4 parts; expected x, \(x, y\) or \(x, y, sample_w"),
        (Table([np.ones(2), np.ones(3)]), "reading example 0 failed: ValueError: "),
    ],
)
def test_sources_that_cannot_be_read_are_refused(source, message):
    with pytest.raises(UserError, match=message):
        opened(source, size=1)


def test_a_keras_dataset_of_batches_is_refused():
    class Batches(keras.utils.PyDataset):
        def __len__(self):
            return 2

        def __getitem__(self, index):
            return np.ones((8, 3)), np.ones(8)

    with pytest.raises(UserError, match="Batches is a keras PyDataset, which gives batches"):
        opened(Batches())


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (
            (np.ones((2, 3), np.float32), 1),
            r"example 5: \[0\] is float32\[2, 3\], expected float32\[2, 2\] as in example 0",
        ),
        ((np.ones((2, 2), np.float32), 1.5), r"5: \[1\] is float32\[\], expected int64\[\]"),
        ((np.ones((2, 2), np.uint8), 1), r"5: \[0\] is uint8\[2, 2\], expected float32\[2, 2\]"),
        (
            ({"a": 1}, 1),
            r"example 5 has \[0\]\['a'\], \[1\], expected \[0\], \[1\] as in example 0",
        ),
    ],
)
def test_examples_unlike_the_first_are_errors(other, message):
    examples = [(np.ones((2, 2)), 1)] * 8
    examples[5] = other
    with pytest.raises(UserError, match=message):
        next(stream_of(opened(Table(*examples))))


def test_what_the_source_raises_is_named_with_its_index_when_it_is_due():
    class Fails(Numbered):
        def __getitem__(self, index):
            return {"label": 1}["lable"] if index == 11 else super().__getitem__(index)

    stream = stream_of(opened(Fails()))
    next(stream)
    with pytest.raises(
        UserError, match=r"^reading example 11 failed: KeyError: 'lable'$"
    ) as caught:
        next(stream)
    assert isinstance(caught.value.__cause__, KeyError)


@pytest.mark.parametrize("error", [StopIteration, IndexError])
def test_a_callable_that_ends_is_an_error(error):
    def source(index):
        if index == 20:
            raise error("the end")
        return index

    stream = stream_of(opened(source, steps=5))
    draw(stream, 2)
    with pytest.raises(UserError, match=r"example 20 failed: .*; a callable must not end, so give"):
        next(stream)


def test_a_stream_that_is_collected_in_its_own_thread_ends(no_collector):
    # The collector runs wherever an object is made: also in a reader, while a pool is locked.
    held = [stream_of(opened(Numbered()))]
    next(held[0])
    dropped, pool = weakref.ref(held[0]), held[0]._make.args[-1]
    with pool._shutdown_lock:
        dropping = threading.Thread(target=held.clear, daemon=True)  # as the collector does
        dropping.start()
        dropping.join(ENDS_S)
        assert not dropping.is_alive()
    assert dropped() is None


def test_settings_must_suit_the_source():
    with pytest.raises(UserError, match="a callable has no end; give steps_per_epoch"):
        opened(lambda index: index)
    with pytest.raises(UserError, match="shuffle=True needs a source with a length"):
        opened(lambda index: index, shuffle=True, steps=3)
    with pytest.raises(UserError, match="steps_per_epoch=0; expected a whole number"):
        opened(lambda index: index, steps=0)
    with pytest.raises(UserError, match="steps_per_epoch=3 is only for a callable"):
        opened(Numbered(), steps=3)
    with pytest.raises(UserError, match="last_batch='keep'"):
        opened(Numbered(), last_batch="keep")
    for source, steps in ((Numbered(), None), (lambda index: index, 3)):
        with pytest.raises(UserError, match="global_batch_size=8 is not divisible by 3 replicas"):
            opened(source, replicas=3, steps=steps)


# What is left behind.


def test_a_dropped_stream_takes_its_threads_and_the_source_along(no_collector):
    before = set(threading.enumerate())  # also of streams that wait for the collector

    def ours():
        new = set(threading.enumerate()) - before
        return [each for each in new if each.name.startswith("tfaccel-")]

    source = Numbered()
    data = opened(source)
    streams = [stream_of(data) for _ in range(3)]
    for stream in streams:
        next(stream)
    assert ours()
    alive = weakref.ref(source)
    del stream, streams, data, source
    deadline = time.monotonic() + ENDS_S
    while (ours() or alive()) and time.monotonic() < deadline:
        time.sleep(0.01)  # they end by themselves, in a moment
    assert not ours()
    assert alive() is None


def test_batches_are_on_the_replicas_device():
    image, _ = next(stream_of(opened(Numbered()), device=Device("/cpu:1", None)))
    assert "CPU:1" in image.device


@pytest.mark.gpu
def test_batches_are_on_the_gpu():
    data = opened(Numbered(), size=5)
    stream = stream_of(data, device=Device("/gpu:0", 0))
    for step, (image, label) in enumerate(draw(stream, 9)):
        assert "GPU:0" in image.device
        ids = data.feed(0).rows(step).ids
        np.testing.assert_array_equal(label, ids)
        np.testing.assert_array_equal(
            image, np.full((4, 6, 3, 5), ids, np.uint8).transpose(3, 0, 1, 2)
        )
