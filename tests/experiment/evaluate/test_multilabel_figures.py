"""The figures of several classes an image, against loops that count pairs and thresholds."""

import itertools
import math

import numpy as np
import pytest

from tfaccel.experiment.evaluate.multilabel import of_several

NUM, CLASSES = 60, 5


def answers(seed=0):
    """Labels and probabilities with many equal values; the last class has no image."""
    random = np.random.default_rng(seed)
    labels = random.random((NUM, CLASSES)) < (0.5, 0.2, 0.1, 0.9, 0.0)
    chances = np.clip(0.3 * labels + random.random((NUM, CLASSES)) * 0.8, 0, 1).round(1)
    return labels, chances.astype(np.float32)


def figures(labels, chances, known=None):
    known = np.ones(len(labels), bool) if known is None else known
    return of_several(labels, chances, known)


def slow_average_precision(labels, chances):
    """scikit-learn's sum of precision times the growth of recall, over all thresholds."""
    area, before = 0.0, 0.0
    for threshold in sorted(set(chances), reverse=True):
        said = chances >= threshold
        precision, recall = labels[said].mean(), labels[said].sum() / labels.sum()
        area, before = area + (recall - before) * precision, recall
    return area


def slow_auc(labels, chances):
    """The part of all pairs of an image with and one without the class that are in order."""
    pairs = list(itertools.product(chances[labels], chances[~labels]))
    return sum((own > other) + 0.5 * (own == other) for own, other in pairs) / len(pairs)


def slow_f1(labels, said):
    """F1 by counting; NaN if nothing is there and nothing is said."""
    hits, both = sum(labels & said), sum(labels) + sum(said)
    return 2 * hits / both if both else math.nan


def test_each_class_is_what_loops_count():
    labels, chances = answers()
    found = figures(labels, chances)
    for each in range(CLASSES - 1):
        own, said = labels[:, each], chances[:, each]
        exact = said.astype(float)
        assert found.average_precision[each] == pytest.approx(slow_average_precision(own, exact))
        assert found.auc[each] == pytest.approx(slow_auc(own, exact))
        assert found.table.support[each] == own.sum()
        assert found.table.f1[each] == pytest.approx(slow_f1(own, exact >= 0.5))
        hits = (own & (exact >= 0.5)).sum()
        assert found.table.precision[each] == pytest.approx(hits / (exact >= 0.5).sum())
        assert found.table.recall[each] == pytest.approx(hits / own.sum())
        best = max(slow_f1(own, said >= threshold) for threshold in set(said))
        assert found.best_f1[each] == pytest.approx(best)
        assert slow_f1(own, said >= found.best_threshold[each]) == pytest.approx(best)


def test_the_figures_over_all_are_those_of_loops():
    labels, chances = answers()
    found, said = figures(labels, chances), chances >= 0.5
    some = range(CLASSES - 1)
    wanted = [slow_average_precision(labels[:, each], chances[:, each]) for each in some]
    assert found.mean_average_precision == pytest.approx(np.mean(wanted))
    wanted = [slow_auc(labels[:, each], chances[:, each]) for each in some]
    assert found.mean_auc == pytest.approx(np.mean(wanted))
    wanted = [slow_f1(labels[:, each], said[:, each]) for each in range(CLASSES)]
    assert found.macro_f1 == pytest.approx(np.nanmean(wanted))
    assert found.micro_f1 == pytest.approx(slow_f1(labels.ravel(), said.ravel()))
    wanted = np.mean([(own == one).all() for own, one in zip(labels, said, strict=True)])
    assert found.subset_accuracy == pytest.approx(wanted)
    assert found.binary_accuracy == pytest.approx((labels == said).mean())


def test_an_example_by_hand():
    # scikit-learn's page on average_precision_score and roc_auc_score.
    labels = np.array([[0], [0], [1], [1]], bool)
    found = figures(labels, np.array([[0.1], [0.4], [0.35], [0.8]], np.float32))
    assert found.average_precision[0] == pytest.approx(0.8333333)
    assert found.auc[0] == pytest.approx(0.75)
    assert found.best_threshold[0] == pytest.approx(0.35)
    assert found.best_f1[0] == pytest.approx(0.8)


def test_a_class_without_an_image_or_with_all_images_lacks_figures_and_spoils_no_mean():
    labels = np.array([[0, 1, 1], [0, 1, 0]], bool)
    found = figures(labels, np.array([[0.9, 0.8, 0.7], [0.1, 0.6, 0.2]], np.float32))
    np.testing.assert_allclose(found.average_precision, [np.nan, 1, 1])
    np.testing.assert_allclose(found.auc, [np.nan, np.nan, 1])
    np.testing.assert_allclose(found.best_threshold, [np.nan, 0.6, 0.7], rtol=1e-6)
    np.testing.assert_allclose(found.table.recall, [np.nan, 1, 1])
    assert found.table.f1[0] == 0  # it is found where it is not
    assert found.mean_average_precision == 1
    assert found.mean_auc == 1


def test_outputs_that_are_nan_say_no_class_and_are_in_no_curve():
    labels, chances = answers()
    known = np.ones(NUM, bool)
    known[::7] = False
    chances[::7] = np.nan
    found = figures(labels, chances, known)
    clean = figures(labels[known], chances[known])
    np.testing.assert_array_equal(found.average_precision, clean.average_precision)
    np.testing.assert_array_equal(found.auc, clean.auc)
    np.testing.assert_array_equal(found.best_threshold, clean.best_threshold)
    np.testing.assert_array_equal(found.table.predicted, clean.table.predicted)
    np.testing.assert_array_equal(found.table.support, labels.sum(axis=0))
    assert found.subset_accuracy == pytest.approx(clean.subset_accuracy * known.mean())
    assert found.binary_accuracy == pytest.approx(clean.binary_accuracy * known.mean())
    nothing = figures(labels, chances, np.zeros(NUM, bool))
    assert math.isnan(nothing.mean_average_precision)
    assert nothing.subset_accuracy == nothing.micro_f1 == 0


def test_one_image_and_one_class():
    found = figures(np.ones((1, 1), bool), np.full((1, 1), 0.25, np.float32))
    assert (found.average_precision[0], found.best_threshold[0]) == (1, 0.25)
    assert (found.subset_accuracy, found.macro_f1, found.table.support[0]) == (0, 0, 1)
    assert math.isnan(found.auc[0])
    none = figures(np.zeros((1, 1), bool), np.full((1, 1), 0.25, np.float32))
    assert none.subset_accuracy == 1  # it has no class, and none is said
    assert math.isnan(none.micro_f1)
