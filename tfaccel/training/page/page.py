"""report.html: the page of a run, which needs no other file and no network.

Takes a run's folder, after its last epoch; gives the page. All parts that the folder has are on it:
the curves of the whole history, also of a resumed run; the first images; the figures of all epochs;
the settings; the hardware.

    write(workdir, make_confusion=lambda: svg_of(confusion_figure(...)))

A run must not fail at its end for the sake of a page, so `try_to_write` logs a failure instead.
Matplotlib is imported when the curves are drawn, because that takes half a second.
"""

import json
import logging
import pathlib
import resource
import statistics
from collections.abc import Callable, Sequence

from tfaccel.common.html_page import html_page, png_of, svg_of
from tfaccel.common.own_files import replace
from tfaccel.common.report import Grid, Notes, html_of
from tfaccel.common.run_log import summary
from tfaccel.common.tables import as_html, in_figures
from tfaccel.training.logs import Record, metric_names
from tfaccel.training.page.curves import draw, read
from tfaccel.training.page.words import column_head, run_words, settings_of

log = logging.getLogger("tfaccel")

FILE = "report.html"
FIGURES = 5  # significant digits in the table; metrics.csv has all of them
BESIDE = ("learning_rate", "images_per_second", "input_wait", "gpu_memory_mib")  # the metrics

Facts = Sequence[tuple[str, str]]


def try_to_write(workdir: pathlib.Path, **parts) -> pathlib.Path | None:
    """Writes the page as `write` does. If that fails, it logs a warning and returns None."""
    try:
        path = write(workdir, **parts)
    except Exception as error:  # also one of Matplotlib: the training itself is good
        log.warning("report: %s cannot be written (%s: %s)", FILE, type(error).__name__, error)
        return None
    summary("report: %s has the curves, the first images and the figures of this run", path)
    return path


def write(workdir: pathlib.Path, *, make_confusion: Callable[[], str] = str) -> pathlib.Path:
    """Writes the page into the run's folder, completely or not at all, and returns its path.

    Args:
      workdir: a folder with `metrics.jsonl` or `metrics.csv`, and perhaps `first_batch.png`,
        `config.json` and `environment.json`.
      make_confusion: returns the confusion matrix as HTML, or a sentence on how to get it; "" for
        a task that has none.

    Raises:
      UserError: the folder has no epoch.
      OSError: the page cannot be written.
    """
    epochs = read(workdir)
    words = run_words({workdir.name: workdir})
    sections = {
        "": html_of(Notes(_of_epochs(epochs))),
        "Curves": svg_of(draw({workdir.name: epochs}, words)),
        "The first images of training": _first_batch(workdir / "first_batch.png"),
        "Confusion matrix of the test images": make_confusion(),
        "Every epoch": html_of(_table(epochs)),
        "Settings": html_of(Notes([*settings_of(workdir).items()])),
        "Hardware and versions": html_of(Notes(_environment(workdir / "environment.json"))),
    }
    body = "\n".join(
        f"{heading and f'<h2>{as_html(heading)}</h2>'}<div>{part}</div>"
        for heading, part in sections.items()
        if part
    )
    path = workdir / FILE
    replace(path, html_page(words.heading, body).encode())
    return path


def _of_epochs(epochs: Sequence[Record]) -> Facts:
    """Returns what the records say of the whole run."""
    last = epochs[-1]
    results = [f"{column_head(name)} {_figures(last[name])}" for name in metric_names(last)]
    rates = [each["images_per_second"] for each in epochs if "images_per_second" in each]
    waits = [each["input_wait"] for each in epochs if "input_wait" in each]
    used = [each["gpu_memory_mib"] for each in epochs if "gpu_memory_mib" in each]
    # On Linux in KiB: https://man7.org/linux/man-pages/man2/getrusage.2.html
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
    speed = f"{statistics.median(rates):,.0f} images per second in the usual epoch" if rates else ""
    waited = f"; steps waited for images in {max(waits):.1%} of the time at most" if waits else ""
    return [
        ("after the last epoch", "; ".join(results)),
        ("trained", f"{last['epoch']:,} epochs, {last['step']:,} steps, {last['seconds']:,.1f} s"),
        *([("speed", speed + waited)] if speed else []),
        ("memory of the process", f"{memory:,} MiB at most"),
        *([("GPU memory", f"{max(used):,} MiB at most, by all processes")] if used else []),
    ]


def _table(epochs: Sequence[Record]) -> Grid:
    known = dict.fromkeys(name for each in epochs for name in each)
    names = ["epoch", "step", *metric_names(known), *(each for each in BESIDE if each in known)]
    rows = [
        ["" if each.get(name) is None else _figures(each[name]) for name in names]
        for each in epochs
    ]
    return Grid([*map(column_head, names)], rows, right=range(len(names)))


def _figures(value: float) -> str:
    return in_figures(value, FIGURES)


def _first_batch(path: pathlib.Path) -> str:
    return png_of(path.read_bytes(), shows="images with labels") if path.exists() else ""


def _environment(path: pathlib.Path) -> Facts:
    """Returns what `describe_environment` wrote; nothing without a readable file."""
    try:
        written = json.loads(path.read_text(encoding="utf-8"))
        return [(name, _in_a_line(each)) for name, each in written.items()]
    except (OSError, ValueError, AttributeError):
        return []


def _in_a_line(value: object) -> str:
    match value:
        case dict():
            return ", ".join(f"{name} {_in_a_line(each)}" for name, each in value.items())
        case list():
            return ", ".join(map(_in_a_line, value)) or "none"
    return "none" if value is None else str(value)
