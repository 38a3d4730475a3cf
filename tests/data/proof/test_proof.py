"""Sound loaders pass, and each planted fault is named by one finding, the right one."""

import dataclasses

import numpy as np
import pytest

from tfaccel.config import AugmentConfig
from tfaccel.data.feed import Feed
from tfaccel.data.proof.epochs import Epoch
from tfaccel.data.proof.proof import fingerprints, record, verdict
from tfaccel.data.shards import Plan

AUGMENT = AugmentConfig(window="random_resized_crop", horizontal_flip=True)
FLIP = AugmentConfig(horizontal_flip=True)


def trace(feeds, num_steps):
    """What a Loader gives of these replicas' feeds."""
    for number in range(num_steps):
        step = []
        for feed in feeds:
            rows = feed.rows(number)
            step.append((rows.ids, rows.real, fingerprints(feed.draws(number))))
        yield step


def epochs_of(num_examples, batch, num_replicas, *, augment=AUGMENT, num_epochs=2, **plan):
    plan = Plan(num_examples, batch, num_replicas, **{"shuffle": True, **plan})
    feeds = [Feed(plan, augment, (8, 8), replica) for replica in range(num_replicas)]
    return record(trace(feeds, num_epochs * plan.num_steps), plan.num_steps)


def judged(epochs, num_examples=96, shuffle=True, last_batch="pad"):
    return verdict(epochs, num_examples=num_examples, shuffle=shuffle, last_batch=last_batch)


def faults(found):
    return {each.name: each.text for each in found.findings if each.ok is False}


@pytest.mark.parametrize("last_batch", ["pad", "drop", "repeat"])
@pytest.mark.parametrize("num_replicas", [1, 2, 3, 4])
@pytest.mark.parametrize("num_examples", [1, 3, 5, 11, 12, 37, 97])
@pytest.mark.parametrize("augment", [AUGMENT, FLIP, AugmentConfig()], ids=["crop", "flip", "none"])
def test_our_own_plan_is_sound(num_examples, num_replicas, last_batch, augment):
    if last_batch == "drop" and num_examples < 12:
        return  # there is no such plan
    for shuffle in (True, False):
        settings = {"last_batch": last_batch, "shuffle": shuffle}
        epochs = epochs_of(
            num_examples, 12, num_replicas, augment=augment, num_epochs=3, **settings
        )
        found = judged(epochs, num_examples, **settings)
        assert found.ok, str(found)


# Planted faults. 96 examples, 6 steps of 16 on 4 replicas, unless said otherwise.


@pytest.fixture
def sound():
    return epochs_of(96, 16, 4)


def changed(epochs, **arrays):
    """The epochs with arrays that functions make of them."""
    return [
        dataclasses.replace(each, **{name: make(each) for name, make in arrays.items()})
        for each in epochs
    ]


def of_first_replica(array):
    return np.repeat(array[:, :1], array.shape[1], axis=1)


def test_equal_shards(sound):
    epochs = changed(sound, ids=lambda each: of_first_replica(each.ids))
    assert faults(judged(epochs)) == {
        "shards": "replicas 0 and 1 read the same examples, in every step: shard_id and num_shards "
        "are not set"
    }


def test_equal_shards_each_in_its_own_order():
    """Every replica shuffles all examples, by a seed of its own, and takes its share of steps."""
    rng = np.random.default_rng(0)
    steps = [
        [(ids, np.ones(4, bool), rng.integers(2**60, size=4)) for ids in replicas]
        for _ in range(2)
        for replicas in np.stack([rng.permutation(96).reshape(24, 4) for _ in range(4)], axis=1)
    ]
    assert faults(judged(record(steps, 24))) == {
        "shards": "replicas 0 and 1 read the same examples, each in its own order: shard_id and "
        "num_shards are not set"
    }


def test_no_shuffle():
    epochs = epochs_of(96, 16, 4, shuffle=False)
    assert faults(judged(epochs)) == {
        "order": "epoch 0 is in the order of the files: nothing shuffles"
    }


def test_shuffled_once(sound):
    epochs = [sound[0], dataclasses.replace(sound[1], ids=sound[0].ids)]
    assert faults(judged(epochs)) == {
        "order": "epochs 0 and 1 have the same order: shuffled only once"
    }


def test_shuffled_where_it_should_not_be(sound):
    assert faults(judged(sound, shuffle=False)) == {
        "order": "epochs 0 and 1 differ; expected no shuffling"
    }


@pytest.mark.parametrize("augment", [AUGMENT, FLIP], ids=["crop", "flip"])
def test_equal_seeds(augment):
    sound = epochs_of(96, 16, 4, augment=augment)
    epochs = changed(sound, draws=lambda each: of_first_replica(each.draws))
    assert faults(judged(epochs)) == {
        "draws": "replicas 0 and 1 draw the same random numbers: their seeds are equal"
    }
    two = changed(sound, draws=lambda each: each.draws[:, [0, 1, 2, 1]])
    assert "replicas 1 and 3 draw" in faults(judged(two))["draws"]


def test_a_seed_without_the_epoch(sound):
    epochs = [sound[0], dataclasses.replace(sound[1], draws=sound[0].draws)]
    assert faults(judged(epochs)) == {
        "draws": "epochs 0 and 1 draw the same random numbers: the seed does not depend on the "
        "epoch"
    }


def test_one_draw_for_a_whole_batch(sound):
    epochs = changed(sound, draws=lambda each: np.repeat(each.draws[..., :1], 4, axis=2))
    assert faults(judged(epochs)) == {"draws": "all rows of a batch have the same random numbers"}


def test_one_draw_for_every_step(sound):
    epochs = changed(sound, draws=lambda each: np.repeat(each.draws[:1], 6, axis=0))
    assert faults(judged(epochs)) == {"draws": "every step draws the same random numbers"}


def test_one_draw_for_all(sound):
    epochs = changed(sound, draws=lambda each: each.draws * 0)
    assert faults(judged(epochs)) == {"draws": "all 192 rows have the same random numbers"}


def test_few_flips_may_be_equal():
    """Eight rows of one bit: equal on two replicas once in 16 times."""
    epochs = epochs_of(8, 8, 2, augment=FLIP)
    assert judged(changed(epochs, draws=lambda each: of_first_replica(each.draws)), 8).ok


def test_a_lost_shard(sound):
    """Replica 2 of 4 gives padding alone."""
    real = np.array([True, True, False, True])[None, :, None]
    found = judged(changed(sound, real=lambda each: each.real & real))
    (text,) = faults(found).values()
    assert faults(found).keys() == {"coverage"}
    missing = sorted(sound[0].ids[:, 2].ravel())
    assert text == (
        f"epoch 0 leaves out 24 of 96 examples: {', '.join(map(str, missing[:5]))}, ..."
    )


def test_fewer_replicas_than_shards():
    """Four shards, of which three are read: the epoch is as much shorter."""
    epochs = changed(
        epochs_of(96, 16, 4),
        **{
            name: lambda each, name=name: getattr(each, name)[:, :3]
            for name in ("ids", "real", "draws", "num_rows")
        },
    )
    assert faults(judged(epochs)) == {
        "length": "epoch 0 has 6 steps, and their 72 rows are 0.75 times the 96 examples; "
        "expected 8 steps"
    }


@pytest.mark.parametrize("shuffle", [True, False])
def test_an_epoch_too_long(shuffle):
    """As many steps as if there were one replica: N replicas make N epochs in each."""
    plan = Plan(96, 16, 4, shuffle=shuffle)
    feeds = [Feed(plan, AUGMENT, (8, 8), replica) for replica in range(4)]
    found = judged(record(trace(feeds, 48), 24), shuffle=shuffle)
    assert faults(found) == {
        "length": "epoch 0 has 24 steps, and their 384 rows are 4.00 times the 96 examples; "
        "expected 6 steps"
    }


def test_an_epoch_too_short(sound):
    plan = Plan(96, 16, 4, shuffle=True)
    feeds = [Feed(plan, AUGMENT, (8, 8), replica) for replica in range(4)]
    found = judged(record(trace(feeds, 11), 6))
    assert faults(found) == {
        "length": "epoch 1 has 5 steps, and their 80 rows are 0.83 times the 96 examples; "
        "expected 6 steps"
    }


def test_an_example_twice(sound):
    ids = sound[1].ids.copy()
    again, lost = ids[0, 1, 2], ids[3, 2, 1]
    ids[3, 2, 1] = again
    found = judged([sound[0], dataclasses.replace(sound[1], ids=ids)])
    assert faults(found) == {
        "coverage": f"epoch 1 leaves out 1 of 96 examples: {lost}",
        "duplicates": f"epoch 1 has 1 examples more than once: {again} ({again} in step 0 on "
        "replica 1 and step 3 on replica 2)",
    }


def test_padding_that_counts():
    epochs = epochs_of(90, 16, 4)
    epochs = changed(epochs, real=lambda each: np.ones_like(each.real))
    assert faults(judged(epochs, 90)).keys() == {"duplicates"}


def test_examples_that_do_not_exist(sound):
    epochs = changed(sound, ids=lambda each: each.ids + 1)
    assert faults(judged(epochs)) == {"coverage": "epoch 0 has 96, which do not exist"}


def test_a_partial_last_batch():
    steps = [
        [(ids[:rows], np.ones(rows, bool), None) for ids in replicas]
        for epoch in (0, 1)
        for replicas, rows in (
            (np.random.default_rng(epoch).permutation(20)[:12].reshape(2, 6), 6),
            (np.random.default_rng(epoch).permutation(20)[12:].reshape(2, 4), 4),
        )
    ]
    assert faults(judged(record(steps, 2), 20)) == {
        "shapes": "2 batches of epoch 0 do not have 6 rows: step 1 gives replica 0 4; XLA compiles "
        "each shape again"
    }


def test_two_faults_are_both_named(sound):
    epochs = changed(
        sound,
        ids=lambda each: of_first_replica(sound[0].ids),
        draws=lambda each: of_first_replica(each.draws),
    )
    assert faults(judged(epochs)).keys() == {"shards", "order", "draws"}


# What is said.


def test_the_page(sound):
    assert str(judged(sound)) == (
        "the loader is sound: 96 examples, 2 epochs of 6 steps, 4 rows on each of 4 replicas\n\n"
        "ok  shapes      every batch has 4 rows\n"
        "ok  shards      each of 4 replicas reads its own examples\n"
        "ok  length      every epoch has 6 steps\n"
        "ok  coverage    every epoch has every example\n"
        "ok  duplicates  no example occurs twice in an epoch\n"
        "ok  order       a new order in every epoch\n"
        "ok  draws       192 different draws in 192 rows"
    )
    page = str(judged(changed(sound, ids=lambda each: of_first_replica(each.ids))))
    assert page.startswith("the loader is at fault: ")
    assert "\nFAULT  shards      replicas 0 and 1 read" in page
    assert "\n-      coverage    not judged, because of shards" in page


def test_nothing_random_is_said():
    found = judged(epochs_of(96, 16, 4, augment=AugmentConfig()))
    assert found.findings[-1].text == "nothing is random"
    assert "except 4 that do not fill" in str(
        judged(epochs_of(36, 16, 4, last_batch="drop"), 36, last_batch="drop")
    )


def test_a_million_examples_are_quick():
    rng = np.random.default_rng(0)
    shape = (1250, 8, 128)
    epochs = [
        Epoch(
            rng.permutation(1_280_000).reshape(shape),
            np.ones(shape, bool),
            rng.integers(2**60, size=shape),
            np.full(shape[:2], 128),
        )
        for _ in range(2)
    ]
    assert judged(epochs, 1_280_000).ok


def test_fingerprints_stand_for_all_draws_of_a_row():
    rng = np.random.default_rng(0)
    draws = {"window": rng.random((4, 2)).astype(np.float32), "mirror": np.zeros((4, 2), np.int32)}
    first = fingerprints(draws)
    assert (first.shape, first.dtype, len(set(first))) == ((4,), np.int64, 4)
    draws["mirror"][2, 1] = 1
    assert (fingerprints(draws) != first).tolist() == [False, False, True, False]
    assert fingerprints({}) is None
