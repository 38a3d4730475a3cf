"""The report of a restoration: PSNR, and the worst images.

report = RestoredReport(about, image_names, scores)
report.write(folder)

images.csv      a row for each image, in the order of the data
worst.png       image, target and answer of the images of the lowest PSNR
"""

import dataclasses
import pathlib
from collections.abc import Iterable, Sequence

import numpy as np

from tfaccel.common.report import Grid
from tfaccel.common.tables import counted, in_figures
from tfaccel.experiment.evaluate.page import About, Evaluated, Picture, Section, write_csv

WORST_ON_TERMINAL, WORST_ON_PAGE = 5, 50


@dataclasses.dataclass(frozen=True, repr=False)
class RestoredReport(Evaluated):
    """The scores of all images, and what follows from them.

    Attributes:
      about: what was evaluated.
      image_names: [n], the path or the index of each image.
      scores: the results of `scores.Restored`, by name.
    """

    about: About
    image_names: Sequence[str]
    scores: dict[str, np.ndarray]

    if_not_finite = "These images are left out of the means, and come first among the worst."

    def mean(self, name: str) -> float:
        """Returns the mean of a score over the images with finite outputs; NaN without them."""
        known = self.scores[name][self.scores["is_finite"]].astype(np.float64)
        return float(known.mean()) if len(known) else float("nan")

    @property
    def worst(self) -> np.ndarray:
        """The indices of all images, the lowest PSNR first; outputs that are NaN come first."""
        ratios = np.where(self.scores["is_finite"], self.scores["psnr"], -np.inf)
        return np.argsort(ratios, kind="stable")

    @property
    def title(self) -> str:
        """One line that says the result."""
        number = counted(len(self.image_names), "image")
        return f"evaluate: PSNR {in_figures(self.mean('psnr'), 4)} dB over {number}"

    def sections(self, *, whole: bool) -> Iterable[Section]:
        """Returns the sections in order."""
        yield self.about_section()
        overall = [
            ("PSNR, dB", in_figures(self.mean("psnr"), 4)),
            ("PSNR of the given images, dB", in_figures(self.mean("psnr_of_input"), 4)),
            ("mean absolute error, normalized", in_figures(self.mean("loss"), 4)),
        ]
        yield "Over all images", [Grid(("over all images", ""), overall, right=(1,))]
        worst = [
            (
                self.image_names[each],
                in_figures(self.scores["psnr"][each], 4),
                in_figures(self.scores["psnr_of_input"][each], 4),
            )
            for each in self.worst[: WORST_ON_PAGE if whole else WORST_ON_TERMINAL].tolist()
        ]
        heads = ("lowest PSNR", "PSNR, dB", "as given, dB")
        picture = Picture("worst.png", "image, target and answer of the worst images")
        yield (
            "Images of the lowest PSNR: image, target, answer",
            [picture, Grid(heads, worst, right=(1, 2))],
        )

    def as_dict(self) -> dict:
        """Returns the figures for JSON, without the images."""
        return {
            "about": self.about.as_dict(),
            "overall": {
                "images": len(self.image_names),
                "psnr": self.mean("psnr"),
                "psnr_of_input": self.mean("psnr_of_input"),
                "mean_absolute_error": self.mean("loss"),
                "not_finite": int((~self.scores["is_finite"]).sum()),
            },
        }

    def write_files(self, folder: pathlib.Path) -> None:
        """Writes the table of the images."""
        names = ("psnr", "psnr_of_input", "loss")
        columns = (self.scores[each].tolist() for each in names)
        empty = [""] * len(self.image_names)
        rows = zip(self.image_names, *columns, empty, strict=True)
        unread = ((each, None, None, None, "cannot be read") for each in self.about.unread)
        write_csv(folder / "images.csv", ("image", *names, "note"), (*rows, *unread))

    def captions(self, ids: Sequence[int]) -> list[tuple[str, ...]]:
        """Returns the lines under some images in a picture of them."""
        return [
            (
                pathlib.PurePath(self.image_names[each]).name,
                f"{self.scores['psnr'][each]:.1f} dB",
            )
            for each in ids
        ]
