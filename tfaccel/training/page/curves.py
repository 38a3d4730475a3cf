"""Draws the curves of one or more runs: loss, metrics, images per second and GPU memory.

Takes the records of the runs' epochs; returns a Matplotlib figure. Each run has one colour. A full
line shows test images, a dashed line shows training.

    runs = {"runs/a": read(pathlib.Path("runs/a"))}
    draw(runs, run_words({"runs/a": pathlib.Path("runs/a")})).savefig("curves.png")
"""

import math
import os
import pathlib
import re
import textwrap

from tfaccel.common.errors import UserError
from tfaccel.training.logs import Record, csv, json_lines, metric_names
from tfaccel.training.page import words as words_lib

Runs = dict[str, list[Record]]  # the epochs of each run, by its name

# From Okabe and Ito (Color Universal Design, 2008): people with any kind of colour vision can
# distinguish these colours. Their yellow is missing, because it is faint on white.
COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
MARKERS = ("", "o", "s", "^", "D", "v", "P", "X")  # the next one after every seven runs
NUM_MARKS = 8  # on each line
LETTERS_PER_INCH = 13.0  # in a legend, at most; for wide letters it is 11
_GPU_MEMORY = re.compile(r"gpu\d+_memory_mib")
WIDTH, HEIGHT = 5.2, 3.4  # inches, of a chart
# Charts of what is no metric. Their axes start at 0: a change of a percent would fill the chart.
FROM_ZERO = ("images_per_second", "gpu_memory_mib")


def read(workdir: pathlib.Path) -> list[Record]:
    """Returns the records of a run's epochs from metrics.jsonl, or from metrics.csv without it.

    A record with the memory of GPUs also has `gpu_memory_mib`, that of the fullest of them.

    Raises:
      UserError: the workdir has no metrics.
    """
    if not os.path.isdir(workdir):  # pathlib raises in a folder that this user may not enter
        raise UserError(f"there is no workdir {workdir}; pass folders that `tfaccel train` created")
    lines, table = workdir / "metrics.jsonl", workdir / "metrics.csv"
    try:
        if lines.exists():
            epochs = [each for each in json_lines.read(lines) if each["record"] == "epoch"]
        else:
            epochs = csv.read(table) if table.exists() else []
    except OSError as error:
        raise UserError(f"the metrics in {workdir} cannot be read ({error})") from error
    if not epochs:
        raise UserError(f"workdir {workdir} has no metrics; the first epoch of a run writes them")
    return [_with_memory(epoch) for epoch in epochs]


def _with_memory(epoch: dict) -> Record:
    """Returns an epoch's record, with the memory of the fullest GPU if it has any GPU."""
    record = {name: each for name, each in epoch.items() if name != "record"}
    used = [each for name, each in record.items() if _GPU_MEMORY.fullmatch(name)]
    return record | ({"gpu_memory_mib": max(used)} if used else {})


def draw(runs: Runs, words: words_lib.Words):
    """Returns a figure with a chart for each name of `charts_of`, and `words` above them."""
    # Not pyplot, which keeps figures and needs a screen. Imported here, as it takes half a second.
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    names, records = charts_of(runs), [epoch for epochs in runs.values() for epoch in epochs]
    tested = any(name.startswith("val_") for each in records for name in each)
    columns = 2 if len(names) == 4 else min(len(names), 3)
    rows = math.ceil(len(names) / columns)
    width = WIDTH * max(columns, 2)  # also for one chart: headings and legend need the space
    labels = [_in_width(each, width - 3.5) for each in words.labels]  # the styles are beside them
    heading = _in_width(words.heading, 0.75 * width)  # its letters are larger
    alike = _in_width(words.alike, width)
    lines = sum(each.count("\n") + 1 for each in (heading, alike, *labels))
    figure = Figure((width, HEIGHT * rows + 0.2 * lines + 0.5), layout="constrained")
    top, charts_below = figure.subfigures(
        2, 1, height_ratios=(0.2 * lines + 0.5, HEIGHT * rows), hspace=0
    )
    charts = iter(charts_below.subplots(rows, columns, squeeze=False).flat)
    for name, chart in zip(names, charts, strict=False):
        for index, epochs in enumerate(runs.values()):
            _lines(chart, name, epochs, index, tested=tested)
        metric = words_lib.metric_words(name)
        # Not parsed as TeX, which starts with $.
        chart.set_title(metric.title, loc="left", parse_math=False)
        chart.set_xlabel("epoch")
        chart.set_ylabel(metric.unit, parse_math=False)
        chart.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
        if name in FROM_ZERO:
            chart.set_ylim(0, 1.1 * max(chart.get_ylim()[1], 1e-6))
        chart.grid(alpha=0.25)
        chart.spines[["top", "right"]].set_visible(False)
    for chart in charts:  # the unused ones
        chart.set_axis_off()
    _head(top, heading, alike, labels, tested=tested)
    return figure


def charts_of(runs: Runs) -> list[str]:
    """Returns the names of the charts: the loss, the metrics, and the figures of `FROM_ZERO`."""
    records = [epoch for epochs in runs.values() for epoch in epochs]
    seen = dict.fromkeys(name for each in records for name in metric_names(each))
    names = list(dict.fromkeys(name.removeprefix("val_") for name in metric_names(seen)))
    return names + [name for name in FROM_ZERO if any(name in each for each in records)]


def _look(index: int) -> dict[str, object]:
    """Returns the colour of a run's lines, and a marker if the colour is used again."""
    marker = MARKERS[index // len(COLORS) % len(MARKERS)]
    return {"color": COLORS[index % len(COLORS)], "marker": marker or None}


def _lines(chart, name: str, epochs: list[Record], index: int, *, tested: bool) -> None:
    """Draws a run's line of training, dashed if any run was tested, and its line of test images."""
    styles = {name: "--" if tested and name not in FROM_ZERO else "-", f"val_{name}": "-"}
    for each, style in styles.items():
        points = [(epoch["epoch"], epoch[each]) for epoch in epochs if each in epoch]
        look = _look(index)
        if len(points) == 1:  # a line needs two points, so one point gets a marker
            look["marker"] = look["marker"] or "o"
        x, y = zip(*points, strict=True) if points else ((), ())
        every = max(1, len(points) // NUM_MARKS)
        if style == "--":
            look |= {"linewidth": 1.1, "markerfacecolor": "white"}  # a hollow marker
        chart.plot(x, y, style, markersize=4, markevery=every, **{"linewidth": 1.7, **look})


def _head(top, heading: str, alike: str, labels: list[str], *, tested: bool) -> None:
    """Writes the heading, the settings that all runs share, and the legend."""
    from matplotlib.lines import Line2D

    text = {"x": 0.01, "ha": "left", "va": "top", "parse_math": False}
    inches = top.bbox.height / top.figure.dpi
    top.text(y=1 - 0.08 / inches, s=heading, fontsize=13, fontweight="bold", **text)
    below = 0.08 + 0.24 * (heading.count("\n") + 1)
    top.text(y=1 - below / inches, s=alike, fontsize=9.5, color="0.35", **text)
    below += 0.2 * (alike.count("\n") + 1) * bool(alike)
    handles = [
        Line2D([], [], linewidth=3, label="run", **_look(index)) for index in range(len(labels))
    ]
    place = {"frameon": False, "borderaxespad": 0, "borderpad": 0.3}
    legend = top.legend(
        handles=handles, loc="upper left", bbox_to_anchor=(0.005, 1 - below / inches), **place
    )
    for text_of_label, label in zip(legend.get_texts(), labels, strict=True):
        # Matplotlib would hide labels that start with _ and parse those with $ as TeX.
        text_of_label.set(text=label, parse_math=False)
    if tested:
        styles = [
            Line2D([], [], color="0.3", linestyle=style, label=label)
            for style, label in (("-", "test images"), ("--", "in training"))
        ]
        right = {"loc": "upper right", "bbox_to_anchor": (0.995, 1 - below / inches)}
        top.add_artist(legend)
        top.legend(handles=styles, ncols=2, **right, **place)


def _in_width(text: str, inches: float) -> str:
    """Breaks text into lines that fit."""
    return "\n".join(textwrap.wrap(text, max(20, int(inches * LETTERS_PER_INCH))))
