"""Turns what a list says of each image into several classes an image, or into numbers.

    found = of_columns(rows, ("even", "loop"), task="auto", place=str)     # columns of 0 and 1
    found = of_columns(rows, ("angle",), task="auto", place=str)           # columns of numbers
    found = of_names(["cat|dog", ""], separator=None, place=str)           # names in one field
    found.labels, found.class_names, found.target_names, found.reason

Labels are [num_examples, classes or targets] float32. Several classes are 1 for the classes of an
image and 0 for all others. An image may have no class at all. `separator_of` finds out how a field
separates several names.
"""

import ast
import itertools
import json
import logging
import re
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import numpy as np

from tfaccel.common.errors import UserError
from tfaccel.common.run_log import summary
from tfaccel.common.tables import counted, in_figures
from tfaccel.data.source import ImageSource
from tfaccel.data.sources.labels import (
    NUMBER,
    SEPARATORS,
    check_known,
    has_fraction,
    several_in_one,
)

log = logging.getLogger("tfaccel")

FLAGS = {"0": 0.0, "1": 1.0, "0.0": 0.0, "1.0": 1.0, "false": 0.0, "true": 1.0}
# The part of a column's values that are probably a mistake if all others are 0 or 1. Columns of
# fewer values than LEAST_SURE say too little.
MOST_STRAY, LEAST_SURE = 0.05, 10
MOST_COLUMNS = 100_000  # classes of images with several; larger numbers are surely identifiers
JSON = "json"  # the separator of a field with a list, as JSON or as Python writes it
WORDS = {" ": "blanks"}


class Labels(NamedTuple):
    """Labels in the form of their task (see `data.source.TASKS`), and why it is this task."""

    labels: np.ndarray
    class_names: tuple[str, ...]
    target_names: tuple[str, ...]
    reason: str


def of_columns(
    rows: Sequence[tuple[str, ...]],
    columns: Sequence[str],
    *,
    task: str,
    place: Callable[[int], str],
    pattern: str | None = None,
) -> Labels:
    """Returns the labels that one or several columns say.

    Args:
      rows: [num_examples], the text in each column.
      columns: the names of the columns, which are those of the classes or of the numbers.
      task: "classes" (one column of each row is 1), "multilabel" or "regression"; "auto" takes
        columns of 0 and 1 for several classes, and others for numbers.
      place: returns the place of the row with the given index, for errors.
      pattern: the label_columns that a person gave, if they have a "*", which may have matched a
        column that is no label.

    Raises:
      UserError: a value is missing, or is not of the task.
    """
    texts = list(zip(*rows, strict=True))  # of each column
    are_flags, asks = all(map(_has_flags, texts)), task != "auto"
    reason = f"of task={task!r}"
    if task == "auto":
        task = "multilabel" if are_flags else "regression"
        held = "only 0 and 1" if are_flags else "numbers"
        reason = f"{_listed('column', columns)} {'have' if columns[1:] else 'has'} {held}"
        if not are_flags:
            _warn_of_strays(rows, columns, texts, place)
    if task == "regression":
        expected = "a finite number, such as 0.5"
        if not asks and all(x.lower() in FLAGS for values in texts for x in values if x):
            expected = "0 or 1, as in the other lines"
        labels = _numbers(rows, columns, texts, expected, place, pattern)
        return Labels(labels, (), tuple(columns), reason)
    if not are_flags:
        _refuse(rows, columns, lambda value: value.lower() in FLAGS, "0 or 1", place, pattern)
    value_of = {each: FLAGS[each.lower()] for values in texts for each in set(values)}
    flags = [np.fromiter(map(value_of.get, each), np.float32, len(each)) for each in texts]
    labels = np.stack(flags, axis=1)
    if task == "multilabel":
        return Labels(labels, tuple(columns), (), reason)
    wrong = np.flatnonzero(labels.sum(axis=1) != 1)
    if wrong.size:
        raise UserError(
            f"{place(int(wrong[0]))}: {int(labels[wrong[0]].sum())} of the "
            f"{_listed('column', columns)} are 1; expected exactly one with task='classes': mend "
            "the line, or use task='multilabel'"
        )
    return Labels(labels.argmax(axis=1).astype(np.int32), tuple(columns), (), reason)


def of_names(
    fields: Sequence[str],
    *,
    separator: str | None,
    place: Callable[[int], str],
    class_names: Sequence[str] | None = None,
) -> Labels:
    """Returns several classes an image, from fields with the names of its classes.

    Args:
      fields: [num_examples], each with any number of names. An empty field has none.
      separator: what is between two names, or JSON for a list; None finds it out.
      place: as in `of_columns`.
      class_names: all names in order. The default is the names that occur, sorted as text.

    Raises:
      UserError: a field is not a list, although the separator is JSON, or a name is not among
        `class_names`.
    """
    distinct = list(dict.fromkeys(fields))
    reason = "of label_separator"
    if separator is None:
        separator = separator_of(distinct, class_names)
        reason = f"the names of an image are separated by {in_words(separator)}"
        if separator == JSON:
            reason = "the labels are lists of names"
        elif separator is None:
            reason = "of task='multilabel', and each image has one name at most"
    where = lambda field: place(fields.index(field))  # noqa: E731
    names_of = {each: names_in(each, separator, where) for each in distinct}
    found = {name for names in names_of.values() for name in names}
    if class_names is None:
        class_names = sorted(found)
    for field in distinct:
        check_known(names_of[field], class_names, f"{where(field)}: the label is")
    if not class_names:
        raise UserError(f"{place(0)}: no image has a class; expected names of classes")
    index_of = {name: index for index, name in enumerate(class_names)}
    labels = np.zeros((len(fields), len(class_names)), np.float32)
    places = {each: [index_of[name] for name in names] for each, names in names_of.items()}
    for row, field in zip(labels, fields, strict=True):
        row[places[field]] = 1
    return Labels(labels, tuple(class_names), (), reason)


def of_lists(
    lists: Sequence[str],
    *,
    task: str,
    name: str,
    place: Callable[[int], str],
    class_names: Sequence[str] | None = None,
    first_label: int = 0,
) -> Labels:
    """Returns the labels that shards have, as lists of JSON.

    Args:
      lists: [num_examples]. For "regression", numbers, equally many for each example. For
        "multilabel", the names of an image's classes; their numbers, which are whole; or 0.0 or 1.0
        for each class.
      task: "multilabel" or "regression".
      name: what a single number is called. Several are called `name 0`, `name 1`, ...
      place: as in `of_columns`.
      class_names: as in `of_names`; whole numbers minus `first_label` are indices into it.
      first_label: the number of the first class.

    Raises:
      UserError: a value is not of the task, or a class is not known.
    """
    values_of = {each: json.loads(each) for each in dict.fromkeys(lists)}
    kinds = {type(value) for values in values_of.values() for value in values}
    if task == "multilabel" and kinds <= {str}:
        return of_names(lists, separator=JSON, place=place, class_names=class_names)
    if task == "multilabel" and kinds == {int}:
        return _of_indices(lists, values_of, place, class_names, first_label)
    count = len(values_of[lists[0]])
    other = next((each for each in lists if len(values_of[each]) != count), None)
    if other is not None or not count:
        index = 0 if other is None else lists.index(other)
        raise UserError(
            f"{place(index)}: {counted(len(values_of[lists[index]]), 'label')}; expected as many "
            f"for each image, and {count or 1:,} as for the first one"
        )
    columns = (name,) if count == 1 else tuple(f"{name} {index}" for index in range(count))
    if task == "multilabel":
        columns = tuple(class_names or map(str, range(count)))
        if len(columns) != count:
            raise UserError(
                f"{place(0)}: {counted(count, 'label')} of 0 and 1, but there are "
                f"{len(columns)} class_names; expected one for each label"
            )
    rows_of = {each: tuple(map(str, values)) for each, values in values_of.items()}
    return of_columns([rows_of[each] for each in lists], columns, task=task, place=place)


def _of_indices(lists, values_of, place, class_names, first_label: int) -> Labels:
    """Returns several classes an image from the numbers of its classes."""
    most = MOST_COLUMNS if class_names is None else len(class_names)
    for each, values in values_of.items():
        wrong = next((value for value in values if not 0 <= value - first_label < most), None)
        if wrong is not None:
            raise UserError(
                f"{place(lists.index(each))}: the label is {wrong}; expected the number of a "
                f"class, from {first_label}, below {first_label + most:,}"
            )
    if class_names is None:
        largest = max(value for values in values_of.values() for value in values)
        class_names = map(str, range(largest - first_label + 1))
    names = tuple(class_names)
    labels = np.zeros((len(lists), len(names)), np.float32)
    for row, each in zip(labels, lists, strict=True):
        row[[value - first_label for value in values_of[each]]] = 1
    return Labels(labels, names, (), "of task='multilabel'")


def source_of(found, *, task: str, class_names: Sequence[str] | None, **how) -> ImageSource:
    """Returns the source of the examples in shards, and logs its labels.

    Args:
      found: `index.Found`, with labels as lists of JSON.
      task: "multilabel" or "regression".
      class_names: as in `of_lists`.
      **how: further arguments of `of_lists`.

    Raises:
      UserError: as for `of_lists`.
    """
    lists = np.char.decode(found.labels, "utf-8").tolist()
    how |= {"task": task, "class_names": class_names, "place": found.images.name}
    labels = of_lists(lists, **how)
    names = {"class_names": labels.class_names, "target_names": labels.target_names}
    source = ImageSource(found.images, labels.labels, **names)
    tell(source, labels.reason, asks=True)
    return source


def separator_of(fields: Iterable[str], class_names: Sequence[str] | None = None) -> str | None:
    """Returns what separates the names in fields that may hold several; None if nothing does.

    Lists come first, then the first of SEPARATORS that occurs. With `class_names`, a field
    that is one of them is one name, and a separator must leave only known names.
    """
    known = set(class_names or ())
    fields = [each for each in fields if each and each not in known]
    if fields and all(each.startswith("[") for each in fields):
        return JSON
    for separator in SEPARATORS:
        several = [each for each in fields if separator in each]
        if several and (not known or all(known.issuperset(_split(x, separator)) for x in several)):
            return separator
    return None


def in_words(separator: str | None) -> str:
    """Returns a separator as a message has it."""
    return WORDS.get(separator, f"'{separator}'")


def names_in(field: str, separator: str | None, place: Callable[[str], str]) -> list[str]:
    """Returns the names in a field.

    Raises:
      UserError: the field is not a list of names, although the separator is JSON.
    """
    if separator != JSON:
        return [field] if separator is None and field else _split(field, separator or " ")
    if not field:
        return []
    names = _list_in(field)
    if names is None or not all(
        isinstance(each, str | int) and not isinstance(each, bool) for each in names
    ):
        raise UserError(
            f"{place(field)}: the label is {field!r:.200}; expected a list of names, such as "
            '["cat", "dog"]'
        )
    return [str(each).strip() for each in names]


def decided(labels: Sequence[str], class_names: Sequence[str] | None) -> tuple[str, str]:
    """Returns the task of labels in one field, and why it is this one.

    Args:
      labels: the text of each image's field.
      class_names: the names of the classes, if they are known.
    """
    distinct = set(labels)
    lists = sorted(each for each in distinct if each.startswith("["))
    if lists and all(map(_has_names, lists)) and distinct <= {*lists, ""}:
        return "multilabel", f"{lists[0]:.80} is a list of names"
    if class_names is None and has_fraction(distinct - {""}):
        return "regression", "the labels are numbers, some with a fraction"
    some = several_in_one(distinct - {""}) if class_names is None else None
    if some is not None and some.separator is not None:
        return "multilabel", f"'{some.label}' has several classes"
    if class_names is not None and not distinct <= {*class_names, ""}:
        separator = separator_of(distinct, class_names)
        if separator not in (None, JSON):
            return "multilabel", "a label has several of the class_names"
    return "classes", "each image has one label"


def _has_names(field: str) -> bool:
    """Returns whether a field is a list without numbers, which might be targets."""
    names = _list_in(field)
    return names is not None and all(isinstance(each, str) for each in names)


def _list_in(field: str) -> list | None:
    """Returns the list that a field is, or None.

    pandas and Python's csv write a list as Python does: ['cat', 'dog'].
    """
    for read in (json.loads, ast.literal_eval):  # neither runs code
        try:
            found = read(field)
        except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError):
            continue
        if isinstance(found, list):
            return found
    return None


def _split(field: str, separator: str) -> list[str]:
    return [each.strip() for each in field.split(separator) if each.strip()]


def _has_flags(texts: Sequence[str]) -> bool:
    """Returns whether a column has only values of FLAGS."""
    # Of numbers, nearly all differ, and a set of them is large.
    return all(each.lower() in FLAGS for part in (texts[:1000], texts) for each in set(part))


def _warn_of_strays(rows, columns, texts, place) -> None:
    """Warns if nearly all values are 0 or 1, so that the others may be mistakes."""
    most = max(1, int(MOST_STRAY * len(rows)))
    strays = [_strays(values, most) for values in texts]
    if len(rows) < LEAST_SURE or not any(strays) or max(strays) > most:
        return
    index, name, value = next(
        (index, name, value)
        for index, row in enumerate(rows)
        for name, value in zip(columns, row, strict=True)
        if _is_stray(value)
    )
    log.warning(
        "data: %s of %s %s neither 0 nor 1 (first %s: the column %s %s), so all are taken as "
        "numbers, for a regression. If they are classes, mend the line and set data.task="
        "multilabel, which refuses such a value. If they are numbers, set data.task=regression, "
        "which silences this warning",
        f"{sum(strays):,}",
        counted(len(rows) * len(columns), "value"),
        "is" if sum(strays) == 1 else "are",
        place(index),
        name,
        f"is {value!r:.200}",
    )


def _strays(values: Sequence[str], most: int) -> int:
    """Returns how many values are neither 0 nor 1; counts no further than `most` + 1."""
    return sum(1 for _ in itertools.islice(filter(_is_stray, values), most + 1))


def _is_stray(value: str) -> bool:
    return bool(value) and value.lower() not in FLAGS  # an empty value is refused


def _numbers(rows, columns, texts, expected: str, place, pattern) -> np.ndarray:
    """Returns the numbers in the columns, [num_examples, columns] float32."""
    try:
        # Python's float also takes 1_000, which no list means.
        found = [np.fromiter(map(_number, each), np.float64, len(each)) for each in texts]
        with np.errstate(over="ignore"):
            labels = np.stack(found, axis=1).astype(np.float32)
    except ValueError:
        labels = None
    if labels is None or not np.isfinite(labels).all():
        _refuse(rows, columns, _is_finite, expected, place, pattern)
    return labels


def _number(text: str) -> float:
    if "_" in text:
        raise ValueError
    return float(text)


def _is_finite(text: str) -> bool:
    try:
        with np.errstate(over="ignore"):
            return bool(np.isfinite(np.float32(_number(text))))
    except ValueError:
        return False


def _refuse(rows, columns, fits: Callable[[str], bool], expected: str, place, pattern) -> None:
    """Raises the error on the first value that does not fit."""
    for index, row in enumerate(rows):
        for name, value in zip(columns, row, strict=True):
            if not fits(value):
                said = f"is {value!r:.200}" if value else "is empty"
                fix = "mend the line, or remove it"
                if pattern is not None:
                    fix += f"; if that column is no label, use label_columns={pattern},-{name}"
                raise UserError(
                    f"{place(index)}: the column {name} {said}; expected {expected}: {fix}"
                )


def _listed(what: str, names: Sequence[str]) -> str:
    shown = ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")
    return f"the {what} {shown}" if len(names) == 1 else f"{counted(len(names), what)} {shown}"


def trailing_numbers(line: str, is_path: Callable[[str], bool]) -> int:
    """Returns how many numbers follow the path in a line of `path number number ...`, at least 1.

    Args:
      line: the line.
      is_path: whether a text can be the end of a path, because it has the suffix of an image.
    """
    words = line.split()
    count = 0
    while count < len(words) - 1 and NUMBER.fullmatch(words[-1 - count]):
        count += 1
    return count if count > 1 and is_path(words[-1 - count]) else 1


def tell(source: ImageSource, reason: str, *, asks: bool) -> None:
    """Logs the task and its reason, and always shows a choice of another task than the usual one.

    Args:
      source: the examples.
      reason: why it is this task.
      asks: whether the caller set the task, as for a test list.
    """
    said = log.info if asks or source.task == "classes" else summary
    said("data: task=%s, because %s%s", source.task, reason, _described(source))


def _described(source: ImageSource) -> str:
    """Returns what a person should know of several labels, with a semicolon before it."""
    if source.task == "classes":
        return ""
    if source.task == "multilabel":
        counts = source.labels.sum(axis=1)
        return (
            f"; {len(source.class_names)} possible, {in_figures(float(counts.mean()))} an image on "
            f"average, {int((counts == 0).sum()):,} of {counted(len(source), 'image')} without any"
            + one_hot_hint(source.labels)
        )
    # A label is a number of its own unit, and the loss is large if the unit is small.
    told = [
        f"{name} {in_figures(float(each.min()))} to {in_figures(float(each.max()))}, standard "
        f"deviation {in_figures(float(each.std(dtype=np.float64)))}"
        for name, each in zip(source.target_names, source.labels.T, strict=True)
    ]
    more = f" and {len(told) - 5} more" if len(told) > 5 else ""
    return "; " + "; ".join(told[:5]) + more


def one_hot_hint(labels: np.ndarray) -> str:
    """Returns what to say of several classes if each image has exactly one; else ""."""
    if labels.shape[1] > 1 and (labels.sum(axis=1) == 1).all():
        return "; each image has exactly one class, so consider task='classes'"
    return ""


def matching(patterns: Sequence[str], columns: Sequence[str]) -> list[int] | str:
    """Returns the places of the columns that patterns name, in any case; or a pattern of no column.

    In a pattern, "*" stands for any letters. A pattern after "-" takes columns away, unless a
    column's own name begins so.
    """
    places = []
    for pattern in patterns:
        found, takes_away = _found(pattern, columns), False
        if not found and pattern.startswith("-"):
            found, takes_away = _found(pattern[1:], columns), True
        if not found:
            return pattern
        if takes_away:
            places = [index for index in places if index not in found]
        else:
            places += [index for index in found if index not in places]
    return places


def _found(pattern: str, columns: Sequence[str]) -> list[int]:
    finds = re.compile(re.escape(pattern.strip()).replace(r"\*", ".*"), re.I)
    return [index for index, each in enumerate(columns) if finds.fullmatch(each)]
