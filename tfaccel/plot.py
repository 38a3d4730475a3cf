"""Curves of one or more runs, side by side in one picture.

Takes workdirs; gives a PNG, or an HTML page that needs no other file: loss, each metric and images
per second after each epoch. A run has one colour; what was measured on test images is the full
line, what in training the dashed one.

    plot([pathlib.Path("runs/a"), pathlib.Path("runs/b")], pathlib.Path("curves.png"))
"""

import io
import logging
import math
import os
import pathlib

from tfaccel.disk_errors import not_written
from tfaccel.errors import UserError
from tfaccel.logs import Record, csv, json_lines, metric_names
from tfaccel.redact import shown
from tfaccel.table_text import as_html, in_figures

log = logging.getLogger("tfaccel")

Runs = dict[str, list[Record]]  # each run's name, and its epochs

LONGEST_NAME = 48  # of a run, in a legend
SUFFIXES = (".png", ".html")
WIDTH, HEIGHT = 5.2, 3.4  # inches of a chart
PAGE = """<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"><title>tfaccel plot</title><style>
body {{ font-family: sans-serif; margin: 2em auto; max-width: {width}px; color: #282828 }}
svg {{ width: 100%; height: auto }}
table {{ border-collapse: collapse; font-variant-numeric: tabular-nums }}
th, td {{ padding: 0.3em 0.9em; text-align: right; border-bottom: 1px solid #ddd }}
th:first-child, td:first-child {{ text-align: left }}
</style></head><body>
{picture}
<table><caption>After the last epoch</caption>
{rows}
</table></body></html>
"""


def plot(workdirs: list[pathlib.Path], output: pathlib.Path) -> None:
    """Draws the runs.

    Args:
      workdirs: of the runs, finished or not, in any order.
      output: a new file, .png or .html.

    Raises:
      UserError: a workdir or its metrics are not there, or the output cannot be written.
    """
    _check_output(output)
    runs = {shown(str(each)): read(each) for each in workdirs}
    figure = _draw(runs)
    data = io.BytesIO()
    if output.suffix == ".png":
        figure.savefig(data, format="png", dpi=120)
    else:
        data.write(_page(figure, runs).encode())
    try:
        with open(output, "xb") as file:
            file.write(data.getvalue())
    except OSError as error:
        raise UserError(
            f"output {output} {not_written(error, output.parent)}, or give another --output"
        ) from error


def _check_output(output: pathlib.Path) -> None:
    """Raises UserError where the output exists or is neither PNG nor HTML."""
    if output.suffix not in SUFFIXES:
        raise UserError(f"output {output} ends in '{output.suffix}'; expected .png or .html")
    if output.exists():
        raise UserError(f"output {output} exists; give a new file")


def read(workdir: pathlib.Path) -> list[Record]:
    """Returns the records of a run's epochs: of metrics.jsonl, or else of metrics.csv.

    Raises:
      UserError: the workdir has none.
    """
    if not os.path.isdir(workdir):  # pathlib's raises below a folder that may not be searched
        raise UserError(f"there is no workdir {workdir}; give folders that `tfaccel train` made")
    lines, table = workdir / "metrics.jsonl", workdir / "metrics.csv"
    try:
        if lines.exists():
            epochs = [each for each in json_lines.read(lines) if each["record"] == "epoch"]
        else:
            epochs = csv.read(table) if table.exists() else []
    except OSError as error:
        raise UserError(f"the metrics in {workdir} cannot be read ({error})") from error
    if not epochs:
        raise UserError(f"workdir {workdir} has no metrics; has the run done an epoch?")
    return [{name: each for name, each in epoch.items() if name != "record"} for epoch in epochs]


def _draw(runs: Runs):
    """Returns a figure with a chart for the loss, for each metric, and for images per second."""
    # Not pyplot, which keeps figures and looks for a screen. Not above: it takes half a second.
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    names = _charts(runs)
    columns = 2 if len(names) == 4 else min(len(names), 3)
    rows = math.ceil(len(names) / columns)
    legend = 0.25 * len(runs) + 0.2
    figure = Figure((WIDTH * columns, HEIGHT * rows + legend), layout="constrained")
    charts = iter(figure.subplots(rows, columns, squeeze=False).flat)
    for name, chart in zip(names, charts, strict=False):
        for index, epochs in enumerate(runs.values()):
            _lines(chart, name, epochs, color=f"C{index % 10}")
        # Not as TeX, which begins with $.
        chart.set_title(shown(name.replace("_", " ")), loc="left", parse_math=False)
        chart.set_xlabel("epoch")
        chart.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
        if name == "images_per_second":
            chart.set_ylim(bottom=0)  # or a change of a percent fills the chart
        chart.grid(alpha=0.25)
        chart.spines[["top", "right"]].set_visible(False)
    for chart in charts:  # those that are left over
        chart.set_axis_off()
    _legend(figure, runs)
    return figure


def _charts(runs: Runs) -> list[str]:
    records = [epoch for epochs in runs.values() for epoch in epochs]
    seen = dict.fromkeys(name for each in records for name in metric_names(each))
    names = list(dict.fromkeys(name.removeprefix("val_") for name in metric_names(seen)))
    return names + ["images_per_second"] * any("images_per_second" in each for each in records)


def _lines(chart, name: str, epochs: list[Record], *, color: str) -> None:
    tested = any(f"val_{name}" in each for each in epochs)
    styles = {name: "--" if tested else "-"} | ({f"val_{name}": "-"} if tested else {})
    for each, style in styles.items():
        points = [(epoch["epoch"], epoch[each]) for epoch in epochs if each in epoch]
        # A line needs two points; of a run of one epoch the point is seen.
        marker = "o" if len(points) == 1 else None
        x, y = zip(*points, strict=True) if points else ((), ())
        chart.plot(x, y, style, color=color, marker=marker, markersize=4, linewidth=1.4)


def _legend(figure, runs: Runs) -> None:
    from matplotlib.lines import Line2D

    handles = [
        Line2D([], [], color=f"C{index % 10}", linewidth=3, label="run")
        for index in range(len(runs))
    ]
    legend = figure.legend(handles=handles, loc="outside upper left", frameon=False)
    for text, name in zip(legend.get_texts(), runs, strict=True):
        # Not as labels, of which those that begin with _ are left out, and those with $ are TeX.
        text.set(text=_shortened(name), parse_math=False)
    if any(name.startswith("val_") for epochs in runs.values() for each in epochs for name in each):
        styles = [
            Line2D([], [], color="0.3", linestyle=style, label=label)
            for style, label in (("-", "test"), ("--", "training"))
        ]
        figure.legend(handles=styles, loc="outside upper right", frameon=False, ncols=2)


def _shortened(name: str) -> str:
    return name if len(name) <= LONGEST_NAME else f"...{name[3 - LONGEST_NAME :]}"


def _page(figure, runs: Runs) -> str:
    svg = io.StringIO()
    figure.savefig(svg, format="svg", metadata={"Date": None})
    picture = svg.getvalue()
    picture = picture[picture.index("<svg") :]  # what comes before is for a file of its own
    names = list(dict.fromkeys(name for epochs in runs.values() for name in epochs[-1]))
    names = ["epoch", *metric_names(dict.fromkeys(names)), "images_per_second"]
    rows = [_row("th", ["run", *names])]
    for run, epochs in runs.items():
        values = [epochs[-1].get(name) for name in names]
        rows.append(
            _row("td", [run, *("" if each is None else in_figures(each, 5) for each in values)])
        )
    width = round(figure.get_figwidth() * 96)
    return PAGE.format(width=width, picture=picture, rows="\n".join(rows))


def _row(cell: str, texts: list[str]) -> str:
    cells = "".join(f"<{cell}>{as_html(each)}</{cell}>" for each in texts)
    return f"<tr>{cells}</tr>"
