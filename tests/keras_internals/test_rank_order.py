import types

import numpy as np
import pytest
import tensorflow as tf

from tfaccel.keras_internals.rank_order import in_rank_order, places


def strategy_of(num_workers, num_local):
    """All that the function asks of a strategy, because the CPU has one replica in a worker."""
    extended = types.SimpleNamespace(worker_devices=[""] * num_local)
    return types.SimpleNamespace(extended=extended, num_replicas_in_sync=num_workers * num_local)


def cut(batch, num_workers, num_local):
    """What each replica gets, by rank, as TensorFlow cuts a batch: see the module."""
    num_pieces = num_workers * num_local
    size = -(-len(batch) // num_pieces)
    pieces = [batch[index * size : (index + 1) * size] for index in range(num_pieces)]
    return [
        pieces[local * num_workers + worker]
        for worker in range(num_workers)
        for local in range(num_local)
    ]


@pytest.mark.parametrize("num_workers", [2, 3])
@pytest.mark.parametrize("num_local", [2, 4])
@pytest.mark.parametrize("num_rows", [1, 3, 5, 7, 8, 23, 24, 96])
def test_the_replicas_rows_are_those_of_the_batch_in_order(num_workers, num_local, num_rows):
    rows = places(num_rows, num_workers=num_workers, num_local=num_local).numpy()
    got = np.concatenate(cut(rows, num_workers, num_local))
    np.testing.assert_array_equal(got, np.arange(num_rows))


def test_all_parts_of_a_batch_move_alike():
    x = np.arange(24).reshape(24, 1)
    ragged = tf.RaggedTensor.from_row_lengths(tf.range(24), [1] * 24)
    for data in ((x, {"a": x, "b": x}), {"x": x, "r": ragged}, (x,), x):
        dataset = tf.data.Dataset.from_tensor_slices(data).batch(7)
        moved = in_rank_order(dataset, strategy_of(2, 2))
        tf.nest.assert_same_structure(moved.element_spec, dataset.element_spec)
        whole = []
        for batch, before in zip(moved, dataset, strict=True):
            leaves = [
                np.array(each.to_tensor() if hasattr(each, "to_tensor") else each).ravel()
                for each in tf.nest.flatten(batch)
            ]
            for each in leaves:
                np.testing.assert_array_equal(each, leaves[0])
            old = tf.nest.flatten(before)[0]
            assert len(leaves[0]) == old.shape[0]
            whole += np.concatenate(cut(leaves[0], 2, 2)).tolist()
        assert whole == list(range(24))


def test_other_strategies_and_batches_keep_their_order():
    dataset = tf.data.Dataset.range(8).batch(4)
    for num_workers, num_local in ((1, 4), (4, 1)):
        assert in_rank_order(dataset, strategy_of(num_workers, num_local)) is dataset
    scalars = tf.data.Dataset.range(8)
    assert in_rank_order(scalars, strategy_of(2, 2)) is scalars
    sparse = dataset.map(lambda each: tf.sparse.from_dense(each[:, None]))
    assert in_rank_order(sparse, strategy_of(2, 2)) is sparse
