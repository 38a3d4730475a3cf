import numpy as np
import pytest

from tfaccel import UserError
from tfaccel.data.shards import Plan, epoch_order, part


def rows(plan, step, replica_index, epoch=0):
    return plan.rows(epoch=epoch, step=step, replica_index=replica_index)


def epoch_of(plan, epoch=0):
    """Each step's real ids, replica by replica, in order."""
    return [
        np.concatenate(
            [
                batch.ids[batch.real]
                for replica in range(plan.num_replicas)
                for batch in [rows(plan, step, replica, epoch)]
            ]
        )
        for step in range(plan.num_steps)
    ]


def test_order_is_new_in_each_epoch_and_the_same_for_the_same_seed():
    def order(**settings):
        return epoch_order(100, **{"seed": 1, "epoch": 0, "shuffle": True, **settings}).tolist()

    assert order() == order()
    assert sorted(order()) == list(range(100))
    assert len({tuple(order(seed=seed, epoch=epoch)) for seed in (0, 1) for epoch in (0, 1)}) == 4
    assert order(shuffle=False) == list(range(100))


@pytest.mark.parametrize("num_replicas", [1, 2, 3, 4])
@pytest.mark.parametrize("num_examples", [1, 5, 37, 48])
def test_an_epoch_has_each_example_once_in_the_order_of_one_replica(num_examples, num_replicas):
    plan = Plan(num_examples, 12, num_replicas, seed=3, shuffle=True)
    one = Plan(num_examples, 12, 1, seed=3, shuffle=True)
    for epoch in range(2):
        for ours, wanted in zip(epoch_of(plan, epoch), epoch_of(one, epoch), strict=True):
            np.testing.assert_array_equal(ours, wanted)
        assert sorted(np.concatenate(epoch_of(plan, epoch))) == list(range(num_examples))


def test_every_batch_has_the_same_rows_and_padding_repeats_the_steps_own():
    plan = Plan(10, 8, 2)
    for step in range(plan.num_steps):
        for replica in range(2):
            batch = rows(plan, step, replica)
            assert len(batch.ids) == len(batch.positions) == len(batch.real) == 4
    last = [rows(plan, 1, replica) for replica in range(2)]
    assert [batch.ids.tolist() for batch in last] == [[8, 8, 8, 8], [9, 9, 9, 9]]
    assert [batch.real.tolist() for batch in last] == [[True, False, False, False]] * 2


def test_a_replica_without_rows_is_all_padding():
    plan = Plan(9, 8, 2)
    assert [rows(plan, 1, replica).real.sum() for replica in range(2)] == [0, 1]
    assert rows(plan, 1, 0).ids.tolist() == [8] * 4


def test_positions_are_those_of_the_global_batch():
    plan = Plan(37, 12, 3, shuffle=True)
    assert [rows(plan, 0, each).positions.tolist() for each in range(3)] == [
        [0, 1, 2, 3],
        [4, 5, 6, 7],
        [8, 9, 10, 11],
    ]


def test_drop_leaves_the_partial_batch_out():
    plan = Plan(10, 4, 2, last_batch="drop")
    assert plan.num_steps == 2
    assert np.concatenate(epoch_of(plan)).tolist() == list(range(8))
    with pytest.raises(UserError, match="leaves no batch"):
        Plan(3, 4, 2, last_batch="drop")


def test_repeat_fills_the_partial_batch_with_the_first_examples_again():
    plan = Plan(10, 4, 2, last_batch="repeat")
    assert np.concatenate(epoch_of(plan)).tolist() == [*range(10), 0, 1]


def test_a_batch_larger_than_the_data_is_all_of_it():
    plan = Plan(37, 10**10, 1)
    assert (plan.num_steps, plan.rows_per_replica) == (1, 37)


@pytest.mark.parametrize(
    ("batch", "replicas", "fix"), [(9, 2, "8 or 10"), (1, 2, "use 2"), (10, 4, "8 or 12")]
)
def test_a_batch_that_the_replicas_cannot_share_is_refused(batch, replicas, fix):
    with pytest.raises(UserError, match=fix):
        Plan(100, batch, replicas)


def test_parts_are_consecutive_and_differ_by_one_row_at_most():
    parts = [part(11, num_replicas=4, replica_index=index) for index in range(4)]
    assert [each.stop - each.start for each in parts] == [2, 3, 3, 3]
    assert [each.start for each in parts[1:]] == [each.stop for each in parts[:-1]]


@pytest.mark.parametrize("num_replicas", [1, 2, 4])
def test_repeat_gives_the_same_batch_on_any_number_of_replicas(num_replicas):
    plan = Plan(5, 8, num_replicas, last_batch="repeat")
    assert np.concatenate(epoch_of(plan)).tolist() == [0, 1, 2, 3, 4, 0, 1, 2]
