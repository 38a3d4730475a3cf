"""The figures of classes against loops that count, and against numbers worked out by hand."""

import math

import numpy as np
import pytest

from tfaccel.experiment.evaluate.calibration import calibrate
from tfaccel.experiment.evaluate.classes import (
    NO_CLASS,
    by_class,
    confusion,
    most_confused,
    overall,
)


def answers(num=300, num_classes=7, seed=0):
    """Labels, of which one class has none, probabilities and losses."""
    random = np.random.default_rng(seed)
    labels = random.integers(0, num_classes - 1, num)
    logits = random.normal(size=(num, num_classes)) + 2 * np.eye(num_classes)[labels]
    logits[:, 2] = -9  # never predicted
    chances = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
    return labels, chances


def counted(labels, predicted, each):
    """Precision, recall and F1 of a class by a loop; NaN where scikit-learn warns."""
    pairs = list(zip(labels.tolist(), predicted.tolist(), strict=True))
    hit = sum(true == said == each for true, said in pairs)
    support, said = sum(t == each for t, _ in pairs), sum(p == each for _, p in pairs)
    precision = hit / said if said else math.nan
    recall = hit / support if support else math.nan
    both = support + said
    return support, said, precision, recall, 2 * hit / both if both else math.nan


def test_each_class_is_what_a_loop_counts():
    labels, chances = answers()
    predicted = chances.argmax(axis=1)
    table = by_class(labels, predicted, num_classes=7)
    for each in range(7):
        wanted = counted(labels, predicted, each)
        found = table.support[each], table.predicted[each], table.precision[each]
        np.testing.assert_allclose((*found, table.recall[each], table.f1[each]), wanted)
    assert math.isnan(table.precision[2])
    assert math.isnan(table.recall[6])


def test_the_figures_over_all_are_those_of_loops():
    labels, chances = answers()
    order = np.argsort(-chances, axis=1, kind="stable")
    losses = np.array([-math.log(row[true]) for row, true in zip(chances, labels, strict=True)])
    every = np.ones(len(labels), bool)
    found = overall(labels, order[:, :5], losses.astype(np.float32), every, num_classes=7)
    assert found.images == 300
    assert found.accuracy == np.mean([row[0] == true for row, true in zip(order, labels)])  # noqa: B905
    top5 = [true in row[:5] for row, true in zip(order.tolist(), labels.tolist(), strict=True)]
    assert found.top5 == np.mean(top5)
    assert found.log_loss == pytest.approx(sum(losses) / 300, rel=1e-6)
    ratios = [counted(labels, order[:, 0], each) for each in range(7)]
    # As scikit-learn's macro average: over the classes that are in labels or predictions.
    assert found.macro_f1 == pytest.approx(np.mean([f1 for *_, f1 in ratios if f1 == f1]))
    recalls = [recall for *_, recall, _ in ratios if recall == recall]
    assert found.balanced_accuracy == pytest.approx(np.mean(recalls))
    assert found.not_finite == 0


def test_scikit_learns_example_by_hand():
    # From its page on precision_recall_fscore_support: cat, dog, pig.
    labels, predicted = np.array([0, 1, 2, 0, 1, 2]), np.array([0, 2, 1, 0, 0, 1])
    table = by_class(labels, predicted, num_classes=3)
    np.testing.assert_allclose(table.precision, [2 / 3, 0, 0])
    np.testing.assert_allclose(table.recall, [1, 0, 0])
    np.testing.assert_allclose(table.f1, [0.8, 0, 0])
    assert table.macro_f1 == pytest.approx(0.8 / 3)


def test_outputs_that_are_not_finite_are_wrong_and_in_no_mean():
    labels = np.array([0, 0, 1])
    named = np.array([[0, 1], [0, 1], [1, 0]])
    losses = np.array([0.5, np.nan, 0.25], np.float32)
    is_finite = np.array([True, False, True])
    found = overall(labels, named, losses, is_finite, num_classes=2)
    assert found.accuracy == pytest.approx(2 / 3)
    assert found.log_loss == 0.375
    assert found.not_finite == 1
    assert found.top5 is None
    none = overall(labels, named, losses, np.zeros(3, bool), num_classes=2)
    assert none.accuracy == 0
    assert math.isnan(none.log_loss)


def test_one_class_only():
    labels = np.zeros(4, int)
    found = overall(labels, labels[:, None], np.zeros(4), np.ones(4, bool), num_classes=1)
    assert (found.accuracy, found.macro_f1, found.log_loss) == (1, 1, 0)


def test_confusions_are_what_a_loop_counts():
    labels, chances = answers()
    predicted = chances.argmax(axis=1)
    predicted[::50] = NO_CLASS
    wanted = np.zeros((7, 7), int)
    for true, said in zip(labels, predicted, strict=True):
        if said != NO_CLASS:
            wanted[true, said] += 1
    np.testing.assert_array_equal(confusion(labels, predicted, num_classes=7), wanted)
    pairs = most_confused(labels, predicted, num_classes=7)
    assert {(true, said): number for true, said, number in pairs} == {
        (true, said): wanted[true, said]
        for true in range(7)
        for said in range(7)
        if true != said and wanted[true, said]
    }
    numbers = [number for *_, number in pairs]
    assert numbers == sorted(numbers, reverse=True)


@pytest.mark.parametrize("num_bins", [1, 10, 15])
def test_the_calibration_error_is_that_of_a_loop_over_bins(num_bins):
    random = np.random.default_rng(1)
    chances = np.concatenate([random.random(500), [0.0, 0.2, 1.0, 1 / 3]]).astype(np.float32)
    right = random.random(len(chances)) < chances
    exact, error = chances.astype(float), 0.0
    for each in range(num_bins):
        low, high = each / num_bins, (each + 1) / num_bins
        # Guo et al.: the bin is (low, high]; 0 itself is put into the first.
        inside = (exact > low) & (exact <= high) | (each == 0) & (exact == 0)
        if inside.any():
            error += inside.mean() * abs(right[inside].mean() - exact[inside].mean())
    found = calibrate(chances, right, num_bins=num_bins)
    assert found.ece == pytest.approx(error, abs=1e-12)
    assert found.counts.sum() == len(chances)


def test_calibration_at_the_ends():
    sure = calibrate(np.ones(4, np.float32), np.array([1, 1, 1, 0], bool))
    assert sure.ece == pytest.approx(0.25)
    assert sure.largest == pytest.approx(0.25)
    assert sure.counts[-1] == 4
    nothing = calibrate(np.zeros(0, np.float32), np.zeros(0, bool))
    assert math.isnan(nothing.ece)
    assert math.isnan(nothing.largest)
