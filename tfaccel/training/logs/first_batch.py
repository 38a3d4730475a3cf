"""first_batch.png: the first images that a run trains on, as the step gets them.

Takes the loader; gives a sheet of up to 64 of them, augmented, with their labels or targets, once
the first step is done. (Mixup and cutmix, which are parts of the step, come after.)

    FirstBatch(workdir / "first_batch.png", train)
"""

import math
import pathlib

from tfaccel.data.distribute import Loader
from tfaccel.training.logs import Record, Writer, contact_sheet

NUM_SHOWN = 64


class FirstBatch(Writer):
    """Writes one sheet. A run that is resumed has its own already."""

    every_s = math.inf  # the first record is its last

    def __init__(self, path: pathlib.Path, loader: Loader):
        """Asks the loader for a copy of the batch that it gives next.

        Args:
          path: of the PNG.
          loader: of images, that `fit` trains on.
        """
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
            )
