"""The report of a segmentation: IoU of each class, and the worst images.

report = MaskReport(about, names, image_names, scores)
report.write(folder)

classes.csv     IoU and the pixels of each class
images.csv      a row for each image, in the order of the data
worst.png       image, mask and prediction of the images of the lowest IoU
"""

import dataclasses
import functools
import pathlib
from collections.abc import Iterable, Sequence

import numpy as np

from tfaccel.common.report import Grid
from tfaccel.common.tables import counted, in_figures
from tfaccel.experiment.evaluate.page import About, Evaluated, Picture, Section, percent, write_csv
from tfaccel.experiment.evaluate.pixels import OfMasks, iou_of_images, of_masks

WORST_ON_TERMINAL, WORST_ON_PAGE = 5, 50


@dataclasses.dataclass(frozen=True, repr=False)
class MaskReport(Evaluated):
    """The scores of all images, and what follows from them.

    Attributes:
      about: what was evaluated.
      names: the names of all classes, in order: their values in a mask.
      image_names: [n], the path or the index of each image.
      scores: the results of `scores.Masks`, by name.
    """

    about: About
    names: Sequence[str]
    image_names: Sequence[str]
    scores: dict[str, np.ndarray]

    if_not_finite = "These images are left out of the log loss; every such pixel counts as class 0."

    @functools.cached_property
    def figures(self) -> OfMasks:
        """The figures over all pixels."""
        return of_masks(self.scores["pixels"])

    @functools.cached_property
    def iou(self) -> np.ndarray:
        """Each image's mean IoU over its classes: [n] float64, NaN without pixels."""
        return iou_of_images(self.scores["pixels"])

    @property
    def log_loss(self) -> float:
        """The mean over the pixels of images with finite outputs, in nats; NaN without pixels."""
        known = self.scores["is_finite"]
        pixels = self.scores["num_pixels"][known].sum(dtype=np.int64)
        total = self.scores["loss"][known].sum(dtype=np.float64)
        return float(total / pixels) if pixels else float("nan")

    @property
    def worst(self) -> np.ndarray:
        """The indices of all images, the lowest IoU first; images without pixels come last."""
        return np.argsort(self.iou, kind="stable")

    @property
    def title(self) -> str:
        """One line that says the result."""
        return (
            f"evaluate: mean IoU {percent(self.figures.mean_iou) or 'unknown'} over "
            f"{counted(len(self.iou), 'image')}"
        )

    def sections(self, *, whole: bool) -> Iterable[Section]:
        """Returns the sections in order."""
        yield self.about_section()
        overall = [
            ("mean IoU", percent(self.figures.mean_iou)),
            ("accuracy of the pixels", percent(self.figures.accuracy)),
            ("log loss of a pixel, nats", in_figures(self.log_loss, 4)),
        ]
        yield "Over all pixels", [Grid(("over all pixels", ""), overall, right=(1,))]
        rows = [
            (name, f"{labelled:,}", f"{found:,}", percent(iou))
            for name, labelled, found, iou in self._class_rows()
        ]
        heads = ("class", "pixels in masks", "in predictions", "IoU")
        yield "Classes", [Grid(heads, rows, right=(1, 2, 3))]
        worst = [
            (self.image_names[each], percent(self.iou[each]) or "no pixels")
            for each in self.worst[: WORST_ON_PAGE if whole else WORST_ON_TERMINAL].tolist()
        ]
        shows = "image, mask and prediction of the worst images"
        yield (
            "Images of the lowest IoU: image, mask, prediction",
            [Picture("worst.png", shows), Grid(("lowest IoU", "IoU"), worst, right=(1,))],
        )

    def as_dict(self) -> dict:
        """Returns the figures for JSON, without the images."""
        heads = ("class", "pixels", "predicted", "iou")
        return {
            "about": self.about.as_dict(),
            "overall": {
                "images": len(self.iou),
                "mean_iou": self.figures.mean_iou,
                "accuracy": self.figures.accuracy,
                "log_loss": self.log_loss,
                "not_finite": int((~self.scores["is_finite"]).sum()),
            },
            "classes": [dict(zip(heads, each, strict=True)) for each in self._class_rows()],
        }

    def write_files(self, folder: pathlib.Path) -> None:
        """Writes the tables."""
        heads = ("class", "pixels", "predicted", "iou")
        write_csv(folder / "classes.csv", heads, self._class_rows())
        scores = self.scores
        losses = scores["loss"] / np.maximum(scores["num_pixels"], 1)
        losses = np.where(scores["num_pixels"] > 0, losses, np.nan)
        rows = zip(
            *(self.image_names, self.iou.tolist(), losses.tolist()),
            *(scores["num_pixels"].tolist(), [""] * len(self.iou)),
            strict=True,
        )
        unread = ((each, None, None, None, "cannot be read") for each in self.about.unread)
        heads = ("image", "iou", "loss", "pixels", "note")
        write_csv(folder / "images.csv", heads, (*rows, *unread))

    def captions(self, ids: Sequence[int]) -> list[tuple[str, ...]]:
        """Returns the lines under some images in a picture of them."""
        return [
            (pathlib.PurePath(self.image_names[each]).name, f"IoU {percent(self.iou[each])}")
            for each in ids
        ]

    def _class_rows(self) -> list[tuple]:
        found = self.figures
        return list(
            zip(
                *(self.names, found.labelled.tolist(), found.found.tolist(), found.iou.tolist()),
                strict=True,
            )
        )
