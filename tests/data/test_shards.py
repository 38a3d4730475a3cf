import numpy as np
import pytest

from tfaccel.data import shards


def batches(num_examples, *, size, replicas, replica):
    return [
        shards.replica_batch(
            np.arange(num_examples),
            step=step,
            global_batch_size=size,
            num_replicas=replicas,
            replica_index=replica,
        ).tolist()
        for step in range(shards.num_steps(num_examples, global_batch_size=size))
    ]


@pytest.mark.parametrize(
    ("num_examples", "size", "expected"),
    [
        (10, 5, 2),  # even
        (11, 5, 3),  # the partial one counts
        (3, 5, 1),  # fewer examples than one batch
    ],
)
def test_num_steps(num_examples, size, expected):
    assert shards.num_steps(num_examples, global_batch_size=size) == expected


def test_batches_of_one_replica_end_with_a_partial_one():
    assert batches(5, size=2, replicas=1, replica=0) == [[0, 1], [2, 3], [4]]


def test_replicas_share_each_global_batch_in_order():
    assert batches(8, size=4, replicas=2, replica=0) == [[0, 1], [4, 5]]
    assert batches(8, size=4, replicas=2, replica=1) == [[2, 3], [6, 7]]


def test_replicas_share_a_partial_batch_evenly():
    shares = [batches(6, size=4, replicas=4, replica=index)[-1] for index in range(4)]
    assert shares == [[], [4], [], [5]]


def test_order_is_a_permutation_that_seed_and_epoch_decide():
    def order(seed, epoch):
        return shards.epoch_order(1000, seed=seed, epoch=epoch, shuffle=True).tolist()

    assert sorted(order(0, 0)) == list(range(1000))
    assert order(0, 0) == order(0, 0)
    assert len({tuple(order(*each)) for each in [(0, 0), (0, 1), (1, 0), (1, 1)]}) == 4


def test_order_without_shuffle_is_the_files_own():
    assert shards.epoch_order(4, seed=7, epoch=3, shuffle=False).tolist() == [0, 1, 2, 3]
