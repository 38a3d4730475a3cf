import numpy as np
import pytest

from tfaccel.config.presets import preset
from tfaccel.data.feed import Feed
from tfaccel.data.shards import Plan

AUGMENT = preset("imagenet_color")


def make_feed(num_replicas=1, replica_index=0, **settings):
    plan = Plan(37, 12, num_replicas, seed=5, shuffle=True)
    return Feed(plan, AUGMENT, (8, 8), replica_index, **settings)


def test_replicas_together_have_the_rows_and_draws_of_one():
    one = make_feed()
    for number in range(8):  # two epochs; the last of each is partial
        parts = [make_feed(3, replica) for replica in range(3)]
        rows = [each.rows(number) for each in parts]
        wanted = one.rows(number)
        real = np.concatenate([each.real for each in rows])
        ids = np.concatenate([each.ids for each in rows])
        np.testing.assert_array_equal(ids[real], wanted.ids[wanted.real])
        for name, values in one.draws(number).items():
            split = np.concatenate([each.draws(number)[name] for each in parts])
            np.testing.assert_array_equal(split[real], values[wanted.real])


def test_a_feed_that_starts_later_gives_what_an_uninterrupted_one_gives():
    whole, rest = make_feed(), make_feed(first=6)
    for number in range(4):
        np.testing.assert_array_equal(rest.rows(number).ids, whole.rows(number + 6).ids)
        for name, values in whole.draws(number + 6).items():
            np.testing.assert_array_equal(rest.draws(number)[name], values)


def test_a_lost_example_becomes_padding_and_no_other_changes():
    whole, without = make_feed(), make_feed(lost=frozenset({0, 7}))
    for number in range(4):
        before, after = whole.rows(number), without.rows(number)
        gone = np.isin(before.ids, [0, 7])
        np.testing.assert_array_equal(after.ids[~gone], before.ids[~gone])
        np.testing.assert_array_equal(after.real, before.real & ~gone)
        assert not np.isin(after.ids, [0, 7]).any()


def ids_of_steps(plan, first, number):
    """The real ids of steps `first` to `number`, as a run reads them that begins there."""
    feeds = [Feed(plan, AUGMENT, (8, 8), each, first) for each in range(plan.num_replicas)]
    batches = [[each.rows(step) for each in feeds] for step in range(number - first)]
    return [np.concatenate([each.ids[each.real] for each in batch]) for batch in batches]


@pytest.mark.parametrize("trial", range(8))
def test_p6_a_resume_on_2_of_4_replicas_repeats_and_loses_no_image(trial):
    chance = np.random.default_rng(trial)
    num_examples, batch, epoch = chance.integers([20, 1, 0], [300, 20, 5]).tolist()
    settings = {"seed": trial, "shuffle": True}
    one, two, four = (Plan(num_examples, 4 * batch, each, **settings) for each in (1, 2, 4))
    begin, end = epoch * one.num_steps, (epoch + 1) * one.num_steps
    cut = begin + int(chance.integers(one.num_steps + 1))  # before the first step, or after all
    ours = ids_of_steps(four, begin, cut) + ids_of_steps(two, cut, end)
    for step, wanted in zip(ours, ids_of_steps(one, begin, end), strict=True):
        np.testing.assert_array_equal(step, wanted)
    assert sorted(np.concatenate(ours)) == list(range(num_examples))
