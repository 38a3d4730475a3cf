"""The collectives against numpy: two and three replicas of one process, and two and three workers.

Each runs `check_everything` in processes of its own: collectives of two strategies on the same
devices disturb each other. Every process knows what each rank holds.
"""

import concurrent.futures
import dataclasses
import functools
import json
import os
import pathlib
import re
import socket
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from conftest import in_new_process, new_process

from tfaccel import UserError
from tfaccel.runtime import strategy as strategy_lib
from tfaccel.runtime.cluster import Cluster
from tfaccel.runtime.collectives import (
    all_gather,
    all_reduce,
    broadcast,
    local_rank,
    rank,
    world_size,
)
from tfaccel.runtime.strategy import make_strategy

FLOATS = (np.float64, np.float32, np.float16, tf.bfloat16.as_numpy_dtype)
DTYPES = {
    "sum": (*FLOATS, np.int64, np.int32, np.int32, np.int8, np.uint32),
    "mean": FLOATS,
    "min": (np.float16, np.int64, np.int32, np.bool_),
    "max": (np.int32, np.bool_),
    "broadcast": (*FLOATS, np.int64, np.int32, np.bool_),
    "all_gather": (np.float16, np.int32, np.bool_),
}
SIZES = (2, 0, 3)  # along the axis to gather, by rank
# What precedes a call of this file in a process of its own.
START = f"""
import sys; sys.path[:0] = {[str(each) for each in pathlib.Path(__file__).parents[:2]]}
import test_collectives as here; here."""


@pytest.fixture(scope="module")
def two_replicas():
    """A process that checks two replicas out of a run's scope, and then everything in few places.

    To start it takes longer than half of what it does.
    """
    return new_process(START + "check_run(); here.check_replicas(2, 1)")


def test_replicas_of_one_process(two_replicas):
    assert two_replicas.stdout == "all well\n" * 2, two_replicas.stderr


def test_replicas_of_a_run_out_of_its_scope(two_replicas):
    assert two_replicas.stdout.startswith("all well\n"), two_replicas.stderr


@pytest.mark.slow  # each dtype, in each place
@pytest.mark.parametrize("num_replicas", [2, 3])
def test_replicas_of_one_process_with_every_dtype(num_replicas):
    run_together(f"check_replicas({num_replicas}, 9)")


@pytest.mark.slow  # half a minute; test_workers.py sees that workers sum and gather
@pytest.mark.parametrize("num_workers", [2, 3])
def test_workers(num_workers):
    workers = [f"localhost:{port}" for port in free_ports(num_workers)]
    run_together(*(f"check_worker({workers}, {index})" for index in range(num_workers)))


@pytest.mark.slow
def test_without_a_strategy(monkeypatch):
    monkeypatch.setattr(strategy_lib, "_latest", None)  # of another test's run
    check_everything(tf.distribute.get_strategy(), first_rank=0)


def run_together(*calls):
    """Makes each call to this file in a process of its own, all at the same time."""
    with concurrent.futures.ThreadPoolExecutor(len(calls)) as pool:
        outputs = list(pool.map(in_new_process, [START + call for call in calls]))
    assert outputs == ["all well\n"] * len(calls)


def free_ports(num):
    sockets = [socket.create_server(("localhost", 0)) for _ in range(num)]
    ports = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    return ports


@functools.cache
def devices_of(num_replicas):
    cpu = tf.config.list_physical_devices("CPU")[0]
    logical = [tf.config.LogicalDeviceConfiguration()] * num_replicas
    tf.config.set_logical_device_configuration(cpu, logical)
    return tuple(f"/cpu:{index}" for index in range(num_replicas))


def check_run():
    strategy = make_strategy(Cluster(), devices_of(2))
    assert (rank(), local_rank(), world_size()) == (0, 0, 2)
    value = per_replica(strategy, np.float32)  # of rank 0 a 0, of rank 1 a 1
    for call in (all_reduce, tf.function(all_reduce)):
        assert float(call(1.0)) == 2
        assert float(call(value)) == 1
    np.testing.assert_array_equal(all_gather(tf.constant([3])), [3, 3])
    assert float(broadcast(value, root_rank=1)) == 1
    of_replica = strategy.run(lambda: tf.constant([rank(), world_size()]))
    assert [each.numpy().tolist() for each in of_replica.values] == [[0, 2], [1, 2]]
    print("all well")


def check_replicas(num_replicas, most_dtypes):
    DTYPES.update({op: dtypes[:most_dtypes] for op, dtypes in DTYPES.items()})
    # Stock TensorFlow's, of which there may be one on the same devices.
    strategy = make_strategy(Cluster(), devices_of(num_replicas))
    strategy_lib._latest = None  # as where no run made it
    check_everything(strategy, first_rank=0, wholly=most_dtypes > 1)
    with pytest.raises(UserError, match="make this call within `with strategy"):
        all_reduce(per_replica(strategy, np.float32))
    print("all well")


def check_worker(workers, index):
    task = {"type": "worker", "index": index}
    os.environ["TF_CONFIG"] = json.dumps({"cluster": {"worker": workers}, "task": task})
    strategy = tf.distribute.MultiWorkerMirroredStrategy()  # on CPUs with one replica per worker
    check_everything(strategy, first_rank=index)
    with strategy.scope():
        np.testing.assert_array_equal(all_gather(tf.constant([index])), range(len(workers)))
    print("all well")


@dataclasses.dataclass(frozen=True)
class Case:
    """An operation on the value of each rank, and the result that each should have."""

    operation: Callable[[Any], Any]
    value: Callable[[int], Any]
    expected: Callable[[int], Any]


def check_everything(strategy, *, first_rank, wholly=True):
    """Not wholly, it checks what is traced inside and eager outside."""
    ranks = range(strategy.num_replicas_in_sync)
    check_ranks(strategy, first_rank)
    places, within = (everywhere, inside) if wholly else (in_two_places, traced_inside)
    check(strategy, first_rank, results(strategy, ranks), places)
    check(
        strategy, first_rank, {**gradients(ranks), "of unknown size": unknown_size_case()}, within
    )
    check_errors(strategy, ranks, places)


def check_ranks(strategy, first_rank):
    size = strategy.num_replicas_in_sync

    def of_replica(_):
        return tf.constant([rank(), local_rank(), world_size()])

    for call in inside(strategy, of_replica, np.float32):
        for local, result in enumerate(call()):
            np.testing.assert_array_equal(result, [first_rank + local, local, size])
    for call in outside(strategy, of_replica, np.float32):
        np.testing.assert_array_equal(call(), [[first_rank, 0, size]])


def check(strategy, first_rank, cases, places):
    """Checks all cases with one call for each place: to trace a call takes most of its time."""

    def operation(values):
        return {name: case.operation(values[name]) for name, case in cases.items()}

    def value(rank):
        return {name: case.value(rank) for name, case in cases.items()}

    for call in places(strategy, operation, value):
        for local, result in enumerate(call()):
            for name, case in cases.items():
                assert_same(result[name], case.expected(first_rank + local), name)


def assert_same(actual, expected, name):
    actual, expected = (
        tf.nest.flatten(each, expand_composites=True) for each in (actual, expected)
    )
    for one, other in zip(actual, expected, strict=True):
        one, other = np.asarray(one), np.asarray(other)
        assert one.dtype == other.dtype, name
        one, other = one.astype(float), other.astype(float)
        np.testing.assert_array_equal(one, other, name, strict=True)
        np.testing.assert_array_equal(np.signbit(one), np.signbit(other), name)


def results(strategy, ranks):
    """The cases whose result is the same on all ranks."""
    return {
        **{f"all_reduce {op}": reduce_case(ranks, op) for op in ("sum", "mean", "min", "max")},
        **{f"broadcast {root}": broadcast_case(root) for root in {0, ranks[-1]}},
        "all_gather": gather_case(
            ranks, lambda size: (size, 2), axis=0, dtypes=DTYPES["all_gather"]
        ),
        "along the second axis": gather_case(ranks, lambda size: (2, size, 3), axis=1),
        # TensorFlow's own gather ends the process where nobody has an element.
        "of nothing": gather_case(ranks, lambda _: (0, 2), axis=0),
        "of empty rows, along the last axis but one": gather_case(
            ranks, lambda size: (size, 0), axis=-2
        ),
        "IndexedSlices": case(ranks, all_gather, slices, concatenated),
        **one_for_all_cases(strategy, len(ranks)),
    }


def case(ranks, operation, value, function):
    """The function takes the values of all ranks, and is called for each leaf of the nest."""
    expected = tf.nest.map_structure(lambda *leaves: function(leaves), *map(value, ranks))
    return Case(operation, value, lambda _: expected)


def reduce_case(ranks, op):
    def value(rank):
        special = np.float32([3, -np.inf, np.nan][rank])
        others = (special, np.zeros((0, 2), np.float32))
        return {"numbers": numbers(rank, DTYPES[op]), "others": others}

    def reduced(leaves):
        return getattr(np, op)(np.stack(leaves).astype(float), axis=0).astype(leaves[0].dtype)

    return case(ranks, functools.partial(all_reduce, op=op), value, reduced)


def broadcast_case(root):
    def value(rank):
        ours, theirs = [-0.0, 0, np.nan, np.inf, 1e-30], [np.nan, np.inf, 1, -np.inf, np.nan]
        special = np.float32(ours if rank == root else theirs)
        return [special, *numbers(rank, DTYPES["broadcast"]), np.zeros([0, 2], np.int32)]

    return Case(functools.partial(broadcast, root_rank=root), value, lambda _: value(root))


def gather_case(ranks, shape, *, axis, dtypes=(np.float32,)):
    def value(rank):
        return numbers(rank, dtypes, shape(SIZES[rank]))

    def gather(tensors):
        gathered = all_gather(tensors, axis=axis)
        sizes = gathered[0].shape.as_list()
        del sizes[axis]
        assert None not in sizes  # while it is traced
        return gathered

    return case(ranks, gather, value, functools.partial(np.concatenate, axis=axis))


def slices(rank):
    (values,) = numbers(rank, [np.float32], (SIZES[rank], 2))
    indices = np.arange(SIZES[rank]) + rank
    return tf.IndexedSlices(tf.constant(values), tf.constant(indices), tf.constant([6, 2]))


def concatenated(slices):
    parts = zip(*((each.values, each.indices) for each in slices), strict=True)
    return tf.IndexedSlices(*(tf.concat(each, 0) for each in parts), slices[0].dense_shape)


def one_for_all_cases(strategy, size):
    one = tf.constant([1.0, 2.0])  # one object for all replicas
    with strategy.scope():
        variable = tf.Variable([3, 4])
    return {
        f"one for all: {name}": Case(operation, np.float32, lambda _, expected=expected: expected)
        for name, operation, expected in (
            ("all_reduce", lambda _: all_reduce(one), np.float32([size, 2 * size])),
            ("all_gather", lambda _: all_gather(one), np.float32([1, 2] * size)),
            ("number", lambda _: all_reduce(5), np.int32(5 * size)),
            ("variable", lambda _: broadcast(variable, root_rank=size - 1), np.int32([3, 4])),
        )
    }


def gradients(ranks):
    mean = functools.partial(all_reduce, op="mean")
    highest = functools.partial(all_reduce, op="max")
    from_last = functools.partial(broadcast, root_rank=ranks[-1])
    even, uneven = [2] * len(ranks), SIZES
    return {
        "sum": gradient_case(ranks, all_reduce, tf.add_n, even),
        "mean": gradient_case(ranks, mean, lambda all_: tf.add_n(all_) / len(all_), even),
        "max": gradient_case(ranks, highest, lambda all_: tf.reduce_max(all_, axis=0), even),
        "broadcast": gradient_case(ranks, from_last, lambda all_: all_[-1], even),
        "all_gather": gradient_case(ranks, all_gather, lambda all_: tf.concat(all_, 0), uneven),
    }


def gradient_case(ranks, operation, local_operation, sizes):
    """The gradient of the ranks' losses, against that of their sum without replicas."""

    def value(rank):
        return -numbers(rank, [np.float32], (sizes[rank], 2))[0]

    def loss(rank, result):
        return (rank + 1.0) * tf.reduce_sum(tf.cumsum(tf.reshape(result, [-1])))

    def gradient(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            own = loss(rank(), operation(x * x))
        return tape.gradient(own, x)

    all_x = [tf.constant(value(rank)) for rank in ranks]
    with tf.GradientTape() as tape:
        tape.watch(all_x)
        total = sum(loss(rank, local_operation([x * x for x in all_x])) for rank in ranks)
    expected = tape.gradient(total, all_x, unconnected_gradients="zero")
    return Case(gradient, value, lambda rank: expected[rank])


def unknown_size_case():
    def of_the_positive(tensor):
        positive = tf.boolean_mask(tensor, tensor > 0)  # none, which tracing cannot know
        return [all_reduce(positive), all_gather(positive)]

    nothing = np.zeros(0, np.float32)
    return Case(
        of_the_positive, lambda rank: numbers(rank, [np.float32])[0], lambda _: [nothing, nothing]
    )


def check_errors(strategy, ranks, places):
    slices = tf.IndexedSlices(tf.ones([1, 2]), tf.constant([0]))
    size = len(ranks)
    for sentence, call in {
        "op='average' is not a reduction; use one of sum, mean, min, max": (
            lambda: all_reduce(1.0, op="average")
        ),
        "op='mean' is undefined for dtype int32; cast to float, or use op='sum'": (
            lambda: all_reduce([1.0, 1], op="mean")
        ),
        "op='sum' is undefined for dtype bool; cast to tf.int32, or use op='max'": (
            lambda: all_reduce(True)
        ),
        "dtype string cannot be sent between replicas; cast to bool, an integer dtype other than "
        "uint64, or a float dtype": lambda: broadcast("text"),
        "tf.IndexedSlices cannot be reduced or broadcast; gather them with all_gather, or make "
        "them dense with tf.convert_to_tensor": lambda: all_reduce({"slices": slices}),
        "axis=1 of tf.IndexedSlices; only axis=0 can be gathered": (
            lambda: all_gather(slices, axis=1)
        ),
        "axis=2 is not an axis of shape (3, 4); use one from -2 to 1": (
            lambda: all_gather(tf.ones([3, 4]), axis=2)
        ),
        "axis=0, but a scalar has no axis; gather value[tf.newaxis]": (lambda: all_gather(1.0)),
        f"root_rank={size}, but no replica has this rank; use one from 0 to {size - 1}": (
            lambda: broadcast(1.0, root_rank=size)
        ),
    }.items():
        for each in places(strategy, lambda _, call=call: call(), np.float32):
            with pytest.raises(UserError, match=f"^{re.escape(sentence)}$"):
                each()


def numbers(rank, dtypes, shape=(2, 3)):
    """An array of each dtype, of numbers that all of them add and divide by 2 and 3 exactly."""
    arrays = 6 * np.random.default_rng(rank).integers(1, 5, (len(dtypes), *shape))
    return [
        -array.astype(dtype) if dtype in FLOATS else array.astype(dtype)
        for array, dtype in zip(arrays, dtypes, strict=True)
    ]


def everywhere(strategy, operation, value):
    return inside(strategy, operation, value) + outside(strategy, operation, value)


def in_two_places(strategy, operation, value):
    return [*traced_inside(strategy, operation, value), outside(strategy, operation, value)[0]]


def traced_inside(strategy, operation, value):
    return inside(strategy, operation, value)[1:]


def inside(strategy, operation, value):
    """Calls the operation in a replica function: eagerly and traced, for each replica's result."""

    def run():
        return strategy.run(operation, args=(per_replica(strategy, value),))

    def result_of(place, result):
        of_replicas = strategy.experimental_local_results
        return tf.nest.map_structure(lambda leaf: of_replicas(leaf)[place], result)

    def local_results(run):
        result = run()
        return [result_of(place, result) for place, _ in enumerate(ranks_here(strategy))]

    return [functools.partial(local_results, each) for each in (run, tf.function(run))]


def outside(strategy, operation, value):
    """Calls it on a per-replica value, eagerly and traced, for a list of its one result."""

    def run():
        return operation(per_replica(strategy, value))

    def in_scope(run):
        with strategy.scope():
            return [run()]

    return [functools.partial(in_scope, each) for each in (run, tf.function(run))]


def per_replica(strategy, value):
    def tensors(context):
        return tf.nest.map_structure(
            lambda leaf: leaf if isinstance(leaf, tf.IndexedSlices) else tf.convert_to_tensor(leaf),
            value(context.replica_id_in_sync_group),
        )

    return strategy.experimental_distribute_values_from_function(tensors)


def ranks_here(strategy):
    ranks = strategy.experimental_distribute_values_from_function(
        lambda context: context.replica_id_in_sync_group
    )
    return strategy.experimental_local_results(ranks)
