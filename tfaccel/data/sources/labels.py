"""Turns labels from files, which are numbers or names, into indices of classes.

labels, class_names = numbered(np.array([0, 2]), name_of=str)    # [0, 2], ("0", "1", "2")
labels, class_names = named(["dog", "cat"], name_of=str)         # [1, 0], ("cat", "dog")
labels, class_names = from_text(["0", "2"], name_of=str)         # either, by the text
"""

import itertools
import logging
import math
import re
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import numpy as np

from tfaccel.common.errors import UserError

MOST_CLASSES = 10_000_000  # larger numbers are surely identifiers and not classes

WHOLE_NUMBER = re.compile(r"[-+]?[0-9]{1,18}")  # fits into 64 bits
# Also matches 1e-3, .5 and the European 0,5, and NumPy's and pandas' words for a missing number.
NUMBER = re.compile(
    r"[-+]?([0-9]+([.,][0-9]*)?|[.,][0-9]+)([eE][-+]?[0-9]+)?|[-+]?(nan|inf|infinity)", re.I
)
SEPARATORS = "|;,/ "  # between several labels of an image; class names may contain all but "|"
OWN_DATA = "give run.examples your own (image, target)"
OF_LISTS = "in a list use task='{}' (--config.data.task={}), else " + OWN_DATA

log = logging.getLogger("tfaccel")


def numbered(
    labels: np.ndarray,
    *,
    name_of: Callable[[int], str],
    class_names: Sequence[str] | None = None,
) -> tuple[np.ndarray, tuple[str, ...]]:
    """Returns whole numbers as [num_examples] int32, and the class names.

    Args:
      labels: [num_examples], integers.
      name_of: returns the place of the label with the given index, for the error.
      class_names: the names that labels are indices into; None for "0", "1", ... up to the largest.

    Raises:
      UserError: a label is negative, or too large for a class.
    """
    most = MOST_CLASSES if class_names is None else len(class_names)
    for index in (labels.argmin(), labels.argmax()):
        if not 0 <= labels[index] < most:
            of = "" if class_names is None else ", the number of class_names"
            raise UserError(
                f"{name_of(int(index))}: the label is {labels[index]}; expected the number of a "
                f"class, from 0, below {most:,}{of}"
            )
    if class_names is None:
        class_names = (str(each) for each in range(int(labels.max()) + 1))
    return labels.astype(np.int32), tuple(class_names)


def named(
    names: Sequence[str],
    *,
    name_of: Callable[[int], str],
    class_names: Sequence[str] | None = None,
) -> tuple[np.ndarray, tuple[str, ...]]:
    """Returns indices into the class names, [num_examples] int32, and the class names.

    Args:
      names: [num_examples], names of classes.
      name_of: as in `numbered`.
      class_names: all names in order. The default is the names that occur, sorted as text.

    Raises:
      UserError: a name is not among `class_names`; or without `class_names`, the names are numbers
        with a fraction, or one name looks like several classes.
    """
    distinct = set(names)
    if class_names is None:
        _check_one_class_each(distinct, lambda name: name_of(names.index(name)))
        class_names = sorted(distinct)
    else:
        unknown = min(distinct.difference(class_names), default=None)
        if unknown is not None:
            check_known([unknown], class_names, f"{name_of(names.index(unknown))}: the label is")
    index_of = {name: index for index, name in enumerate(class_names)}
    labels = np.fromiter((index_of[name] for name in names), np.int32, len(names))
    return labels, tuple(class_names)


def from_text(
    labels: Sequence[str],
    *,
    name_of: Callable[[int], str],
    class_names: Sequence[str] | None = None,
) -> tuple[np.ndarray, tuple[str, ...]]:
    """Returns the result of `numbered` if all labels are whole numbers, else that of `named`.

    Args:
      labels: [num_examples].
      name_of: as in `numbered`.
      class_names: as in `named`; labels that are whole numbers, and not among `class_names`, are
        indices into it.

    Raises:
      UserError: as in `numbered` and `named`, or some labels are whole numbers and others are not.
    """
    distinct = dict.fromkeys(labels)
    are_names = class_names is not None and distinct.keys() <= set(class_names)
    if are_names or not WHOLE_NUMBER.fullmatch(labels[0]):
        return named(labels, name_of=name_of, class_names=class_names)
    other = next((each for each in distinct if not WHOLE_NUMBER.fullmatch(each)), None)
    if other is not None:
        if all(map(NUMBER.fullmatch, distinct)):
            _refuse_fractions(other, name_of(labels.index(other)))
        raise UserError(
            f"{name_of(labels.index(other))}: the label is '{other}'; expected a whole number, "
            f"like the label of {name_of(0)}"
        )
    numbers = np.array(labels).astype(np.int64)
    if class_names is not None and not all(map(WHOLE_NUMBER.fullmatch, class_names)):
        log.warning(
            "data: labels are numbers, so they are used as indices into class_names: 0 is %s",
            class_names[0],
        )
    return numbered(numbers, name_of=name_of, class_names=class_names)


def _check_one_class_each(distinct: set[str], where: Callable[[str], str]) -> None:
    """Raises UserError if labels are numbers with a fraction, or one label looks like several."""
    if all(map(NUMBER.fullmatch, distinct)):
        others = sorted(each for each in distinct if not WHOLE_NUMBER.fullmatch(each))
        if others and others[0].lstrip("+-").isdigit():
            raise UserError(
                f"{where(others[0])}: the label is {others[0]}; expected the number of a class, "
                f"from 0, below {MOST_CLASSES:,}"
            )
        if others:
            _refuse_fractions(others[0], where(others[0]))
    several = several_in_one(distinct)
    if several is not None:
        raise UserError(
            f"{where(several.label)}: the label is '{several.label}', which looks like several "
            "classes in one; expected one class for each image. For several, "
            f"{OF_LISTS.format('multilabel', 'multilabel')}; if it is the name of one class, list "
            "it in class_names="
        )


def _refuse_fractions(label: str, where: str) -> None:
    raise UserError(
        f"{where}: the label is '{label}'; expected a whole number or a name. Write the number of "
        "a class without a fraction; for a regression, with numbers as targets, "
        f"{OF_LISTS.format('regression', 'regression')}"
    )


def has_fraction(distinct: set[str]) -> bool:
    """Returns whether all labels are numbers, and one of them is not whole."""
    if not distinct or not all(map(NUMBER.fullmatch, distinct)):
        return False
    return any(float(each) % 1 for each in distinct if "," not in each and _is_finite(each))


def _is_finite(number: str) -> bool:
    return math.isfinite(float(number))


class SeveralInOne(NamedTuple):
    """A label that is several labels.

    Attributes:
      label: the label.
      separator: what is between the names in it; None if it is a list, or a row of numbers.
    """

    label: str
    separator: str | None


def several_in_one(distinct: set[str]) -> SeveralInOne | None:
    """Returns a label that is several labels, or None.

    A list, a row of numbers and "a|b" always count as several. With another separator, a label
    counts as several if all its parts are labels, too. It also counts if all labels consist of
    fewer distinct parts than there are labels, and one part is itself a label.
    """
    for label in sorted(distinct):
        is_list = label[:1] + label[-1:] in ("[]", "()", "{}")
        parts = _parts(label, SEPARATORS)
        if is_list or (len(parts) > 1 and all(map(NUMBER.fullmatch, parts))):
            return SeveralInOne(label, None)
        if len(_parts(label, "|")) > 1:
            return SeveralInOne(label, "|")
    for separator in SEPARATORS[1:]:
        parts = {label: _parts(label, separator) for label in distinct}
        several = sorted(label for label, each in parts.items() if len(each) > 1)
        for label in several:
            if distinct.issuperset(parts[label]):
                return SeveralInOne(label, separator)
        all_parts = set(itertools.chain.from_iterable(parts.values()))
        if several and len(all_parts) < len(distinct) and distinct & all_parts:
            return SeveralInOne(several[0], separator)
    return None


def _parts(label: str, separators: str) -> list[str]:
    parts = re.split(f"[{re.escape(separators)}]", label)
    return [each.strip() for each in parts if each.strip()]


def check_known(found: Iterable[str], class_names: Sequence[str], what: str) -> None:
    """Raises UserError if a class is not among the class names.

    Args:
      found: the classes of the data.
      class_names: the allowed classes.
      what: the beginning of the error, which names the place of the class.
    """
    unknown = sorted(set(found).difference(class_names))
    if unknown:
        raise UserError(
            f"{what} '{unknown[0]}', which is not among the {len(class_names)} class_names, "
            f"{', '.join(class_names[:3])}{', ...' if len(class_names) > 3 else ''}; move it away, "
            "or add it to class_names"
        )
