"""Draws a confusion matrix, a reliability diagram, and predicted numbers against true ones.

Each function returns a Matplotlib figure. Matplotlib is imported when the first one is drawn,
because that takes half a second. pyplot is not used: it keeps figures and needs a screen.

    confusion_figure(labels, predicted, names).savefig("confusion.png", dpi=DPI)
    reliability_figure(calibration).savefig("reliability.png", dpi=DPI)
    scatter_figure(true, predicted, names, r2).savefig("predicted.png", dpi=DPI)
"""

from collections.abc import Sequence

import numpy as np

from tfaccel.common.redact import shown
from tfaccel.data.source import spread
from tfaccel.experiment.evaluate.calibration import Calibration
from tfaccel.experiment.evaluate.classes import NO_CLASS, confusion, most_confused

DPI = 120
MOST_WHOLE = 50  # classes of a whole matrix; with more, only those that are confused most
MOST_CONFUSED = 25  # classes of a part of a matrix
MOST_WITH_NUMBERS = 25  # classes up to which the numbers are written into the cells
MOST_TARGETS = 12  # of a picture of numbers; with more, only those of the lowest R squared
MOST_POINTS = 20_000  # images of a target; more points would cover each other
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


def reliability_figure(
    calibration: Calibration,
    *,
    of: str = "the predicted class",
    height: str = "part of the images that is right",
    bar: str = "right",
    counts: str = "images",
):
    """Returns a reliability diagram, with the number of images in each bin below it.

    A bar's height is the part of its images that is right. On the diagonal, probabilities are as
    often right as they say.

    Args:
      calibration: the bins.
      of: whose probabilities they are.
      height: what the height of a bar is.
      bar: the same, for the legend.
      counts: what a bin has.
    """
    from matplotlib.figure import Figure

    figure = Figure((5.0, 5.6), layout="constrained")
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=(3, 1))
    edges, there = calibration.edges, calibration.counts > 0
    middles, width = (edges[:-1] + edges[1:]) / 2, edges[1] - edges[0]
    bars = {"width": 0.94 * width, "align": "center"}
    above.bar(middles[there], calibration.accuracy[there], color=BLUE, label=bar, **bars)
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
    above.set_ylabel(height)
    above.set_title(
        f"expected calibration error {calibration.ece:.2%}, {len(middles)} bins",
        loc="left",
        fontsize=11,
    )
    above.legend(frameon=False, fontsize=8, loc="upper left")
    below.bar(middles, calibration.counts, color=GREY, **bars)
    below.set_xlabel(f"probability of {of}")
    below.set_ylabel(counts)
    for chart in (above, below):
        chart.grid(axis="y", alpha=0.25)
        chart.set_axisbelow(True)
        chart.spines[["top", "right"]].set_visible(False)
    return figure


def scatter_figure(true: np.ndarray, predicted: np.ndarray, names: Sequence[str], r2: np.ndarray):
    """Returns a figure of predicted numbers against true ones, a chart for each target.

    Right answers lie on the diagonal. With more than `MOST_TARGETS`, the figure has those of the
    lowest R squared, and with more than `MOST_POINTS` images an even choice of them; its title
    says so.

    Args:
      true: [n, targets] floats.
      predicted: [n, targets] floats, without NaN.
      names: of the targets, in order.
      r2: [targets] floats, the R squared of each; NaN if it has none.
    """
    from matplotlib.figure import Figure

    some = targets_shown(r2)
    points = spread(len(true), MOST_POINTS) if len(true) else np.zeros(0, int)
    columns = min(len(some), 3)
    rows = -(-len(some) // columns)
    figure = Figure((0.4 + 3.4 * max(columns, 1.3), 0.5 + 3.3 * rows), layout="constrained")
    charts = figure.subplots(rows, columns, squeeze=False).ravel()
    for chart in charts[len(some) :]:
        chart.set_visible(False)
    for chart, each in zip(charts, some.tolist(), strict=False):
        _scatter(chart, true[points, each], predicted[points, each])
        ratio = "undefined" if np.isnan(r2[each]) else f"{r2[each]:.3f}"
        title = f"{_short(names[each])}, R squared {ratio}"
        chart.set_title(title, loc="left", fontsize=10, parse_math=False)
    title = "predicted number against true number"
    if len(some) < len(names):
        title += f": the {len(some)} targets of the lowest R squared, of {len(names):,}"
    if len(points) < len(true):
        title += f"; {len(points):,} of {len(true):,} images"
    figure.suptitle(title, fontsize=11, x=0.01, ha="left")
    return figure


def targets_shown(r2: np.ndarray) -> np.ndarray:
    """Returns the numbers of the targets that the picture has, in order."""
    if len(r2) <= MOST_TARGETS:
        return np.arange(len(r2))
    return np.sort(np.argsort(r2, kind="stable")[:MOST_TARGETS])  # NaN comes last


def _scatter(chart, true: np.ndarray, predicted: np.ndarray) -> None:
    size = 14 if len(true) < 500 else 5
    chart.scatter(true, predicted, s=size, color=BLUE, alpha=0.5, linewidths=0)
    if len(true):
        ends = min(true.min(), predicted.min()), max(true.max(), predicted.max())
        chart.plot(ends, ends, "--", color=GREY, linewidth=1)
    chart.set_xlabel("true", fontsize=9)
    chart.set_ylabel("predicted", fontsize=9)
    chart.tick_params(labelsize=8)
    chart.grid(alpha=0.25)
    chart.set_axisbelow(True)
    chart.spines[["top", "right"]].set_visible(False)
