"""The figures of any number of classes an image, from labels and probabilities of each class.

They are those of scikit-learn's `average_precision_score`, `roc_auc_score`,
`precision_recall_fscore_support`, `f1_score` and `accuracy_score` of a matrix of labels. What has
no value there is NaN here, and in no mean (scikit-learn's `zero_division=nan`). NumPy alone.

    found = of_several(labels, probabilities, is_finite)
    found.average_precision               # [classes] float64
    found.mean_average_precision
"""

import dataclasses

import numpy as np

from tfaccel.experiment.evaluate.classes import ByClass, mean_of_known

THRESHOLD = 0.5  # the least probability of a class that an image has, as in an export's answers


@dataclasses.dataclass(frozen=True)
class OfSeveral:
    """The figures of each class, [classes] each, and over all images.

    Images whose outputs are infinite or NaN count as images for which no class is said. They are
    left out of the curves: of the average precision, the AUC and the best threshold.

    Attributes:
      table: images, predictions and right predictions at `THRESHOLD`.
      average_precision: float64, the sum over all thresholds of the precision, times the growth of
        the recall; NaN for a class without an image.
      auc: float64, the area under the ROC curve: how often an image of the class has a higher
        probability than another image, where equal ones count half; NaN unless there are both.
      best_threshold: float64, the least probability for which F1 is highest; of several such
        thresholds the largest; NaN for a class without an image.
      best_f1: float64, F1 at that threshold.
      micro_f1: F1 of all answers, of any class; NaN if no class is there or said.
      subset_accuracy: the part of the images with all classes right.
      binary_accuracy: the part of all answers, one for each class of each image, that is right.
    """

    table: ByClass
    average_precision: np.ndarray
    auc: np.ndarray
    best_threshold: np.ndarray
    best_f1: np.ndarray
    micro_f1: float
    subset_accuracy: float
    binary_accuracy: float

    @property
    def mean_average_precision(self) -> float:
        """The mean over the classes that have an image; NaN if none has."""
        return mean_of_known(self.average_precision)

    @property
    def mean_auc(self) -> float:
        """The mean over the classes that have an AUC; NaN if none has."""
        return mean_of_known(self.auc)

    @property
    def macro_f1(self) -> float:
        """The mean of F1 over the classes that are there or said; NaN if none is."""
        return self.table.macro_f1


def present(probabilities: np.ndarray, is_finite: np.ndarray) -> np.ndarray:
    """Returns which classes are said of each image: [n, classes] bool.

    Args:
      probabilities: [n, classes] floats.
      is_finite: [n] bool; no class is said of the other images.
    """
    return (probabilities >= THRESHOLD) & is_finite[:, None]


def of_several(labels: np.ndarray, probabilities: np.ndarray, is_finite: np.ndarray) -> OfSeveral:
    """Returns the figures.

    Args:
      labels: [n, classes] bool, n at least 1.
      probabilities: [n, classes] float32.
      is_finite: [n] bool, whether all outputs for an image are finite.
    """
    said = present(probabilities, is_finite)
    table = ByClass(labels.sum(axis=0), said.sum(axis=0), (labels & said).sum(axis=0))
    known = np.flatnonzero(is_finite)
    # A class at a time, because a matrix may have many columns.
    columns = range(labels.shape[1])
    curves = [_of_one(labels[known, each], probabilities[known, each]) for each in columns]
    right = (labels == said) & is_finite[:, None]
    both = int((table.support + table.predicted).sum())
    return OfSeveral(
        table,
        *np.array(curves, np.float64).T,
        micro_f1=2 * int(table.right.sum()) / both if both else float("nan"),
        subset_accuracy=float(right.all(axis=1).mean()),
        binary_accuracy=float(right.mean()),
    )


def _of_one(labels: np.ndarray, chances: np.ndarray) -> tuple[float, float, float, float]:
    """Returns average precision, AUC, best threshold and best F1 of one class, [n] each."""
    num = int(labels.sum())
    if not num:
        return (float("nan"),) * 4
    order = np.argsort(-chances, kind="stable")
    chances, hits = chances[order], np.cumsum(labels[order])
    # A threshold takes all images of the same probability, so only the last of them counts.
    last = np.append(np.flatnonzero(np.diff(chances)), len(chances) - 1)
    thresholds, hits, taken = chances[last].astype(np.float64), hits[last], last + 1
    precision = float((np.diff(hits, prepend=0) / num * (hits / taken)).sum())
    others = taken - hits
    auc = float("nan")
    if others[-1]:
        before = np.append(0, hits[:-1])
        area = (np.diff(others, prepend=0) * (hits + before)).sum() / 2
        auc = float(area / num / others[-1])
    f1 = 2 * hits / (num + taken)
    best = int(f1.argmax())
    return precision, auc, float(thresholds[best]), float(f1[best])
