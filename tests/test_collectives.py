"""The collectives against numpy: two and three replicas of one process, and two and three workers.

Each runs `check_everything` in processes of its own: collectives of two strategies on the same
devices disturb each other. Every process knows what each rank holds.
"""

import concurrent.futures
import functools
import json
import os
import pathlib
import re
import socket

import numpy as np
import pytest
import tensorflow as tf
from conftest import in_new_process

from tfaccel import UserError
from tfaccel.collectives import all_gather, all_reduce, broadcast, local_rank, rank, world_size

FLOATS = (np.float64, np.float32, np.float16, tf.bfloat16.as_numpy_dtype)
ANY = (np.float16, tf.bfloat16.as_numpy_dtype, np.int64, np.int32, np.bool_)
DTYPES = {
    "sum": (*FLOATS, np.int64, np.int32, np.int32, np.int8, np.uint32),
    "mean": FLOATS,
    "min": ANY,
    "max": ANY,
}
SIZES = (2, 0, 3)  # along the axis to gather, by rank


@pytest.mark.parametrize("num_replicas", [2, 3])
def test_replicas_of_one_process(num_replicas):
    assert in_new_process(program(f"check_replicas({num_replicas})")) == "all well\n"


@pytest.mark.parametrize("num_workers", [2, 3])
def test_workers(num_workers):
    workers = [f"localhost:{port}" for port in free_ports(num_workers)]
    programs = [program(f"check_worker({workers}, {index})") for index in range(num_workers)]
    with concurrent.futures.ThreadPoolExecutor(num_workers) as pool:
        assert list(pool.map(in_new_process, programs)) == ["all well\n"] * num_workers


def test_without_a_strategy():
    check_everything(tf.distribute.get_strategy(), first_rank=0)


def test_a_per_replica_value_needs_its_strategy():
    two = tf.distribute.MirroredStrategy(["/cpu:0", "/cpu:1"])  # communicates nothing
    value = two.experimental_distribute_values_from_function(lambda _: tf.ones([]))
    with pytest.raises(UserError, match=r"call this within `with strategy\.scope\(\):`"):
        all_reduce(value)


def program(call):
    folder = str(pathlib.Path(__file__).parent)
    return f"import sys; sys.path.insert(0, {folder!r}); import test_collectives as t; t.{call}"


def free_ports(num):
    sockets = [socket.create_server(("localhost", 0)) for _ in range(num)]
    ports = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    return ports


def check_replicas(num_replicas):
    cpu = tf.config.list_physical_devices("CPU")[0]
    logical = [tf.config.LogicalDeviceConfiguration()] * num_replicas
    tf.config.set_logical_device_configuration(cpu, logical)
    devices = [f"/cpu:{index}" for index in range(num_replicas)]
    check_everything(tf.distribute.MirroredStrategy(devices), first_rank=0)
    print("all well")


def check_worker(workers, index):
    task = {"type": "worker", "index": index}
    os.environ["TF_CONFIG"] = json.dumps({"cluster": {"worker": workers}, "task": task})
    # On CPUs a worker has one replica.
    check_everything(tf.distribute.MultiWorkerMirroredStrategy(), first_rank=index)
    print("all well")


def check_everything(strategy, *, first_rank):
    check_ranks(strategy, first_rank)
    ranks = range(strategy.num_replicas_in_sync)
    for check in (
        check_all_reduce,
        check_all_gather,
        check_all_gather_of_slices,
        check_broadcast,
        check_one_value_for_all_replicas,
        check_gradients,
        check_errors,
    ):
        check(strategy, ranks)


def check_ranks(strategy, first_rank):
    size = strategy.num_replicas_in_sync

    def of_replica(_):
        return tf.constant([rank(), local_rank(), world_size()])

    for call in inside(strategy, of_replica, np.float32):
        for local, result in enumerate(call()):
            np.testing.assert_array_equal(result, [first_rank + local, local, size])
    for call in outside(strategy, of_replica, np.float32):
        np.testing.assert_array_equal(call(), [[first_rank, 0, size]])
    for call in inside(strategy, lambda _: all_gather(tf.constant([rank()])), np.float32):
        for result in call():
            np.testing.assert_array_equal(result, range(size))


def check_all_reduce(strategy, ranks):
    for op, dtypes in DTYPES.items():
        value = functools.partial(numbers_and_others, dtypes=dtypes)
        expected = over(ranks, functools.partial(reduced, op=op), value)
        check_everywhere(strategy, functools.partial(all_reduce, op=op), value, expected)


def numbers_and_others(rank, dtypes):
    special = np.float32([3, -np.inf, np.nan][rank])
    return {"numbers": numbers(rank, dtypes), "others": (special, np.zeros((0, 2), np.float32))}


def reduced(leaves, op):
    return getattr(np, op)(np.stack(leaves).astype(float), axis=0).astype(leaves[0].dtype)


def check_all_gather(strategy, ranks):
    check_gather(strategy, ranks, lambda size: (size, 2), axis=0, dtypes=ANY)
    check_gather(strategy, ranks, lambda size: (2, size), axis=1)
    check_gather(strategy, ranks, lambda size: (2, size, 3), axis=-2)
    # TensorFlow's own ends the process where nobody has an element.
    check_gather(strategy, ranks, lambda _: (0, 2), axis=0)
    check_gather(strategy, ranks, lambda size: (size, 0), axis=0)


def check_gather(strategy, ranks, shape, *, axis, dtypes=(np.float32,)):
    def value(rank):
        return numbers(rank, dtypes, shape(SIZES[rank]))

    def gather(tensors):
        gathered = all_gather(tensors, axis=axis)
        assert gathered[0].shape.rank == len(shape(0))  # known while it is traced, too
        return gathered

    expected = over(ranks, functools.partial(np.concatenate, axis=axis), value)
    check_everywhere(strategy, gather, value, expected)


def check_all_gather_of_slices(strategy, ranks):
    def value(rank):
        slices = slices_of(rank)
        return {"shaped": slices, "shapeless": tf.IndexedSlices(slices.values, slices.indices)}

    check_everywhere(strategy, all_gather, value, over(ranks, concatenated, value))


def slices_of(rank):
    (values,) = numbers(rank, [np.float32], (SIZES[rank], 2))
    indices = np.arange(SIZES[rank]) + rank
    return tf.IndexedSlices(tf.constant(values), tf.constant(indices), tf.constant([6, 2]))


def concatenated(slices):
    values = np.concatenate([each.values for each in slices])
    indices = np.concatenate([each.indices for each in slices])
    return tf.IndexedSlices(tf.constant(values), tf.constant(indices), slices[0].dense_shape)


def check_broadcast(strategy, ranks):
    for root in ranks:
        value = functools.partial(numbers_and_bits, root=root)
        operation = functools.partial(broadcast, root_rank=root)
        check_everywhere(strategy, operation, value, value(root))
        for call in everywhere(strategy, operation, value):
            for result in call():
                assert result["bits"].numpy().tobytes() == value(root)["bits"].tobytes()


def numbers_and_bits(rank, root):
    bits = [-0.0, 0, np.nan, np.inf, 1e-30] if rank == root else [np.nan, np.inf, 1, -np.inf, 2]
    return {"bits": np.float32(bits), "numbers": numbers(rank, ANY)}


def check_one_value_for_all_replicas(strategy, ranks):
    one = tf.constant([1.0, 2.0])  # one object for all replicas, and no copies
    with strategy.scope():
        variable = tf.Variable([3, 4])
    size = len(ranks)
    for operation, expected in (
        (lambda _: all_reduce(one), size * np.float32([1, 2])),
        (lambda _: all_gather(one), np.float32([1, 2] * size)),
        (lambda _: all_reduce([5, variable]), [np.int32(5 * size), np.int32([3, 4]) * size]),
        (lambda _: broadcast(variable, root_rank=size - 1), np.int32([3, 4])),
    ):
        check_everywhere(strategy, operation, np.float32, expected)


def check_gradients(strategy, ranks):
    """Against the same sum of losses without replicas."""
    mean = functools.partial(all_reduce, op="mean")
    highest = functools.partial(all_reduce, op="max")
    from_last = functools.partial(broadcast, root_rank=ranks[-1])
    even, uneven = [2] * len(ranks), SIZES
    check_gradient(strategy, ranks, all_reduce, tf.add_n, even)
    check_gradient(strategy, ranks, mean, lambda all_: tf.add_n(all_) / len(all_), even)
    check_gradient(strategy, ranks, highest, lambda all_: tf.reduce_max(all_, axis=0), even)
    check_gradient(strategy, ranks, from_last, lambda all_: all_[-1], even)
    check_gradient(strategy, ranks, all_gather, lambda all_: tf.concat(all_, axis=0), uneven)


def check_gradient(strategy, ranks, operation, local_operation, sizes):
    def value(rank):
        return numbers(rank, [np.float32], (sizes[rank], 2))[0]

    def loss(rank, result):
        return (rank + 1.0) * tf.reduce_sum(tf.cumsum(tf.reshape(result, [-1])))

    def gradient(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            mine = loss(rank(), operation(x * x))
        return tape.gradient(mine, x)

    all_x = [tf.constant(value(rank)) for rank in ranks]
    with tf.GradientTape() as tape:
        tape.watch(all_x)
        total = sum(loss(rank, local_operation([x * x for x in all_x])) for rank in ranks)
    expected = tape.gradient(total, all_x, unconnected_gradients="zero")
    for call in inside(strategy, gradient, value):
        for rank_here, result in zip(ranks_here(strategy), call(), strict=True):
            np.testing.assert_allclose(result, expected[rank_here], rtol=1e-6)


def check_errors(strategy, ranks):
    slices = tf.IndexedSlices(tf.ones([1, 2]), tf.constant([0]))
    size = len(ranks)
    for sentence, call in {
        "op='average' is not a reduction; use one of sum, mean, min, max": (
            lambda: all_reduce(1.0, op="average")
        ),
        "op='mean' of dtype int32; cast to a float dtype, or use op='sum'": (
            lambda: all_reduce([1.0, 1], op="mean")
        ),
        "op='sum' of dtype bool; cast to tf.int32, or use op='max' for any": (
            lambda: all_reduce(True)
        ),
        "dtype string cannot travel between replicas; cast to bool, an integer dtype other than "
        "uint64, or a float dtype": lambda: broadcast("text"),
        "tf.IndexedSlices are not reduced or broadcast; gather them with all_gather, or make them "
        "dense with tf.convert_to_tensor": lambda: all_reduce({"slices": slices}),
        "axis=1 of tf.IndexedSlices; they gather along axis=0 alone": (
            lambda: all_gather(slices, axis=1)
        ),
        "axis=2 is not an axis of shape (3, 4); use one from -2 to 1": (
            lambda: all_gather(tf.ones([3, 4]), axis=2)
        ),
        "axis=0 of a scalar, which has no axis; gather value[tf.newaxis]": (
            lambda: all_gather(1.0)
        ),
        f"root_rank={size} is the rank of no replica; use one from 0 to {size - 1}": (
            lambda: broadcast(1.0, root_rank=size)
        ),
    }.items():
        for each in everywhere(strategy, lambda _, call=call: call(), np.float32):
            with pytest.raises(UserError, match=f"^{re.escape(sentence)}$"):
                each()


def numbers(rank, dtypes, shape=(2, 3)):
    """An array of each dtype, of numbers that all of them add and divide by 2 and 3 exactly."""
    arrays = 6 * np.random.default_rng(rank).integers(0, 4, (len(dtypes), *shape))
    return [
        -array.astype(dtype) if dtype in FLOATS else array.astype(dtype)
        for array, dtype in zip(arrays, dtypes, strict=True)
    ]


def over(ranks, function, value):
    """The function of all ranks' values, leaf by leaf."""
    return tf.nest.map_structure(lambda *leaves: function(leaves), *map(value, ranks))


def check_everywhere(strategy, operation, value, expected):
    for call in everywhere(strategy, operation, value):
        for result in call():
            assert_same(result, expected)


def assert_same(actual, expected):
    actual, expected = (
        tf.nest.flatten(each, expand_composites=True) for each in (actual, expected)
    )
    for one, other in zip(actual, expected, strict=True):
        one, other = np.asarray(one), np.asarray(other)
        assert one.dtype == other.dtype
        np.testing.assert_array_equal(one.astype(float), other.astype(float), strict=True)


def everywhere(strategy, operation, value):
    return inside(strategy, operation, value) + outside(strategy, operation, value)


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
