"""The report of a classification: figures, confusion matrix, calibration and the worst images.

report = ClassReport(about, names, image_names, labels, scores, ...)
report.write(folder)

classes.csv         precision, recall, F1 and the images of each class
confusion.csv       the matrix, for at most 1,000 classes; a row for each true class
confusion.png       the matrix, or the part of it that is confused most
confused_pairs.csv  all wrong pairs of classes, the most frequent first
calibration.csv     the bins of reliability.png
reliability.png
images.csv          a row for each image, in the order of the data
worst.png           the images of the highest loss
"""

import dataclasses
import functools
import pathlib
from collections.abc import Iterable, Sequence

import numpy as np

from tfaccel.common.report import Grid
from tfaccel.common.tables import counted, in_figures
from tfaccel.experiment.evaluate import pictures
from tfaccel.experiment.evaluate.calibration import Calibration, calibrate
from tfaccel.experiment.evaluate.classes import (
    NO_CLASS,
    ByClass,
    Overall,
    by_class,
    confusion,
    most_confused,
    overall,
)
from tfaccel.experiment.evaluate.page import (
    About,
    Evaluated,
    Picture,
    Section,
    highest_first,
    lowest,
    percent,
    without_images,
    write_csv,
    write_figure,
)

HEADS = ("class", "images", "predicted", "precision", "recall", "f1")  # of classes.csv
MOST_IN_MATRIX = 1000  # classes of confusion.csv: 2 MB of text
MOST_ON_TERMINAL, MOST_ON_PAGE = 20, 1000  # classes
PAIRS_ON_TERMINAL, PAIRS_ON_PAGE = 5, 50
WORST_ON_TERMINAL, WORST_ON_PAGE = 5, 50


@dataclasses.dataclass(frozen=True, repr=False)
class ClassReport(Evaluated):
    """The scores of all images, and what follows from them.

    Attributes:
      about: what was evaluated.
      names: the names of all classes, in order.
      image_names: [n], the path or the index of each image.
      labels: [n] integers, the true classes.
      scores: the results of `scores.Classes`, by name.
    """

    about: About
    names: Sequence[str]
    image_names: Sequence[str]
    labels: np.ndarray
    scores: dict[str, np.ndarray]

    if_not_finite = (
        "These images count as wrong, and are left out of the log loss and the calibration."
    )

    @functools.cached_property
    def predicted(self) -> np.ndarray:
        """The likeliest class of each image, [n], NO_CLASS for one with outputs that are NaN."""
        return np.where(self.scores["is_finite"], self.scores["classes"][:, 0], NO_CLASS)

    @functools.cached_property
    def overall(self) -> Overall:
        """The figures over all images."""
        return overall(
            self.labels,
            self.scores["classes"],
            self.scores["loss"],
            self.scores["is_finite"],
            num_classes=len(self.names),
        )

    @functools.cached_property
    def table(self) -> ByClass:
        """The figures of each class."""
        return by_class(self.labels, self.predicted, num_classes=len(self.names))

    @functools.cached_property
    def calibration(self) -> Calibration:
        """The calibration over the images with finite outputs."""
        known = self.scores["is_finite"]
        right = self.labels == self.predicted
        return calibrate(self.scores["probabilities"][known, 0], right[known])

    @functools.cached_property
    def pairs(self) -> list[tuple[int, int, int]]:
        """The wrong pairs of classes: true, predicted, images; the most frequent first."""
        return most_confused(self.labels, self.predicted, num_classes=len(self.names))

    def remarks(self) -> Iterable[str]:
        """Yields a sentence on classes without an image."""
        if empty := [self.names[each] for each in np.flatnonzero(self.table.support == 0)]:
            yield (
                f"{without_images(empty, len(self.names))} They have no recall, and count in the "
                "macro F1 only if the model takes an image for one of them."
            )

    @property
    def worst(self) -> np.ndarray:
        """The indices of all images, the highest loss first; outputs that are NaN come first."""
        return highest_first(self.scores["loss"], self.scores["is_finite"])

    @property
    def title(self) -> str:
        """One line that says the result."""
        wrong = int((self.labels != self.predicted).sum())
        return (
            f"evaluate: {percent(self.overall.accuracy)} of {counted(len(self.labels), 'image')} "
            f"right, {wrong:,} wrong"
        )

    def sections(self, *, whole: bool) -> Iterable[Section]:
        """Returns the sections in order."""
        yield self.about_section()
        yield "Over all images", [self._overall_grid()]
        yield "Classes", self._classes(whole=whole)
        pairs = self._pairs(PAIRS_ON_PAGE if whole else PAIRS_ON_TERMINAL)
        yield "Confusions", [Picture("confusion.png", "confusion matrix"), *pairs]
        yield "Calibration", [Picture("reliability.png", "reliability diagram")]
        worst = self._worst_grid(WORST_ON_PAGE if whole else WORST_ON_TERMINAL)
        yield "Images of the highest loss", [Picture("worst.png", "the worst images"), worst]

    def as_dict(self) -> dict:
        """Returns the figures for JSON, without the images."""
        calibration, table = self.calibration, self.table
        return {
            "about": self.about.as_dict(),
            "overall": dataclasses.asdict(self.overall)
            | {
                "expected_calibration_error": calibration.ece,
                "maximum_calibration_error": calibration.largest,
                "calibration_bins": len(calibration.counts),
            },
            "classes": [dict(zip(HEADS, each, strict=True)) for each in self._class_rows(table)],
        }

    def write_files(self, folder: pathlib.Path) -> None:
        """Writes the tables and the pictures, except `worst.png`."""
        num = len(self.names)
        write_csv(folder / "classes.csv", HEADS, self._class_rows(self.table))
        write_csv(
            folder / "confused_pairs.csv",
            ("true", "predicted", "images"),
            ((self.names[true], self.names[other], count) for true, other, count in self.pairs),
        )
        if num <= MOST_IN_MATRIX:
            matrix = confusion(self.labels, self.predicted, num_classes=num).tolist()
            rows = ([name, *row] for name, row in zip(self.names, matrix, strict=True))
            write_csv(folder / "confusion.csv", ("true \\ predicted", *self.names), rows)
        bins = self.calibration
        write_csv(
            folder / "calibration.csv",
            ("above", "up_to", "images", "probability", "accuracy"),
            bins.rows(),
        )
        self._write_images(folder / "images.csv")
        figure = pictures.confusion_figure(self.labels, self.predicted, self.names)
        write_figure(folder / "confusion.png", figure, dpi=pictures.DPI)
        figure = pictures.reliability_figure(bins)
        write_figure(folder / "reliability.png", figure, dpi=pictures.DPI)

    def captions(self, ids: Sequence[int]) -> list[tuple[str, ...]]:
        """Returns the lines under some images in a picture of them."""
        return [
            (
                f"true {self.names[self.labels[each]]}: {self.scores['true'][each]:.1%}",
                f"said {self._said(each)}: {self.scores['probabilities'][each, 0]:.1%}",
            )
            for each in ids
        ]

    def _said(self, index: int) -> str:
        number = self.predicted[index]
        return "nothing" if number == NO_CLASS else self.names[number]

    def _write_images(self, path: pathlib.Path) -> None:
        scores = self.scores
        chances = scores["probabilities"][:, 0].tolist()
        values = zip(
            *(self.image_names, self.labels.tolist(), self.predicted.tolist(), chances),
            *(scores["true"].tolist(), scores["loss"].tolist()),
            strict=True,
        )
        rows = (
            (
                *(image, self.names[true], "" if said == NO_CLASS else self.names[said]),
                *(chance, of_true, loss, int(true == said), ""),
            )
            for image, true, said, chance, of_true, loss in values
        )
        unread = ((each, *[None] * 6, "cannot be read") for each in self.about.unread)
        heads = ("image", "true", "predicted", "probability", "true_probability", "loss", "right")
        write_csv(path, (*heads, "note"), (*rows, *unread))

    def _class_rows(self, table: ByClass) -> list[tuple]:
        return list(
            zip(
                *(self.names, table.support.tolist(), table.predicted.tolist()),
                *(table.precision.tolist(), table.recall.tolist(), table.f1.tolist()),
                strict=True,
            )
        )

    def _overall_grid(self) -> Grid:
        found, calibration = self.overall, self.calibration
        rows = [
            ("accuracy", percent(found.accuracy)),
            *([("top 5", percent(found.top5))] if found.top5 is not None else []),
            ("macro F1", percent(found.macro_f1)),
            ("balanced accuracy", percent(found.balanced_accuracy)),
            ("log loss, nats", in_figures(found.log_loss, 4)),
            (
                f"expected calibration error, {len(calibration.counts)} bins",
                percent(calibration.ece),
            ),
        ]
        return Grid(("over all images", ""), rows, right=(1,))

    def _classes(self, *, whole: bool) -> list:
        most = MOST_ON_PAGE if whole else MOST_ON_TERMINAL
        # A class without images and predictions has no F1, and comes last.
        rows, more = lowest(self._class_rows(self.table), self.table.f1, most, of="F1")
        cells = [
            (name, f"{support:,}", f"{predicted:,}", *map(percent, ratios))
            for name, support, predicted, *ratios in rows
        ]
        heads = ("class", "images", "predicted", "precision", "recall", "F1")
        return [Grid(heads, cells, right=range(1, 6)), *more]

    def _pairs(self, most: int) -> list:
        if not self.pairs:
            return ["No image is taken for another class."]
        support = self.table.support
        rows = [
            (self.names[true], self.names[other], f"{count:,}", percent(count / support[true]))
            for true, other, count in self.pairs[:most]
        ]
        return [Grid(("true", "taken for", "images", "of the class"), rows, right=(2, 3))]

    def _worst_grid(self, most: int) -> Grid:
        scores = self.scores
        rows = [
            (
                *(self.image_names[each], self.names[self.labels[each]], self._said(each)),
                *(percent(scores["probabilities"][each, 0]), percent(scores["true"][each])),
                in_figures(scores["loss"][each]),
            )
            for each in self.worst[:most].tolist()
        ]
        heads = ("highest loss", "true", "predicted", "probability", "of the true", "loss")
        return Grid(heads, rows, right=(3, 4, 5))
