"""first_batch.png: the first images that a run trains on.

Takes the loader; gives a sheet of up to 64 images, augmented, with their labels or targets, after
the first step. It does not show mixup and cutmix, which the step does.

    FirstBatch(workdir / "first_batch.png", train)
"""

import math
import pathlib

from tfaccel.data.distribute import Loader
from tfaccel.training.logs import Record, Writer, contact_sheet

NUM_SHOWN = 64


class FirstBatch(Writer):
    """Writes one sheet. A resumed run has one already."""

    every_s = math.inf  # only one record

    def __init__(self, path: pathlib.Path, loader: Loader):
        """Takes the path of the PNG, and asks the loader for a copy of its next batch."""
        self.name = path.name
        self._path, self._loader = path, loader
        self._is_first = True
        loader.keep_next(NUM_SHOWN)

    def resume_at(self, *, step: int, epoch: int) -> None:
        """Leaves the sheet as it is."""
        self._is_first = False

    def steps(self, record: Record) -> None:
        """Writes the sheet."""
        if self._is_first and self._loader.kept:
            self._is_first = False
            x, y, *weight = self._loader.kept
            real = weight[0] > 0 if weight else slice(None)
            contact_sheet.write_batch(
                self._path,
                x[real],
                y[real],
                settings=self._loader.data.images,
                class_names=self._loader.class_names,
                target_names=self._loader.data.source.target_names,
            )
