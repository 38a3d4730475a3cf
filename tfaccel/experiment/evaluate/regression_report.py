"""The report of a regression: errors of each target, and the worst images.

report = RegressionReport(about, names, image_names, labels, scores)
report.write(folder)

targets.csv     MAE, RMSE, R squared, mean and standard deviation of each target
predicted.png   predicted numbers against true ones
images.csv      a row for each image, in the order of the data
worst.png       the images of the largest errors
"""

import dataclasses
import functools
import itertools
import pathlib
from collections.abc import Iterable, Sequence

import numpy as np

from tfaccel.common.report import Grid
from tfaccel.common.tables import counted, in_figures
from tfaccel.experiment.evaluate import pictures
from tfaccel.experiment.evaluate.page import (
    About,
    Evaluated,
    Picture,
    Section,
    known_figures,
    write_csv,
    write_figure,
)
from tfaccel.experiment.evaluate.regression import OfNumbers, of_numbers, relative_errors

HEADS = ("target", "mae", "rmse", "r2", "mean", "std")  # of targets.csv
WORST_ON_TERMINAL, WORST_ON_PAGE = 5, 50
MOST_ON_TERMINAL, MOST_ON_PAGE = 20, 1000  # targets
NAMED = 3  # targets in the title, under a picture, and of an image in a table
HOW_ERRORS_COUNT = (
    "The error of an image is the mean of its absolute errors over all targets, each divided by "
    "the standard deviation of the target in these images. The error in a target with no spread "
    "is not divided."
)


@dataclasses.dataclass(frozen=True, repr=False)
class RegressionReport(Evaluated):
    """The scores of all images, and what follows from them.

    Attributes:
      about: what was evaluated.
      names: the names of the targets, in order.
      image_names: [n], the path or the index of each image.
      labels: [n, targets] float32, the true numbers.
      scores: the results of `scores.numbers`, by name.
    """

    about: About
    names: Sequence[str]
    image_names: Sequence[str]
    labels: np.ndarray
    scores: dict[str, np.ndarray]

    if_not_finite = "These images are in no error, and come first among the worst."

    @functools.cached_property
    def figures(self) -> OfNumbers:
        """The figures of each target."""
        return of_numbers(self.labels, self.scores["numbers"], self.scores["is_finite"])

    @functools.cached_property
    def relative(self) -> np.ndarray:
        """Absolute errors in standard deviations: [n, targets] float64; inf for those of NaN."""
        errors = relative_errors(self.labels, self.scores["numbers"], self.figures.std)
        return np.where(self.scores["is_finite"][:, None], errors, np.inf)

    @property
    def errors(self) -> np.ndarray:
        """The mean over the targets: [n] float64."""
        return self.relative.mean(axis=1)

    @property
    def worst(self) -> np.ndarray:
        """The indices of all images, the largest error first; outputs that are NaN come first."""
        return np.argsort(-self.errors, kind="stable")

    @property
    def title(self) -> str:
        """One line that says the result."""
        some = zip(self.names[:NAMED], self.figures.mae.tolist(), strict=False)
        said = ", ".join(f"{known_figures(each) or 'unknown'} ({name})" for name, each in some)
        if len(self.names) > NAMED:
            said = f"{known_figures(self.figures.mean_absolute_error) or 'unknown'} on average"
        number = counted(len(self.image_names), "image")
        return f"evaluate: mean absolute error {said}, over {number}"

    def remarks(self) -> Iterable[str]:
        """Yields a sentence on targets without an R squared."""
        flat = [self.names[each] for each in np.flatnonzero(self.figures.std == 0)]
        if flat:
            some = f"{', '.join(flat[:5])}{', ...' if flat[5:] else ''}"
            yield (
                f"The true number of {some} is the same in all images here, so there is no R "
                "squared of it."
            )

    def sections(self, *, whole: bool) -> Iterable[Section]:
        """Returns the sections in order."""
        yield self.about_section()
        overall = [
            ("mean absolute error, mean of the targets", self.figures.mean_absolute_error),
            ("R squared, mean of the targets", self.figures.mean_r2),
        ]
        cells = [(name, known_figures(each)) for name, each in overall]
        yield "Over all images", [Grid(("over all images", ""), cells, right=(1,))]
        shows = Picture("predicted.png", "predicted numbers against true ones")
        yield "Targets", [*self._targets(whole=whole), shows]
        worst = self._worst_grid(WORST_ON_PAGE if whole else WORST_ON_TERMINAL)
        shows = Picture("worst.png", "the worst images")
        yield "Images of the largest errors", [shows, worst, HOW_ERRORS_COUNT]

    def as_dict(self) -> dict:
        """Returns the figures for JSON, without the images."""
        return {
            "about": self.about.as_dict(),
            "overall": {
                "images": len(self.image_names),
                "mean_absolute_error": self.figures.mean_absolute_error,
                "mean_r2": self.figures.mean_r2,
                "not_finite": int((~self.scores["is_finite"]).sum()),
            },
            "targets": [dict(zip(HEADS, each, strict=True)) for each in self._target_rows()],
        }

    def write_files(self, folder: pathlib.Path) -> None:
        """Writes the tables and the picture of the numbers."""
        write_csv(folder / "targets.csv", HEADS, self._target_rows())
        columns = [f"{kind}_{name}" for name in self.names for kind in ("true", "predicted")]
        heads = ("image", *columns, "error", "note")
        unread = (
            (each, *[None] * (len(heads) - 2), "cannot be read") for each in self.about.unread
        )
        write_csv(folder / "images.csv", heads, itertools.chain(self._image_rows(), unread))
        known = self.scores["is_finite"]
        figure = pictures.scatter_figure(
            self.labels[known], self.scores["numbers"][known], self.names, self.figures.r2
        )
        write_figure(folder / "predicted.png", figure, dpi=pictures.DPI)

    def captions(self, ids: Sequence[int]) -> list[tuple[str, ...]]:
        """Returns the lines under some images in a picture of them: the worst targets of each."""
        return [
            tuple(f"{name} {true}, said {said}" for name, true, said in self._said(each, digits=3))
            for each in ids
        ]

    def _said(self, index: int, *, digits: int = 4) -> list[tuple[str, str, str]]:
        """Returns name, true and predicted number of an image's worst targets, in their order."""
        some = np.sort(np.argsort(-self.relative[index], kind="stable")[:NAMED])
        return [
            (
                self.names[each],
                in_figures(self.labels[index, each], digits),
                in_figures(self.scores["numbers"][index, each], digits),
            )
            for each in some
        ]

    def _image_rows(self) -> Iterable[tuple]:
        errors = self.errors.tolist()
        for index, image in enumerate(self.image_names):
            known = self.scores["is_finite"][index]
            said = self.scores["numbers"][index].tolist() if known else [None] * len(self.names)
            yield (
                image,
                *itertools.chain(*zip(self.labels[index].tolist(), said, strict=True)),
                errors[index] if known else None,
                "" if known else "outputs are infinite or NaN",
            )

    def _target_rows(self) -> list[tuple]:
        columns = (getattr(self.figures, each).tolist() for each in HEADS[1:])
        return list(zip(self.names, *columns, strict=True))

    def _targets(self, *, whole: bool) -> list:
        rows, most = self._target_rows(), MOST_ON_PAGE if whole else MOST_ON_TERMINAL
        more = []
        if len(rows) > most:
            order = np.argsort(self.figures.r2, kind="stable")[:most]
            rows = [rows[each] for each in order]
            more = [
                f"These are the {most} targets of the lowest R squared; targets.csv has all "
                f"{len(self.names):,}."
            ]
        cells = [(name, *map(known_figures, values)) for name, *values in rows]
        heads = ("target", "MAE", "RMSE", "R squared", "mean", "standard deviation")
        return [Grid(heads, cells, right=range(1, 6)), *more]

    def _worst_grid(self, most: int) -> Grid:
        errors, rows = self.errors, []
        for each in self.worst[:most].tolist():
            said = self._said(each)
            true = ", ".join(f"{name} {number}" for name, number, _ in said)
            predicted = ", ".join(f"{name} {number}" for name, _, number in said)
            is_known = self.scores["is_finite"][each]
            error = known_figures(errors[each]) if is_known else ""
            rows.append((self.image_names[each], true, predicted, error))
        return Grid(("largest errors", "true", "predicted", "error"), rows, right=(3,))
