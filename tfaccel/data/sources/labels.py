"""Labels as files have them, numbers or names, to indices of classes.

labels, class_names = numbered(np.array([0, 2]), name_of=str)    # [0, 2], ("0", "1", "2")
labels, class_names = named(["dog", "cat"])                         # [1, 0], ("cat", "dog")
"""

from collections.abc import Callable, Sequence

import numpy as np

from tfaccel.errors import UserError

MOST_CLASSES = 10_000_000  # whose numbers are larger has taken identifiers for classes


def numbered(
    labels: np.ndarray, *, name_of: Callable[[int], str]
) -> tuple[np.ndarray, tuple[str, ...]]:
    """Returns whole numbers as [num_examples] int32, and the class names "0", "1", ...

    Args:
      labels: [num_examples], integers.
      name_of: tells where the label of that index stands, for the error.

    Raises:
      UserError: one is below 0, or too large to be a class.
    """
    for index in (labels.argmin(), labels.argmax()):
        if not 0 <= labels[index] < MOST_CLASSES:
            raise UserError(
                f"{name_of(int(index))}: the label is {labels[index]}; expected the number of a "
                f"class, from 0, below {MOST_CLASSES:,}"
            )
    return labels.astype(np.int32), tuple(str(each) for each in range(int(labels.max()) + 1))


def named(names: Sequence[str]) -> tuple[np.ndarray, tuple[str, ...]]:
    """Returns indices [num_examples] int32 into the class names, which are sorted as text."""
    class_names = tuple(sorted(set(names)))
    index_of = {name: index for index, name in enumerate(class_names)}
    return np.fromiter((index_of[name] for name in names), np.int32, len(names)), class_names


def check_known(found: Sequence[str], class_names: Sequence[str], what: str) -> None:
    """Raises UserError where a class is not among the class names.

    Args:
      found: the classes that there are.
      class_names: those that there may be.
      what: the beginning of the sentence: what has the class.
    """
    unknown = sorted(set(found).difference(class_names))
    if unknown:
        raise UserError(
            f"{what} '{unknown[0]}', which is not among the {len(class_names)} class_names, "
            f"{', '.join(class_names[:3])}{', ...' if len(class_names) > 3 else ''}; move it away, "
            "or add it to the others"
        )
