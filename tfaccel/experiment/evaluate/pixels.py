"""The figures of a segmentation, from the numbers of pixels of each image and class.

    figures = of_masks(scores["pixels"])
    figures.mean_iou, figures.iou          # over all images; [classes]
    iou_of_images(scores["pixels"])        # [images]

Pixels without a class (data.ignore_class) are in none of the numbers. NumPy alone.
"""

import dataclasses

import numpy as np

from tfaccel.experiment.evaluate.classes import mean_of_known

BOTH, LABELLED, FOUND = range(3)  # the last axis of "pixels"


@dataclasses.dataclass(frozen=True)
class OfMasks:
    """The figures over the pixels of all images.

    Attributes:
      labelled: [classes] int64, the pixels of each class in the masks.
      found: [classes] int64, the pixels of each class in the predictions.
      both: [classes] int64, the pixels of each class in both.
    """

    labelled: np.ndarray
    found: np.ndarray
    both: np.ndarray

    @property
    def iou(self) -> np.ndarray:
        """The intersection over union of each class: [classes] float64, NaN without pixels."""
        return _over_union(self.both, self.labelled, self.found)

    @property
    def mean_iou(self) -> float:
        """The mean over the classes that have a pixel in a mask or a prediction."""
        return mean_of_known(self.iou)

    @property
    def accuracy(self) -> float:
        """The part of the pixels whose class is found; NaN without pixels."""
        total = self.labelled.sum()
        return float(self.both.sum() / total) if total else float("nan")


def of_masks(pixels: np.ndarray) -> OfMasks:
    """Returns the figures of all images together.

    Args:
      pixels: [images, classes, 3] integers: pixels in both, in the mask, in the prediction.
    """
    total = pixels.sum(axis=0, dtype=np.int64)
    return OfMasks(total[:, LABELLED], total[:, FOUND], total[:, BOTH])


def iou_of_images(pixels: np.ndarray) -> np.ndarray:
    """Returns each image's mean IoU over the classes it has: [images] float64.

    A class counts if it is in the image's mask or prediction. NaN for an image without pixels.
    """
    counts = pixels.astype(np.int64)
    iou = _over_union(*(counts[..., each] for each in (BOTH, LABELLED, FOUND)))
    there = ~np.isnan(iou)
    number = there.sum(axis=1)
    sums = np.where(there, iou, 0.0).sum(axis=1)
    return np.where(number > 0, sums / np.maximum(number, 1), np.nan)


def _over_union(both: np.ndarray, labelled: np.ndarray, found: np.ndarray) -> np.ndarray:
    union = labelled + found - both
    return np.where(union > 0, both / np.maximum(union, 1), np.nan)
