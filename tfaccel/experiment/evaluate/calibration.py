"""Whether a model's probabilities are as often right as they say.

The expected calibration error (ECE) is that of Guo et al., On Calibration of Modern Neural
Networks, 2017, arXiv:1706.04599, equations 2 and 3: images are grouped by the probability of their
predicted class into bins of equal width, (0, 1/15], (1/15, 2/15] and so on. ECE is the mean over
all images of the distance between a bin's accuracy and its mean probability. NumPy alone.

If an image has any number of classes, the bins have one probability for each class of each image,
and an answer is right if the image has the class. So the bars say how often a class is there.

    calibration = calibrate(probabilities, is_right)
    calibration.ece, calibration.accuracy
"""

import dataclasses

import numpy as np

NUM_BINS = 15  # as in the paper's tables


@dataclasses.dataclass(frozen=True)
class Calibration:
    """The bins, from probability 0 to 1.

    Attributes:
      edges: [bins + 1] float64.
      counts: [bins] int64, the images in each bin.
      confidence: [bins] float64, the mean probability of the predicted class; NaN without images.
      accuracy: [bins] float64, the part of the images that is right; NaN without images.
    """

    edges: np.ndarray
    counts: np.ndarray
    confidence: np.ndarray
    accuracy: np.ndarray

    @property
    def ece(self) -> float:
        """The expected calibration error, 0 to 1; NaN without images."""
        total = self.counts.sum()
        if not total:
            return float("nan")
        apart = np.nan_to_num(np.abs(self.accuracy - self.confidence))
        return float((self.counts * apart).sum() / total)

    @property
    def largest(self) -> float:
        """The largest distance in a bin (MCE, equation 5), 0 to 1; NaN without images."""
        apart = np.abs(self.accuracy - self.confidence)
        return float(np.nanmax(apart)) if self.counts.any() else float("nan")

    def rows(self) -> list[tuple]:
        """Returns a tuple for each bin: both edges, count, mean probability and accuracy."""
        columns = self.edges[:-1], self.edges[1:], self.counts, self.confidence, self.accuracy
        return list(zip(*(each.tolist() for each in columns), strict=True))


def calibrate(
    probabilities: np.ndarray, is_right: np.ndarray, *, num_bins: int = NUM_BINS
) -> Calibration:
    """Returns the calibration.

    Args:
      probabilities: [n] floats in 0..1, of the predicted classes; without NaN.
      is_right: [n] bool.
      num_bins: the number of bins.
    """
    chances = probabilities.astype(np.float64)
    edges = np.linspace(0, 1, num_bins + 1)
    # Bin m has the probabilities in (edges[m], edges[m + 1]]; rounding may give a little above 1.
    bins = np.clip(np.searchsorted(edges, chances, side="left") - 1, 0, num_bins - 1)
    counts = np.bincount(bins, minlength=num_bins)
    sums = np.bincount(bins, chances, minlength=num_bins)
    right = np.bincount(bins, is_right.astype(np.float64), minlength=num_bins)
    there = np.maximum(counts, 1)
    means = (np.where(counts > 0, each / there, np.nan) for each in (sums, right))
    return Calibration(edges, counts, *means)
