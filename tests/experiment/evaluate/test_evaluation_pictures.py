"""What the pictures show: all classes, or those that are confused most."""

import io

import numpy as np
import PIL.Image
import pytest

from tfaccel.experiment.evaluate import pictures
from tfaccel.experiment.evaluate.calibration import calibrate
from tfaccel.experiment.evaluate.classes import NO_CLASS, confusion


def answers(num_classes, wrong):
    """Ten right answers for each class, and the wrong ones: (true, predicted, number)."""
    labels = np.repeat(np.arange(num_classes), 10)
    predicted = labels.copy()
    for true, other, number in wrong:
        labels = np.append(labels, np.full(number, true))
        predicted = np.append(predicted, np.full(number, other))
    return labels, predicted


def test_few_classes_are_all_shown():
    labels, predicted = answers(50, [(3, 7, 2)])
    shown = pictures.classes_shown(labels, predicted, num_classes=50)
    np.testing.assert_array_equal(shown, np.arange(50))


def test_of_many_classes_those_that_are_confused_most_are_shown():
    wrong = [(index, index + 1, 100 - index) for index in range(0, 60, 2)]
    labels, predicted = answers(200, wrong)
    shown = pictures.classes_shown(labels, predicted, num_classes=200)
    np.testing.assert_array_equal(shown, np.arange(24))  # a 13th pair would be one class too many
    labels = np.append(labels, [5, 199])
    predicted = np.append(predicted, [150, NO_CLASS])  # of classes that are not shown, or of none
    part, supports = pictures._part(labels, predicted, shown, num_classes=200)
    np.testing.assert_array_equal(part, confusion(labels, predicted, num_classes=200)[:24, :24])
    np.testing.assert_array_equal(supports, np.bincount(labels)[:24])
    assert supports[5] == part[5].sum() + 1


@pytest.mark.parametrize("num_classes", [1, 30, 120])
def test_a_matrix_of_any_size_can_be_read(num_classes):
    labels, predicted = answers(num_classes, [(0, num_classes - 1, 3)])
    names = ["$_\\odd^{", *(f"class {index} of a long name indeed" for index in range(1, 200))]
    figure = pictures.confusion_figure(labels, predicted, names[:num_classes])
    data = io.BytesIO()
    figure.savefig(data, format="png", dpi=50)
    with PIL.Image.open(data) as picture:
        assert 200 < picture.width < 900
    (chart,) = figure.axes
    written = [each.get_text() for each in chart.get_yticklabels()]
    assert max(map(len, written)) <= pictures.LONGEST
    title = chart.get_title("left")
    assert ("confused most, of 120" in title) == (num_classes == 120)


def test_a_reliability_diagram_has_the_bins():
    chances = np.array([0.95, 0.99, 0.55], np.float32)
    figure = pictures.reliability_figure(calibrate(chances, np.array([True, False, True])))
    above, below = figure.axes
    heights = [each.get_height() for each in above.patches]
    assert heights[:2] == [1.0, 0.5]
    assert [each.get_height() for each in below.patches if each.get_height()] == [1, 2]
    empty = calibrate(np.zeros(0, np.float32), np.zeros(0, bool))
    pictures.reliability_figure(empty).savefig(io.BytesIO(), format="png", dpi=50)


def test_numbers_are_drawn_against_true_ones():
    random = np.random.default_rng(0)
    true = random.normal(size=(40, 2))
    figure = pictures.scatter_figure(true, true + 1, ["$_\\odd^{", "b"], np.array([0.5, np.nan]))
    figure.savefig(io.BytesIO(), format="png", dpi=50)
    charts = [each for each in figure.axes if each.get_visible()]
    assert len(charts) == 2
    drawn = charts[1].collections[0].get_offsets()
    np.testing.assert_allclose(drawn, np.stack([true[:, 1], true[:, 1] + 1], axis=1))
    assert charts[0].get_title("left") == "$_\\odd^{, R squared 0.500"
    assert charts[1].get_title("left") == "b, R squared undefined"


def test_of_many_numbers_those_of_the_lowest_ratio_are_shown(monkeypatch):
    monkeypatch.setattr(pictures, "MOST_POINTS", 10)
    true = np.zeros((30, 20))
    ratios = np.where(np.arange(20) < 5, np.nan, 1 - np.arange(20) / 20)
    names = [str(each) for each in range(20)]
    figure = pictures.scatter_figure(true, true, names, ratios)
    charts = [each for each in figure.axes if each.get_visible()]
    assert [each.get_title("left").split(",")[0] for each in charts] == names[8:]
    assert "the 12 targets of the lowest R squared, of 20; 10 of 30 images" in figure.get_suptitle()
    nothing = pictures.scatter_figure(true[:0], true[:0], names[:1], ratios[:1])
    nothing.savefig(io.BytesIO(), format="png", dpi=50)
