"""Reads a file that lists images and their labels: a CSV file, or a list as for DALI and Caffe.

    path,label                 n01440764/10026.JPEG 0          {"path": "1.jpg", "label": "cat"}
    cats/1.jpg,cat             n01440764/10027.JPEG 0          {"path": "2.jpg", "label": "dog"}
    "dogs/a, b.jpg",dog        n01443537/10007.JPEG 1

The source has the images in the order of the file. An image has one class, several classes or
numbers:

    source = image_list("train.csv", root="/data/images")
    source = image_list("train.csv", label_columns=["even", "loop"])       # 0 or 1 in each
    source = image_list("train.csv", label_column="tags")                  # "cat|dog"
    source = image_list("train.csv", label_columns=["x", "y"], task="regression")
"""

import array
import itertools
import json
import logging
import os
import pathlib
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from tfaccel.common.checks import check_choice
from tfaccel.common.errors import UserError
from tfaccel.common.run_log import summary
from tfaccel.common.tables import counted
from tfaccel.data.file_names import AT_A_TIME, FileNames, GrowingFileNames
from tfaccel.data.source import TASKS, Blobs, ImageSource, Lines
from tfaccel.data.sources import several_labels, stored
from tfaccel.data.sources.labels import from_text, several_in_one
from tfaccel.data.sources.list_rows import Asked, Row, Rows, read_rows
from tfaccel.data.sources.paths import absolute
from tfaccel.data.sources.pillow import IMAGE_SUFFIXES
from tfaccel.data.sources.several_labels import Labels
from tfaccel.data.stores.files import DEFAULT_CACHE_GIB
from tfaccel.data.stores.urls import is_url, parent, scheme

log = logging.getLogger("tfaccel")


def image_list(
    file: str | os.PathLike,
    *,
    root: str | os.PathLike | None = None,
    class_names: Sequence[str] | None = None,
    group_column: str | None = None,
    path_column: str | None = None,
    label_column: str | None = None,
    label_columns: Sequence[str] | None = None,
    label_separator: str | None = None,
    task: str = "auto",
    cache_gib: float = DEFAULT_CACHE_GIB,
) -> ImageSource:
    """Lists the images that a file names, in its order.

    Only the first image is looked for here, because on a network drive 1.3 million files take
    minutes. `tfaccel audit`, and the loader that reads an image, report other missing files.

    The source has whole files. The images may have any size and 1 or 3 channels. The labels are:

      one class: [num_examples] int32. Whole numbers are kept, with the class names "0", "1", ... up
        to the largest. Other labels are class names, sorted as text.
      several classes: [num_examples, classes] float32, 1 for each class of the image, else 0. The
        classes are columns of 0 and 1, or names in one field, sorted as text. An image may have
        none. With task="multilabel", an image may have several lines, whose names all count.
      numbers: [num_examples, targets] float32, for a regression.

    Args:
      file: a text file in UTF-8, or its URL in a store. It has one of three forms. With a header,
        its columns are separated by commas, semicolons or tabs. It has a path and a label in
        columns of PATH_COLUMNS and LABEL_COLUMNS; other columns are ignored. In lines of JSON,
        each line is an object, whose keys are the columns. Without a header, each line has a path,
        blanks, and one or several numbers. Paths may lack the suffix, such as .jpg, if all have the
        same one. Paths may be URLs, all of one kind of store.
      root: the folder in which relative paths start, or its URL. The default is the file's own
        folder.
      class_names: all classes in order, for a test set that lacks some: `train.class_names`.
        Labels that are whole numbers are indices into it. The default is the classes of the file.
      group_column: a column of the header, in any case, whose equal values are images that a split
        keeps together, such as those of a patient. None: the source has no groups.
      path_column: the column of the header that has the paths; None for one of PATH_COLUMNS.
      label_column: the column that has the labels; None for one of LABEL_COLUMNS.
      label_columns: several columns of 0 and 1, or of numbers. "*" in a name stands for any
        letters, and "*" alone for all columns but those of the path and the group. "-" before a
        name leaves columns out: ["*", "-date"]. None: one column.
      label_separator: what is between the names of several classes in one field; "json" for a list,
        as JSON or as Python writes it. None finds out.
      task: "classes", "multilabel" or "regression"; "auto" decides by the labels and logs why.
      cache_gib: for URLs: the most that fetched files of all stores may take on this host, in GiB.

    Raises:
      UserError: the file is missing or empty, a line has another form, the first image is missing,
        a path has two labels, a class is not among `class_names`, there is no such column, or a
        label does not suit the task.
    """
    check_choice("task", task, ("auto", *TASKS))
    if label_column is not None and label_columns is not None:
        raise UserError("label_column and label_columns are both set; give one of them")
    if is_url(file):
        root = parent(file) if root is None else root
        file = stored.fetched_list(file)
    file = absolute(file)
    if not is_url(root):
        root = str(file.parent if root is None else absolute(root))
    asked = Asked(path_column, label_column, label_columns, group_column)
    read = read_rows(file, asked, task=task)
    listed = _listed(read.rows, root)
    numbers, paths = listed.numbers, listed.paths
    if not paths:
        raise UserError(f"image list {file} has only a header; expected images below it")
    if not _is_file(paths[0]):
        raise UserError(
            f"{file} line {numbers[0]}: {paths[0]} does not exist; relative paths start in {root}: "
            "name the folder of the images in data.images (in a script, root=)"
        )
    place = lambda index: f"{file} line {numbers[index]}"  # noqa: E731
    in_order, is_joined = np.sort(listed.hashes), False
    if (in_order[1:] == in_order[:-1]).any():
        is_joined = task == "multilabel" and read.is_field and _labels_differ(listed)
        if is_joined:
            listed = _joined(listed, label_separator, place)
            label_separator = several_labels.JSON
            summary(
                "data: %s of %s for %s; an image has the classes of all its lines",
                *(counted(len(paths), "line"), file, counted(len(listed.paths), "image")),
            )
            numbers, paths = listed.numbers, listed.paths
        _check_repeated(file, paths, listed.labels, numbers)
    settings = {"task": task, "class_names": class_names, "separator": label_separator}
    found = _labels(file, read, listed, place, **settings)
    if is_joined:
        found = found._replace(reason=f"of task={task!r}")
    groups = np.array(listed.groups) if group_column is not None else None
    store = stored.list_images(paths, cache_gib=cache_gib) if is_url(paths[0]) else None
    source = ImageSource(
        Blobs(paths, reader=store, lines=Lines(str(file), np.array(numbers, np.int64))),
        found.labels,
        found.class_names,
        groups=groups,
        target_names=found.target_names,
    )
    several_labels.tell(source, found.reason, asks=task != "auto")
    return source


def _other_columns(
    file: pathlib.Path, columns: Sequence[str], class_names: Sequence[str]
) -> UserError:
    """Returns the error for columns of labels that are not the classes of the training."""
    lacking = [each for each in class_names if each not in columns]
    others = [each for each in columns if each not in class_names]
    if lacking:
        fix = f"has no column {lacking[0]}"
        cure = (
            f"add it to {file.name}, with 0 where an image is not of that class, or train only "
            "with columns that both lists have, named in data.label_columns"
        )
    elif others:
        fix = f"has a column {others[0]} too, which is no class of the training"
        cure = f"leave it out, for example with data.label_columns=*,-{others[0]}"
    else:
        fix = f"has the columns of its labels in another order, {', '.join(columns[:5])}"
        cure = "give label_columns in the order of class_names, for example in data.label_columns"
    shown = ", ".join(class_names[:5]) + (", ..." if len(class_names) > 5 else "")
    return UserError(f"{file} {fix}; the classes of the training are {shown}: {cure}")


def _labels(
    file: pathlib.Path,
    read: Rows,
    listed: "_Listed",
    place: Callable[[int], str],
    *,
    task: str,
    class_names: Sequence[str] | None,
    separator: str | None,
) -> Labels:
    """Returns the labels in the form of their task."""
    if not read.is_field:
        if separator is not None:
            raise UserError(
                f"label_separator={separator!r} with several columns of labels; it is for names in "
                "one column: remove it"
            )
        found = several_labels.of_columns(
            listed.labels, read.labels, task=task, place=place, pattern=read.pattern
        )
        if class_names is not None and found.class_names and found.class_names != (*class_names,):
            raise _other_columns(file, found.class_names, class_names)
        return found
    fields, reason = [each for (each,) in listed.labels], f"of task={task!r}"
    if task == "auto" and separator is not None:
        task = "multilabel"
    elif task == "auto":
        task, reason = several_labels.decided(fields, class_names)
    elif task != "multilabel" and separator is not None:
        raise UserError(
            f"label_separator={separator!r} with task={task!r}; it is for several classes an "
            "image: remove it, or use task='multilabel'"
        )
    if task == "multilabel":
        return several_labels.of_names(
            fields, separator=separator, place=place, class_names=class_names
        )
    if task == "regression":
        found = several_labels.of_columns(listed.labels, read.labels, task=task, place=place)
        return found._replace(reason=reason)
    if "" in fields:
        raise read.without_label(listed.numbers[fields.index("")])
    labels, class_names = from_text(fields, name_of=place, class_names=class_names)
    return Labels(labels, class_names, (), reason)


class _Listed(NamedTuple):
    """The lines of the file, in some 100 bytes each: the number of the line, the whole path, the
    path's hash, the labels, and the number of the group; lines with equal labels share one
    tuple."""

    numbers: Sequence[int]
    paths: FileNames
    hashes: Sequence[int]
    labels: list[tuple[str, ...]]
    groups: Sequence[int]


def _listed(rows: Iterator[Row], root: str) -> _Listed:
    growing, same, begin, known = GrowingFileNames(), {}, os.path.join(root, ""), {}
    found = _Listed(array.array("q"), FileNames.of(()), array.array("q"), [], array.array("q"))
    while part := list(itertools.islice(rows, AT_A_TIME)):
        numbers, paths, labels, groups = zip(*part, strict=True)
        paths = [path if path[0] == "/" or is_url(path) else begin + path for path in paths]
        if not found.numbers:
            suffix, begins = _lacking(paths[0]), _beginning(paths[0])
        if not all(path.startswith(begins) for path in paths):
            raise _in_two_places(numbers, paths, begins)
        if suffix:
            paths = [path if _has_suffix(path) else path + suffix for path in paths]
        growing.add(paths)
        found.hashes.extend(map(hash, map(_normal, paths)))
        found.numbers.extend(numbers)
        if len(same) < AT_A_TIME:  # nearly all rows of numbers differ, and would only fill it
            labels = [same.setdefault(each, each) for each in labels]
        found.labels.extend(labels)
        found.groups.extend(known.setdefault(each, len(known)) for each in groups)
    return found._replace(paths=growing.done())


def _is_file(path: str) -> bool:
    return stored.is_there(path) if is_url(path) else os.path.isfile(path)


def _beginning(path: str) -> str:
    return f"{scheme(path)}://" if is_url(path) else "/"


def _in_two_places(numbers: Sequence[int], paths: Sequence[str], begins: str) -> UserError:
    """Returns the error for a list with images in a store, and others in another or on the disk."""
    lines = zip(numbers, paths, strict=True)
    number, path = next(each for each in lines if not each[1].startswith(begins))
    return UserError(
        f"line {number} of the image list has {path}, but the first image begins with {begins}; "
        "give all images of a list the same kind of place"
    )


def _has_suffix(path: str) -> bool:
    return os.path.splitext(path)[1].lower() in IMAGE_SUFFIXES


def _lacking(path: str) -> str:
    """Returns the suffix with which the first image exists, if its path lacks one; else ""."""
    if _has_suffix(path) or _is_file(path):
        return ""
    suffixes = (*IMAGE_SUFFIXES, *map(str.upper, IMAGE_SUFFIXES))
    found = next((each for each in suffixes if _is_file(path + each)), "")
    if found:
        log.info("data: paths of the list without a suffix get %s, as %s has it", found, path)
    return found


def _normal(path: str) -> str:
    return os.path.normpath(path) if "/." in path or "//" in path else path


def _first_lines(listed: _Listed) -> list[int]:
    """Returns for each line the first one that has its path, both as places from 0."""
    first: dict[str, int] = {}
    return [first.setdefault(path, index) for index, path in enumerate(map(_normal, listed.paths))]


def _labels_differ(listed: _Listed) -> bool:
    """Returns whether two lines of an image have different labels."""
    first = _first_lines(listed)
    return any(
        listed.labels[line] != label for line, label in zip(first, listed.labels, strict=True)
    )


def _joined(listed: _Listed, separator: str | None, place: Callable[[int], str]) -> _Listed:
    """Returns one line for each image, whose label is a list of the names in all of its lines."""
    first, fields = _first_lines(listed), [field for (field,) in listed.labels]
    if separator is None:
        distinct = set(fields) - {""}
        several = several_in_one(distinct)
        separator = several and (several.separator or several_labels.separator_of(distinct))
    names = {line: {} for line in first}
    for index, (line, field) in enumerate(zip(first, fields, strict=True)):
        where = lambda _, at=index: place(at)  # noqa: E731
        # Without a separator each line has one name, which may contain blanks.
        found = [field] if separator is None else several_labels.names_in(field, separator, where)
        names[line] |= dict.fromkeys(each for each in found if each)
    kept = list(names)
    return _Listed(
        array.array("q", (listed.numbers[each] for each in kept)),
        FileNames.of([listed.paths[each] for each in kept]),
        array.array("q", (listed.hashes[each] for each in kept)),
        [(json.dumps(list(each)),) for each in names.values()],
        array.array("q", (listed.groups[each] for each in kept)),
    )


def _check_repeated(
    file: pathlib.Path, paths: Sequence[str], labels: list[tuple[str, ...]], numbers: Sequence[int]
) -> None:
    """Raises UserError if a path has two labels; warns if lines repeat a path and its label."""
    first, repeated = {}, []
    for index, path in enumerate(map(_normal, paths)):
        before = first.setdefault(path, index)
        if labels[before] != labels[index]:
            raise UserError(
                f"{file} lines {numbers[before]} and {numbers[index]} give {path} the labels "
                f"'{','.join(labels[before])}' and '{','.join(labels[index])}'; expected one line "
                "for each image: remove one of them. If an image has several classes, name them in "
                "one line, such as 'cat|dog', or use task='multilabel' "
                "(--config.data.task=multilabel), which takes several lines of an image"
            )
        if before != index:
            repeated.append((before, index))
    if repeated:
        before, index = repeated[0]
        log.warning(
            "data: %s of %s %s an image of an earlier line with the same label, first lines %d and "
            "%d; such images count more than once",
            counted(len(repeated), "line"),
            file,
            "repeats" if len(repeated) == 1 else "repeat",
            numbers[before],
            numbers[index],
        )
