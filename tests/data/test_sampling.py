"""Sampling by class against a slow reference, which walks through the passes image by image."""

import fractions
import itertools
import math

import numpy as np
import pytest

from tfaccel.data.sampling import ClassSampling
from tfaccel.data.shards import Plan, epoch_order

MASK = 2**64 - 1
STEP = 0x9E3779B97F4A7C15


def labels_of(counts, *, seed=0):
    """Labels of classes with these numbers of images, mixed."""
    return np.random.default_rng(seed).permutation(np.repeat(np.arange(len(counts)), counts))


def mixed(number):
    number = (number ^ (number >> 30)) * 0xBF58476D1CE4E5B9 & MASK
    number = (number ^ (number >> 27)) * 0x94D049BB133111EB & MASK
    return number ^ (number >> 31)


def passes(images, seed):
    """Yields a class's images: shuffled pass after shuffled pass, for ever."""
    start = int(np.random.SeedSequence([seed, 8]).generate_state(1, np.uint64)[0])
    for number in itertools.count():
        of_pass = mixed((start + number * STEP) & MASK)
        yield from sorted(images, key=lambda each: mixed((of_pass + each * STEP) & MASK))


def slow_epochs(labels, quotas, seed):
    """The epochs' images, in order, from the rows of each class in each epoch."""
    walks = {each: passes(np.flatnonzero(labels == each).tolist(), seed) for each in set(labels)}
    for epoch, rows in enumerate(quotas):
        of_classes = zip(sorted(walks), rows, strict=True)
        drawn = [next(walks[label]) for label, number in of_classes for _ in range(number)]
        order = epoch_order(len(labels), seed=seed, epoch=epoch, shuffle=True)
        yield [drawn[each] for each in order]


COUNTS = [(100, 10, 3), (5,), (1, 1, 1, 1), (40, 1), (7, 0, 9, 0, 30), (50, 49, 2, 2, 2, 2, 1)]


@pytest.mark.parametrize("how", ["balanced", "square_root"])
@pytest.mark.parametrize("counts", COUNTS)
def test_epochs_are_those_of_the_slow_walk(how, counts):
    labels, seed = labels_of(counts), 7
    sampling = ClassSampling(how, labels)
    quotas = [sampling.counts(epoch).tolist() for epoch in range(6)]
    for epoch, wanted in enumerate(slow_epochs(labels, quotas, seed)):
        assert ClassSampling(how, labels).order(seed=seed, epoch=epoch).tolist() == wanted
    # In another order of the calls, as a resumed run makes them.
    again = [sampling.order(seed=seed, epoch=epoch).tolist() for epoch in (5, 2, 3)]
    assert again == [
        ClassSampling(how, labels).order(seed=seed, epoch=epoch).tolist() for epoch in (5, 2, 3)
    ]


@pytest.mark.parametrize("counts", COUNTS)
def test_balanced_epochs_have_equal_counts_and_over_a_cycle_exactly_equal_ones(counts):
    labels = labels_of(counts)
    sampling, number = ClassSampling("balanced", labels), np.count_nonzero(counts)
    rows = np.array([sampling.counts(epoch) for epoch in range(2 * number + 1)])
    assert (rows.sum(axis=1) == len(labels)).all()
    assert rows.max() - rows.min() <= 1
    assert (rows[:number].sum(axis=0) == len(labels)).all()
    for epoch in range(3):
        drawn = labels[sampling.order(seed=0, epoch=epoch)]
        classes, found = np.unique(drawn, return_counts=True)
        assert classes.tolist() == sampling.classes.tolist() == np.flatnonzero(counts).tolist()
        assert found.tolist() == rows[epoch].tolist()


@pytest.mark.parametrize("counts", COUNTS)
def test_square_root_epochs_have_counts_near_the_exact_share(counts):
    labels = labels_of(counts)
    sampling = ClassSampling("square_root", labels)
    roots = [fractions.Fraction(math.isqrt(n << 32)) for n in counts if n]
    shares = np.array([len(labels) * each / sum(roots) for each in roots])
    rows = np.array([sampling.counts(epoch) for epoch in range(200)])
    assert (rows.sum(axis=1) == len(labels)).all()
    assert (np.abs(rows - shares) < 1).all()
    np.testing.assert_allclose(rows.mean(axis=0), shares.astype(float), atol=0.02)
    exact = len(labels) * np.sqrt([n for n in counts if n]) / np.sqrt(counts).sum()
    np.testing.assert_allclose(shares.astype(float), exact, rtol=1e-4)


@pytest.mark.parametrize("how", ["balanced", "square_root"])
def test_no_image_comes_again_before_all_others_of_its_class(how):
    labels = labels_of((60, 17, 4))
    sampling = ClassSampling(how, labels)
    times = np.zeros(len(labels), int)
    for epoch in range(12):
        times += np.bincount(sampling.order(seed=3, epoch=epoch), minlength=len(labels))
        for each in range(3):
            own = times[labels == each]
            assert own.max() - own.min() <= 1
    assert times.min() > 0  # the frequent class's images have all come, too


def test_passes_seeds_and_epochs_have_other_orders():
    labels = np.array([0] * 50 + [1] * 50)
    orders = {
        tuple(ClassSampling("balanced", labels).order(seed=seed, epoch=epoch).tolist())
        for seed in (0, 1)
        for epoch in (0, 1, 2)
    }
    assert len(orders) == 6
    # With equal classes an epoch is one pass of each: every image once.
    assert all(sorted(each) == list(range(100)) for each in orders)


def test_an_image_has_each_place_in_its_pass_equally_often():
    labels = np.zeros(4, int)
    sampling = ClassSampling("balanced", labels)
    walk = passes(range(4), 5)
    places = np.array([[next(walk) for _ in range(4)] for _ in range(4000)])
    for image in range(4):
        share = (places == image).mean(axis=0)
        assert (np.abs(share - 0.25) < 5 * math.sqrt(0.25 * 0.75 / 4000)).all()
    assert sorted(sampling.order(seed=5, epoch=17).tolist()) == [0, 1, 2, 3]


@pytest.mark.parametrize("last_batch", ["pad", "drop", "repeat"])
@pytest.mark.parametrize("num_replicas", [1, 2, 3, 4])
def test_any_number_of_replicas_has_the_same_steps(num_replicas, last_batch):
    sampling = ClassSampling("balanced", labels_of((60, 17, 4)))
    plans = [
        Plan(81, 12, number, 3, True, last_batch, sampling=sampling) for number in (1, num_replicas)
    ]
    assert plans[0].num_steps == Plan(81, 12, 1, last_batch=last_batch).num_steps
    for epoch, step in itertools.product(range(3), range(plans[0].num_steps)):
        one, several = (
            [
                each
                for index in range(plan.num_replicas)
                for batch in [plan.rows(epoch=epoch, step=step, replica_index=index)]
                for each in batch.ids[batch.real].tolist()
            ]
            for plan in plans
        )
        assert several == one
        if last_batch == "pad":
            order = sampling.order(seed=3, epoch=epoch)
            assert one == order[12 * step : 12 * step + 12].tolist()


def test_the_log_shows_the_most_frequent_and_the_rarest():
    sampling = ClassSampling("balanced", labels_of((30, 8, 4)))
    assert sampling.in_words(("dog", "cat", "e\x1bmu")) == (
        "dog: 30 -> 14, cat: 8 -> 14, e\\x1bmu: 4 -> 14; an image of the rarest class comes 3.5 "
        "times an epoch"
    )
    names = [f"c{each}" for each in range(40)]
    said = ClassSampling("balanced", labels_of(range(1, 41))).in_words(names)
    assert said.startswith(
        "c39: 40 -> 21, c38: 39 -> 20, c37: 38 -> 21, 34 classes between, c2: 3 -> "
    )
    assert said.count("->") == 6
