"""The base of the reports of an evaluation: text, JSON, and one HTML page with its pictures.

A subclass yields sections: a heading, and parts of a report or names of pictures. The terminal
shows the parts, and the page the pictures too, which lie in the page itself.

    report.write(folder)       # the report's own files, metrics.json and report.html
    print(report)
"""

import csv
import dataclasses
import io
import json
import math
import pathlib
from collections.abc import Iterable, Sequence

import numpy as np

from tfaccel.common.html_page import html_page, png_of
from tfaccel.common.report import Notes, Part, Report, html_of
from tfaccel.common.tables import as_html, in_figures


@dataclasses.dataclass(frozen=True)
class Picture:
    """A picture among the report's files.

    Attributes:
      file: the name of the PNG in the report's folder.
      shows: what it shows, in words.
    """

    file: str
    shows: str


Section = tuple[str, Sequence[Part | Picture]]


@dataclasses.dataclass(frozen=True)
class About:
    """What was evaluated.

    Attributes:
      workdir: of the run.
      weights: which weights, in words: "the checkpoint of step 92, the best by val_loss".
      data: which images, in words: "the test images in /photos/testing".
      num_images: how many of them have scores.
      loader: the name of the loader.
      num_replicas: how many replicas computed the scores.
      notes: sentences on what the reader has to know, such as skipped files.
      unread: the names of the images that cannot be read.
    """

    workdir: str
    weights: str
    data: str
    num_images: int
    loader: str
    num_replicas: int
    notes: tuple[str, ...] = ()
    unread: tuple[str, ...] = ()

    def as_dict(self) -> dict[str, object]:
        """Returns the same as values for JSON."""
        return dataclasses.asdict(self)


class Evaluated(Report):
    """The base of the reports. A subclass has `title`, the methods below and these attributes.

    Attributes:
      about: what was evaluated.
      scores: the results of one of the functions in scores.py, by name.
      if_not_finite: a sentence on how images count whose outputs are infinite or NaN.
    """

    about: About
    scores: dict[str, np.ndarray]
    if_not_finite: str

    @property
    def title(self) -> str:
        """One line that says the result."""
        raise NotImplementedError

    def sections(self, *, whole: bool) -> Iterable[Section]:
        """Returns the sections in order; only if `whole`, tables have all rows of a page."""
        raise NotImplementedError

    @property
    def worst(self) -> np.ndarray:
        """The places of all images, the worst first: [images] int64."""
        raise NotImplementedError

    def captions(self, ids: Sequence[int]) -> list[tuple[str, ...]]:
        """Returns the lines under some images in a picture of them."""
        raise NotImplementedError

    def remarks(self) -> Iterable[str]:
        """Yields sentences on figures that do not exist, for the notes."""
        return ()

    def with_notes(self, notes: Iterable[str]) -> "Evaluated":
        """Returns the report with these notes."""
        return dataclasses.replace(self, about=dataclasses.replace(self.about, notes=(*notes,)))

    def write_files(self, folder: pathlib.Path) -> None:
        """Writes the report's own files, except `report.html` and `metrics.json`."""
        raise NotImplementedError

    def parts(self) -> Iterable[Part]:
        """Returns the parts for a terminal."""
        yield self.title
        for _, parts in self.sections(whole=False):
            yield from (each for each in parts if not isinstance(each, Picture))

    def as_json(self) -> str:
        """Returns the report as JSON. A figure that does not exist is null."""
        return json.dumps(without_nan(self.as_dict()), indent=2)

    def write(self, folder: pathlib.Path) -> None:
        """Writes all files into an empty folder.

        Raises:
          OSError: a file cannot be written.
        """
        self.write_files(folder)
        (folder / "metrics.json").write_text(f"{self.as_json()}\n", encoding="utf-8")
        sections = [
            f"<h2>{as_html(heading)}</h2>\n"
            + "\n".join(f"<div>{_html(each, folder)}</div>" for each in parts)
            for heading, parts in self.sections(whole=True)
        ]
        page = html_page(self.title, "\n".join(sections))
        (folder / "report.html").write_text(page, encoding="utf-8")

    def about_section(self) -> Section:
        """Returns the section on what was evaluated."""
        about = self.about
        replicas = f"{about.num_replicas} replica{'' if about.num_replicas == 1 else 's'}"
        rows = [
            ("run", about.workdir),
            ("weights", about.weights),
            ("images", f"{about.num_images:,}, {about.data}"),
            ("computed", f"by {replicas}, with the loader {about.loader}"),
            *(("note", each) for each in about.notes),
        ]
        return "What was evaluated", [Notes(rows)]


def write_csv(path: pathlib.Path, heads: Sequence[str], rows: Iterable[Sequence]) -> None:
    """Writes a table. A number that is NaN becomes an empty cell; all digits are kept.

    A file name that is not valid UTF-8 keeps its bytes.
    """
    with open(path, "w", newline="", encoding="utf-8", errors="surrogateescape") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(heads)
        writer.writerows([_cell(each) for each in row] for row in rows)


def write_figure(path: pathlib.Path, figure, *, dpi: int) -> None:
    """Writes a Matplotlib figure as a PNG, without the time and the version."""
    data = io.BytesIO()
    figure.savefig(data, format="png", dpi=dpi, metadata={"Software": None})
    path.write_bytes(data.getvalue())


def without_nan(value):
    """Returns nested values with None in place of numbers that are infinite or NaN."""
    if isinstance(value, dict):
        return {name: without_nan(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [without_nan(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def percent(value: float | None) -> str:
    """Returns a ratio as text: 98.61%; "" if there is none."""
    return "" if value is None or math.isnan(value) else f"{value:.2%}"


def highest_first(losses: np.ndarray, is_finite: np.ndarray) -> np.ndarray:
    """Returns the places of losses, [n] int64, the highest first; those that are NaN come first."""
    return np.argsort(-np.where(is_finite, losses, np.inf), kind="stable")


def lowest(rows: list, ratios: np.ndarray, most: int, *, of: str) -> tuple[list, list[str]]:
    """Returns the rows of classes for a table, and a sentence if they are not all of them.

    Args:
      rows: a row for each class.
      ratios: a figure of each class. Classes with NaN come last.
      most: the largest number of rows.
      of: the figure in words.
    """
    if len(rows) <= most:
        return rows, []
    order = np.argsort(ratios, kind="stable")[:most]
    said = f"These are the {most} classes of the lowest {of}; classes.csv has all {len(rows):,}."
    return [rows[each] for each in order], [said]


def without_images(empty: Sequence[str], num_classes: int) -> str:
    """Returns a sentence on the classes of these names, which have no image."""
    some = f"{', '.join(empty[:5])}{', ...' if len(empty) > 5 else ''}"
    return f"{len(empty)} of {num_classes} classes have no image here: {some}."


def known_figures(value: float) -> str:
    """Returns a number as text, of four figures; "" for NaN."""
    return "" if math.isnan(value) else in_figures(value, 4)


def _cell(value) -> object:
    return "" if value is None or (isinstance(value, float) and math.isnan(value)) else value


def _html(part: Part | Picture, folder: pathlib.Path) -> str:
    if not isinstance(part, Picture):
        return html_of(part)
    return png_of((folder / part.file).read_bytes(), shows=part.shows)
