"""The report of several classes an image: figures of each class, calibration, the worst images.

report = MultilabelReport(about, names, image_names, labels, scores)
report.write(folder)

classes.csv       the figures of each class
calibration.csv   the bins of reliability.png
reliability.png
images.csv        a row for each image, in the order of the data
worst.png         the images of the highest loss
"""

import dataclasses
import functools
import itertools
import pathlib
from collections.abc import Iterable, Sequence

import numpy as np

from tfaccel.common.report import Grid
from tfaccel.common.tables import counted
from tfaccel.experiment.evaluate import pictures
from tfaccel.experiment.evaluate.calibration import Calibration, calibrate
from tfaccel.experiment.evaluate.multilabel import OfSeveral, of_several, present
from tfaccel.experiment.evaluate.page import (
    About,
    Evaluated,
    Picture,
    Section,
    highest_first,
    known_figures,
    lowest,
    percent,
    without_images,
    write_csv,
    write_figure,
)

# Of classes.csv.
HEADS = (
    *("class", "images", "predicted", "average_precision", "auc", "precision", "recall", "f1"),
    *("best_threshold", "best_f1"),
)
MOST_IN_ROWS = 1000  # classes with a column of images.csv
MOST_ON_TERMINAL, MOST_ON_PAGE = 20, 1000  # classes
WORST_ON_TERMINAL, WORST_ON_PAGE = 5, 50
NO_MATRIX = (
    "There is no confusion matrix: an image may have several classes, so a class that is missed is "
    "not taken for another one."
)
SEPARATOR = ";"  # between the names of an image's classes, as a list of images may have it


@dataclasses.dataclass(frozen=True, repr=False)
class MultilabelReport(Evaluated):
    """The scores of all images, and what follows from them.

    Attributes:
      about: what was evaluated.
      names: the names of all classes, in order.
      image_names: [n], the path or the index of each image.
      labels: [n, classes] bool, whether the image has the class.
      scores: the results of `scores.several`, by name.
    """

    about: About
    names: Sequence[str]
    image_names: Sequence[str]
    labels: np.ndarray
    scores: dict[str, np.ndarray]

    if_not_finite = (
        "No class is said of these images. They are left out of the average precision, the AUC, "
        "the best thresholds, the log loss and the calibration."
    )

    @functools.cached_property
    def predicted(self) -> np.ndarray:
        """Which classes are said of each image: [n, classes] bool."""
        return present(self.scores["probabilities"], self.scores["is_finite"])

    @functools.cached_property
    def figures(self) -> OfSeveral:
        """The figures of each class and over all images."""
        return of_several(self.labels, self.scores["probabilities"], self.scores["is_finite"])

    @functools.cached_property
    def calibration(self) -> Calibration:
        """The calibration of the probability of each class of each image with finite outputs."""
        known = self.scores["is_finite"]
        return calibrate(self.scores["probabilities"][known].ravel(), self.labels[known].ravel())

    @property
    def log_loss(self) -> float:
        """The mean binary cross-entropy over images with finite outputs; NaN without them."""
        known = self.scores["loss"][self.scores["is_finite"]].astype(np.float64)
        return float(known.mean()) if len(known) else float("nan")

    @property
    def right(self) -> np.ndarray:
        """Whether all classes of an image are right: [n] bool."""
        return (self.labels == self.predicted).all(axis=1) & self.scores["is_finite"]

    @property
    def worst(self) -> np.ndarray:
        """The indices of all images, the highest loss first; outputs that are NaN come first."""
        return highest_first(self.scores["loss"], self.scores["is_finite"])

    @property
    def title(self) -> str:
        """One line that says the result."""
        precision = percent(self.figures.mean_average_precision) or "unknown"
        return (
            f"evaluate: mean average precision {precision}, all classes right in "
            f"{percent(self.figures.subset_accuracy)} of {counted(len(self.labels), 'image')}"
        )

    def remarks(self) -> Iterable[str]:
        """Yields sentences on classes that have no image, or all."""
        support, num = self.figures.table.support, len(self.names)
        if empty := [self.names[each] for each in np.flatnonzero(support == 0)]:
            yield (
                f"{without_images(empty, num)} They have no recall, average precision, AUC and "
                "best threshold, and count in the macro F1 only if the model says one of them."
            )
        if full := [self.names[each] for each in np.flatnonzero(support == len(self.labels))]:
            yield (
                f"All images have the class {', '.join(full[:5])}{', ...' if full[5:] else ''}, so "
                "there is no AUC of it."
            )
        if num > MOST_IN_ROWS:
            yield (
                f"images.csv has no probabilities, because there are more than {MOST_IN_ROWS:,} "
                "classes."
            )

    def sections(self, *, whole: bool) -> Iterable[Section]:
        """Returns the sections in order."""
        yield self.about_section()
        yield "Over all images", [self._overall_grid()]
        yield "Classes", [*self._classes(whole=whole), NO_MATRIX]
        yield "Calibration", [Picture("reliability.png", "reliability diagram")]
        worst = self._worst_grid(WORST_ON_PAGE if whole else WORST_ON_TERMINAL)
        yield "Images of the highest loss", [Picture("worst.png", "the worst images"), worst]

    def as_dict(self) -> dict:
        """Returns the figures for JSON, without the images."""
        found, calibration = self.figures, self.calibration
        return {
            "about": self.about.as_dict(),
            "overall": {
                "images": len(self.labels),
                "mean_average_precision": found.mean_average_precision,
                "mean_auc": found.mean_auc,
                "macro_f1": found.macro_f1,
                "micro_f1": found.micro_f1,
                "subset_accuracy": found.subset_accuracy,
                "binary_accuracy": found.binary_accuracy,
                "log_loss": self.log_loss,
                "not_finite": int((~self.scores["is_finite"]).sum()),
                "expected_calibration_error": calibration.ece,
                "maximum_calibration_error": calibration.largest,
                "calibration_bins": len(calibration.counts),
            },
            "classes": [dict(zip(HEADS, each, strict=True)) for each in self._class_rows()],
        }

    def write_files(self, folder: pathlib.Path) -> None:
        """Writes the tables and the picture of the calibration."""
        write_csv(folder / "classes.csv", HEADS, self._class_rows())
        heads = ("above", "up_to", "answers", "probability", "has_class")
        write_csv(folder / "calibration.csv", heads, self.calibration.rows())
        self._write_images(folder / "images.csv")
        figure = pictures.reliability_figure(
            self.calibration,
            of="a class, for each class of each image",
            height="part that has the class",
            bar="has the class",
            counts="answers",
        )
        write_figure(folder / "reliability.png", figure, dpi=pictures.DPI)

    def captions(self, ids: Sequence[int]) -> list[tuple[str, ...]]:
        """Returns the lines under some images in a picture of them."""
        return [
            (
                f"true {self._joined(self.labels[each], ', ') or 'none'}",
                f"said {self._joined(self.predicted[each], ', ') or 'none'}",
            )
            for each in ids
        ]

    def _joined(self, there: np.ndarray, between: str) -> str:
        return between.join(self.names[each] for each in np.flatnonzero(there))

    def _said(self, index: int) -> str:
        if not self.scores["is_finite"][index]:
            return "nothing"
        chances = self.scores["probabilities"][index]
        some = np.flatnonzero(self.predicted[index])
        return ", ".join(f"{self.names[each]} {chances[each]:.0%}" for each in some) or "none"

    def _write_images(self, path: pathlib.Path) -> None:
        named = self.names if len(self.names) <= MOST_IN_ROWS else ()
        columns = [f"{kind}_{name}" for name in named for kind in ("true", "probability")]
        heads = ("image", "true", "predicted", "loss", "right", *columns, "note")
        unread = (
            (each, *[None] * (len(heads) - 2), "cannot be read") for each in self.about.unread
        )
        write_csv(path, heads, itertools.chain(self._image_rows(len(named)), unread))

    def _image_rows(self, num_named: int) -> Iterable[tuple]:
        scores, right = self.scores, self.right.tolist()
        for index, image in enumerate(self.image_names):
            known = scores["is_finite"][index]
            flags = self.labels[index, :num_named].astype(int).tolist()
            chances = scores["probabilities"][index, :num_named].tolist()
            chances = chances if known else [None] * num_named
            yield (
                *(image, self._joined(self.labels[index], SEPARATOR)),
                self._joined(self.predicted[index], SEPARATOR),
                *(float(scores["loss"][index]) if known else None, int(right[index])),
                *itertools.chain(*zip(flags, chances, strict=True)),
                "" if known else "outputs are infinite or NaN",
            )

    def _class_rows(self) -> list[tuple]:
        found, table = self.figures, self.figures.table
        columns = (
            *(table.support, table.predicted, found.average_precision, found.auc),
            *(table.precision, table.recall, table.f1, found.best_threshold, found.best_f1),
        )
        return list(zip(self.names, *(each.tolist() for each in columns), strict=True))

    def _overall_grid(self) -> Grid:
        found, calibration = self.figures, self.calibration
        rows = [
            ("mean average precision", percent(found.mean_average_precision)),
            ("mean AUC", percent(found.mean_auc)),
            ("macro F1", percent(found.macro_f1)),
            ("micro F1", percent(found.micro_f1)),
            ("images with all classes right", percent(found.subset_accuracy)),
            ("right answers, of all classes of all images", percent(found.binary_accuracy)),
            ("log loss of a class, nats", known_figures(self.log_loss)),
            (
                f"expected calibration error, {len(calibration.counts)} bins",
                percent(calibration.ece),
            ),
        ]
        return Grid(("over all images", ""), rows, right=(1,))

    def _classes(self, *, whole: bool) -> list:
        most = MOST_ON_PAGE if whole else MOST_ON_TERMINAL
        # A class without images has no average precision, and comes last.
        rows, more = lowest(
            self._class_rows(), self.figures.average_precision, most, of="average precision"
        )
        cells = [
            (
                *(name, f"{support:,}", f"{predicted:,}", *map(percent, ratios)),
                *(known_figures(threshold), percent(best)),
            )
            for name, support, predicted, *ratios, threshold, best in rows
        ]
        heads = (
            *("class", "images", "predicted", "average precision", "AUC"),
            *("precision", "recall", "F1", "best threshold", "its F1"),
        )
        return [Grid(heads, cells, right=range(1, 10)), *more]

    def _worst_grid(self, most: int) -> Grid:
        rows = [
            (
                self.image_names[each],
                self._joined(self.labels[each], ", ") or "none",
                self._said(each),
                known_figures(float(self.scores["loss"][each])),
            )
            for each in self.worst[:most].tolist()
        ]
        return Grid(("highest loss", "true", "predicted", "loss"), rows, right=(3,))
