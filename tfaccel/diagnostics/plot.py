"""Draws the curves of one or more runs in one picture.

Takes workdirs; writes a PNG, or an HTML page that needs no other file. The
heading and the legend name the settings that differ. tfaccel/training/page/ draws the curves.

    plot([pathlib.Path("runs/a"), pathlib.Path("runs/b")], pathlib.Path("curves.png"))
"""

import io
import pathlib

from tfaccel.common.disk_errors import not_written
from tfaccel.common.errors import UserError
from tfaccel.common.html_page import html_page, svg_of
from tfaccel.common.redact import shown
from tfaccel.common.report import Grid, html_of
from tfaccel.common.tables import as_html, in_figures
from tfaccel.training.logs import metric_names
from tfaccel.training.page.curves import Runs, draw, read
from tfaccel.training.page.words import Words, column_head, run_words

SUFFIXES = (".png", ".html")


def plot(workdirs: list[pathlib.Path], output: pathlib.Path) -> None:
    """Draws the curves of the runs.

    Args:
      workdirs: the workdirs of the runs, finished or not, in any order.
      output: a new file, .png or .html.

    Raises:
      UserError: a workdir or its metrics do not exist, or the output cannot be written.
    """
    _check_output(output)
    runs = {shown(str(each)): read(each) for each in workdirs}
    words = run_words({shown(str(each)): each for each in workdirs})
    figure = draw(runs, words)
    data = io.BytesIO()
    if output.suffix == ".png":
        figure.savefig(data, format="png", dpi=120)
    else:
        data.write(_page(figure, runs, words).encode())
    try:
        with open(output, "xb") as file:
            file.write(data.getvalue())
    except OSError as error:
        raise UserError(
            f"output {output} {not_written(error, output.parent)}, or choose another --output"
        ) from error


def _check_output(output: pathlib.Path) -> None:
    """Raises UserError if the output exists or is neither PNG nor HTML."""
    if output.suffix not in SUFFIXES:
        raise UserError(f"output {output} ends in '{output.suffix}'; expected .png or .html")
    if output.exists():
        raise UserError(f"output {output} exists; give a new file")


def _page(figure, runs: Runs, words: Words) -> str:
    names = list(dict.fromkeys(name for epochs in runs.values() for name in epochs[-1]))
    names = ["epoch", *metric_names(dict.fromkeys(names)), "images_per_second"]
    heads = ["run", *words.differing, *map(column_head, names)]
    rows = []
    for (run, epochs), settings in zip(runs.items(), words.settings, strict=True):
        values = [epochs[-1].get(name) for name in names]
        numbers = ("" if each is None else in_figures(each, 5) for each in values)
        rows.append([run, *settings, *numbers])
    table = html_of(Grid(heads, rows, right=range(1, len(heads))))
    body = (
        f"<p>{as_html(words.alike)}</p>\n{svg_of(figure)}\n<h2>After the last epoch</h2>\n{table}"
    )
    return html_page(words.heading, body, width=f"{round(figure.get_figwidth() * 96)}px")
