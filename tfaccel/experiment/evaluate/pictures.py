"""Draws a confusion matrix and a reliability diagram.

Each function returns a Matplotlib figure. Matplotlib is imported when the first one is drawn,
because that takes half a second. pyplot is not used: it keeps figures and needs a screen.

    confusion_figure(labels, predicted, names).savefig("confusion.png", dpi=DPI)
    reliability_figure(calibration).savefig("reliability.png", dpi=DPI)
"""

from collections.abc import Sequence

import numpy as np

from tfaccel.common.redact import shown
from tfaccel.experiment.evaluate.calibration import Calibration
from tfaccel.experiment.evaluate.classes import NO_CLASS, confusion, most_confused

DPI = 120
MOST_WHOLE = 50  # classes of a whole matrix; with more, only those that are confused most
MOST_CONFUSED = 25  # classes of a part of a matrix
MOST_WITH_NUMBERS = 25  # classes up to which the numbers are written into the cells
LONGEST = 24  # letters of a class's name
DARK = 0.55  # cells above this share have white numbers
INK, GREY, BLUE, RED = "#282828", "#5f6b76", "#0072B2", "#D55E00"  # the last two: Okabe and Ito


def confusion_figure(labels: np.ndarray, predicted: np.ndarray, names: Sequence[str]):
    """Returns a figure of the confusion matrix: a row for each true class.

    A cell's colour is its share of the row. With more than `MOST_WHOLE` classes, the figure has
    the classes of the most frequent confusions, and its title says so.

    Args:
      labels: [n] integers, the true classes.
      predicted: [n] integers, the likeliest classes, or NO_CLASS.
      names: of all classes, in order.
    """
    from matplotlib.figure import Figure

    some = classes_shown(labels, predicted, num_classes=len(names))
    matrix, supports = _part(labels, predicted, some, num_classes=len(names))
    shares = matrix / np.maximum(supports, 1)[:, None]
    side = 2.2 + (0.34 if len(some) <= MOST_WITH_NUMBERS else 0.2) * len(some)
    figure = Figure((max(side, 4.5), max(side, 4.0)), layout="constrained")
    chart = figure.subplots()
    chart.imshow(shares, cmap="Blues", vmin=0, vmax=1)
    size = 9 if len(some) <= MOST_WITH_NUMBERS else 6.5
    written = [_short(names[each]) for each in some]
    chart.set_xticks(range(len(some)), written, rotation=90, fontsize=size, parse_math=False)
    chart.set_yticks(range(len(some)), written, fontsize=size, parse_math=False)
    chart.set_xlabel("predicted class")
    chart.set_ylabel("true class")
    title = "images by true and predicted class"
    if len(some) < len(names):
        title = f"the {len(some)} classes that are confused most, of {len(names):,}"
    chart.set_title(title, loc="left", fontsize=11)
    if len(some) <= MOST_WITH_NUMBERS:
        _write_numbers(chart, matrix, shares)
    chart.tick_params(length=0)
    chart.spines[:].set_visible(False)
    return figure


def classes_shown(labels: np.ndarray, predicted: np.ndarray, *, num_classes: int) -> np.ndarray:
    """Returns the numbers of the classes that the picture has, in order."""
    if num_classes <= MOST_WHOLE:
        return np.arange(num_classes)
    some = []
    for true, other, _ in most_confused(labels, predicted, num_classes=num_classes):
        new = [each for each in (true, other) if each not in some]
        if len(some) + len(new) > MOST_CONFUSED:
            break
        some += new
    # Without a mistake the first classes are as good as any.
    return np.array(sorted(some)) if some else np.arange(MOST_CONFUSED)


def _part(labels, predicted, some: np.ndarray, *, num_classes: int) -> tuple:
    """Returns the matrix of some classes, [some, some], and the images of each, [some]."""
    place = np.full(num_classes + 1, NO_CLASS)  # the last is for NO_CLASS, which is -1
    place[some] = np.arange(len(some))
    rows, columns = place[labels], place[predicted]
    inside = rows != NO_CLASS
    supports = np.bincount(rows[inside], minlength=len(some))
    return confusion(rows[inside], columns[inside], num_classes=len(some)), supports


def _write_numbers(chart, matrix: np.ndarray, shares: np.ndarray) -> None:
    size = 8 if matrix.max(initial=0) < 1000 else 6
    for row, column in np.argwhere(matrix):
        color = "white" if shares[row, column] > DARK else INK
        text = f"{matrix[row, column]:,}"
        chart.text(column, row, text, ha="center", va="center", fontsize=size, color=color)


def _short(name: str) -> str:
    name = shown(name, keep="")
    return name if len(name) <= LONGEST else f"{name[: LONGEST - 3]}..."


def reliability_figure(calibration: Calibration):
    """Returns a reliability diagram, with the number of images in each bin below it.

    A bar's height is the part of its images that is right. On the diagonal, probabilities are as
    often right as they say.
    """
    from matplotlib.figure import Figure

    figure = Figure((5.0, 5.6), layout="constrained")
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=(3, 1))
    edges, there = calibration.edges, calibration.counts > 0
    middles, width = (edges[:-1] + edges[1:]) / 2, edges[1] - edges[0]
    bars = {"width": 0.94 * width, "align": "center"}
    above.bar(middles[there], calibration.accuracy[there], color=BLUE, label="right", **bars)
    apart = calibration.confidence[there] - calibration.accuracy[there]
    above.bar(
        middles[there],
        apart,
        bottom=calibration.accuracy[there],
        facecolor="none",
        edgecolor=RED,
        hatch="///",
        linewidth=0.8,
        label="distance to the mean probability",
        **bars,
    )
    above.plot((0, 1), (0, 1), "--", color=GREY, linewidth=1)
    above.set_xlim(0, 1)
    above.set_ylim(0, 1)
    above.set_ylabel("part of the images that is right")
    above.set_title(
        f"expected calibration error {calibration.ece:.2%}, {len(middles)} bins",
        loc="left",
        fontsize=11,
    )
    above.legend(frameon=False, fontsize=8, loc="upper left")
    below.bar(middles, calibration.counts, color=GREY, **bars)
    below.set_xlabel("probability of the predicted class")
    below.set_ylabel("images")
    for chart in (above, below):
        chart.grid(axis="y", alpha=0.25)
        chart.set_axisbelow(True)
        chart.spines[["top", "right"]].set_visible(False)
    return figure
