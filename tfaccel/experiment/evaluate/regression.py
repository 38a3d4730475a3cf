"""The figures of numbers that are predicted for each image.

They are those of scikit-learn's `mean_absolute_error`, `root_mean_squared_error` and `r2_score` of
each column. What has no value is NaN, and in no mean. NumPy alone.

    found = of_numbers(true, predicted, is_finite)
    found.mae, found.r2                   # [targets] float64
"""

import dataclasses

import numpy as np

from tfaccel.experiment.evaluate.classes import mean_of_known


@dataclasses.dataclass(frozen=True)
class OfNumbers:
    """The figures of each target, [targets] float64.

    The errors are those of images with finite outputs, and NaN if there are none.

    Attributes:
      mae: the mean absolute error.
      rmse: the root of the mean squared error.
      r2: the coefficient of determination: 1 for perfect answers, 0 for errors like those of the
        mean; NaN if the true number is the same in all images, as it is in one image.
      mean: the mean of the true number, over all images.
      std: its standard deviation, sqrt(mean((true - mean)^2)), over all images.
    """

    mae: np.ndarray
    rmse: np.ndarray
    r2: np.ndarray
    mean: np.ndarray
    std: np.ndarray

    @property
    def mean_absolute_error(self) -> float:
        """The mean over the targets, as in training."""
        return mean_of_known(self.mae)

    @property
    def mean_r2(self) -> float:
        """The mean over the targets that have an R squared; NaN if none has."""
        return mean_of_known(self.r2)


def of_numbers(true: np.ndarray, predicted: np.ndarray, is_finite: np.ndarray) -> OfNumbers:
    """Returns the figures.

    Args:
      true: [n, targets] floats, n at least 1.
      predicted: [n, targets] floats.
      is_finite: [n] bool, whether all outputs for an image are finite.
    """
    true = true.astype(np.float64)
    known, mean, std = true[is_finite], true.mean(axis=0), _std(true)
    if not len(known):
        none = np.full(true.shape[1], np.nan)
        return OfNumbers(none, none, none, mean, std)
    errors = predicted[is_finite].astype(np.float64) - known
    mse, variances = (errors**2).mean(axis=0), _std(known) ** 2
    r2 = 1 - mse / np.where(variances > 0, variances, np.nan)
    return OfNumbers(np.abs(errors).mean(axis=0), np.sqrt(mse), r2, mean, std)


def relative_errors(true: np.ndarray, predicted: np.ndarray, std: np.ndarray) -> np.ndarray:
    """Returns absolute errors in standard deviations of their targets: [n, targets] float64.

    The error in a target with no spread stays as it is, as in scikit-learn's `StandardScaler`.

    Args:
      true: [n, targets] floats.
      predicted: [n, targets] floats.
      std: [targets] floats.
    """
    errors = np.abs(predicted.astype(np.float64) - true.astype(np.float64))
    return errors / np.where(std > 0, std, 1.0)


def _std(values: np.ndarray) -> np.ndarray:
    """Returns the standard deviation of each column; exactly 0 if all values are equal."""
    return np.where(np.ptp(values, axis=0) > 0, values.std(axis=0), 0.0)
