"""The figures of a classification, from the true and the predicted class of each image.

They are those of scikit-learn's `precision_recall_fscore_support`, `f1_score(average="macro")`,
`accuracy_score`, `log_loss`, `top_k_accuracy_score` and `confusion_matrix`, without its warnings.
Needs no TensorFlow.

    table = by_class(labels, predicted, num_classes=10)
    table.f1                              # [10] float64
    pairs = most_confused(labels, predicted, num_classes=10)
"""

import dataclasses

import numpy as np

NO_CLASS = -1  # the prediction for an image whose outputs are infinite or NaN
TOP = 5


@dataclasses.dataclass(frozen=True)
class ByClass:
    """What was found of each class, [classes] int64 each.

    Attributes:
      support: the images of the class.
      predicted: the images that the model takes for the class.
      right: the images of both.
    """

    support: np.ndarray
    predicted: np.ndarray
    right: np.ndarray

    @property
    def precision(self) -> np.ndarray:
        """The right part of the predictions: [classes] float64, NaN where there are none."""
        return _ratio(self.right, self.predicted)

    @property
    def recall(self) -> np.ndarray:
        """The part of the images that is found: [classes] float64, NaN where there are none."""
        return _ratio(self.right, self.support)

    @property
    def f1(self) -> np.ndarray:
        """2 right / (support + predicted): [classes] float64, NaN where both are 0.

        It is the harmonic mean of precision and recall where both exist, else 0.
        """
        return _ratio(2 * self.right, self.support + self.predicted)

    @property
    def macro_f1(self) -> float:
        """The mean of F1 over the classes that have an image or a prediction; NaN if none has."""
        return mean_of_known(self.f1)

    @property
    def balanced_accuracy(self) -> float:
        """The mean of recall over the classes that have an image; NaN if none has."""
        return mean_of_known(self.recall)


def by_class(labels: np.ndarray, predicted: np.ndarray, *, num_classes: int) -> ByClass:
    """Returns the numbers of images of each class.

    Args:
      labels: [n] integers, the true classes.
      predicted: [n] integers, the likeliest classes, or NO_CLASS, which is right for no image.
      num_classes: the number of classes.
    """
    counted = {
        "support": labels,
        "predicted": predicted[predicted != NO_CLASS],
        "right": labels[labels == predicted],
    }
    return ByClass(
        **{name: np.bincount(each, minlength=num_classes) for name, each in counted.items()}
    )


def mean_of_known(values: np.ndarray) -> float:
    """Returns the mean of the values that are not NaN; NaN if all are."""
    known = values[~np.isnan(values)]
    return float(known.mean()) if len(known) else float("nan")


@dataclasses.dataclass(frozen=True)
class Overall:
    """The figures over all images.

    Attributes:
      images: the number of images.
      accuracy: the part whose likeliest class is the true one.
      top5: the part whose true class is one of the five likeliest; None for at most five classes.
      macro_f1: see `ByClass`.
      balanced_accuracy: see `ByClass`.
      log_loss: the mean of the negative natural logarithm of the true class's probability, over the
        images with finite outputs; NaN without such images.
      not_finite: the images whose outputs are infinite or NaN. They count as wrong.
    """

    images: int
    accuracy: float
    top5: float | None
    macro_f1: float
    balanced_accuracy: float
    log_loss: float
    not_finite: int


def overall(
    labels: np.ndarray,
    named: np.ndarray,
    losses: np.ndarray,
    is_finite: np.ndarray,
    *,
    num_classes: int,
) -> Overall:
    """Returns the figures over all images.

    Args:
      labels: [n] integers, n at least 1.
      named: [n, k] integers, the k likeliest classes, the likeliest first.
      losses: [n] float32, in nats.
      is_finite: [n] bool, whether an image's outputs are finite.
      num_classes: the number of classes.
    """
    hits = (named == labels[:, None]) & is_finite[:, None]
    table = by_class(labels, np.where(is_finite, named[:, 0], NO_CLASS), num_classes=num_classes)
    known = losses[is_finite].astype(np.float64)
    return Overall(
        images=len(labels),
        accuracy=float(hits[:, 0].mean()),
        top5=float(hits[:, :TOP].any(axis=1).mean()) if num_classes > TOP else None,
        macro_f1=table.macro_f1,
        balanced_accuracy=table.balanced_accuracy,
        log_loss=float(known.mean()) if len(known) else float("nan"),
        not_finite=int((~is_finite).sum()),
    )


def confusion(labels: np.ndarray, predicted: np.ndarray, *, num_classes: int) -> np.ndarray:
    """Returns how many images of each class are taken for each class: [true, predicted] int64.

    Images without a predicted class are left out.
    """
    known = predicted != NO_CLASS
    cells = labels[known].astype(np.int64) * num_classes + predicted[known]
    return np.bincount(cells, minlength=num_classes**2).reshape(num_classes, num_classes)


def most_confused(
    labels: np.ndarray, predicted: np.ndarray, *, num_classes: int
) -> list[tuple[int, int, int]]:
    """Returns (true class, predicted class, images) for all wrong pairs, the most images first.

    It needs no matrix, so there may be many classes.
    """
    wrong = (labels != predicted) & (predicted != NO_CLASS)
    cells = labels[wrong].astype(np.int64) * num_classes + predicted[wrong]
    found, counts = np.unique(cells, return_counts=True)
    order = np.argsort(-counts, kind="stable")
    return [(*divmod(int(found[each]), num_classes), int(counts[each])) for each in order]


def _ratio(part: np.ndarray, whole: np.ndarray) -> np.ndarray:
    return np.where(whole > 0, part / np.maximum(whole, 1), np.nan)
