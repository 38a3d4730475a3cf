"""Reads a file that lists images and their labels: a CSV file, or a list as for DALI and Caffe.

    path,label                 n01440764/10026.JPEG 0
    cats/1.jpg,cat             n01440764/10027.JPEG 0
    "dogs/a, b.jpg",dog        n01443537/10007.JPEG 1

The source has the images in the order of the file.

    source = image_list("train.csv", root="/data/images")
"""

import array
import csv
import io
import itertools
import logging
import os
import pathlib
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from tfaccel.common.errors import UserError
from tfaccel.common.regular_file import open_regular
from tfaccel.data.file_names import AT_A_TIME, FileNames, GrowingFileNames
from tfaccel.data.source import Blobs, ImageSource
from tfaccel.data.sources.compression import compression_of
from tfaccel.data.sources.labels import OWN_DATA, WHOLE_NUMBER, from_text
from tfaccel.data.sources.paths import absolute, nearest
from tfaccel.data.sources.pillow import IMAGE_SUFFIXES

# Names in a header, in any case. Of several, the first one here counts.
PATH_COLUMNS = (
    *("path", "filename", "image", "file", "image_path", "file_path", "filepath", "file_name"),
    *("image_name", "image_id", "img", "id"),
)
LABEL_COLUMNS = ("label", "class", "class_name", "category", "target")
DELIMITERS = "\t;,"

log = logging.getLogger("tfaccel")


def image_list(
    file: str | os.PathLike,
    *,
    root: str | os.PathLike | None = None,
    class_names: Sequence[str] | None = None,
    group_column: str | None = None,
    path_column: str | None = None,
    label_column: str | None = None,
) -> ImageSource:
    """Lists the images that a file names, in its order.

    Only the first image is looked for here, because on a network drive 1.3 million files take
    minutes. `tfaccel audit`, and the loader that reads an image, report other missing files.

    The source has whole files, and labels [num_examples] int32. Labels that are whole numbers are
    kept, with the class names "0", "1", ... up to the largest. Other labels are class names, sorted
    as text. The images may have any size and 1 or 3 channels.

    Args:
      file: a text file in UTF-8, in one of two forms. With a header, its columns are separated by
        commas, semicolons or tabs. It has a path and a label in columns of PATH_COLUMNS and
        LABEL_COLUMNS; other columns are ignored. Without a header, each line has a path, blanks,
        and a whole number. Paths may lack the suffix, such as .jpg, if all have the same one.
      root: the folder in which relative paths start. The default is the file's own folder.
      class_names: all classes in order, for a test set that lacks some: `train.class_names`.
        Labels that are whole numbers are indices into it. The default is the classes of the file.
      group_column: a column of the header, in any case, whose equal values are images that a split
        keeps together, such as those of a patient. None: the source has no groups.
      path_column: the column of the header that has the paths; None for one of PATH_COLUMNS.
      label_column: the column that has the labels; None for one of LABEL_COLUMNS.

    Raises:
      UserError: the file is missing or empty, a line has another form, the first image is missing,
        a path has two labels, a class is not among `class_names`, or there is no such column.
    """
    file = absolute(file)
    root = str(file.parent if root is None else absolute(root))
    lines = _lines(file)
    first = next(lines, None)
    if first is None:
        raise UserError(f"image list {file} is empty; expected a path and a label on each line")
    asked = {
        "path_column": path_column,
        "label_column": label_column,
        "group_column": group_column,
    }
    header = _header(file, first.removesuffix("\n"), asked)
    lines = itertools.chain([first], lines)
    rows = _csv_rows(file, lines, *header) if header else _plain_rows(file, lines)
    listed = _listed(rows, root)
    numbers, paths, labels = listed.numbers, listed.paths, listed.labels
    if not paths:
        raise UserError(f"image list {file} has only a header; expected images below it")
    if not os.path.isfile(paths[0]):
        raise UserError(
            f"{file} line {numbers[0]}: {paths[0]} does not exist; relative paths start in {root}: "
            "give another folder as root= (--config.data.images)"
        )
    in_order = np.sort(listed.hashes)
    if (in_order[1:] == in_order[:-1]).any():
        _check_repeated(file, paths, labels, numbers)
    labels, class_names = from_text(
        labels, name_of=lambda index: f"{file} line {numbers[index]}", class_names=class_names
    )
    groups = np.array(listed.groups) if group_column is not None else None
    return ImageSource(Blobs(paths), labels, class_names, groups=groups)


class _Listed(NamedTuple):
    """The lines of the file, in some 100 bytes each: the number of the line, the whole path, the
    path's hash, the label, and the number of the group; lines with equal labels share one
    string."""

    numbers: Sequence[int]
    paths: FileNames
    hashes: Sequence[int]
    labels: list[str]
    groups: Sequence[int]


def _listed(rows: Iterator[tuple[int, str, str, str]], root: str) -> _Listed:
    growing, same, begin, known = GrowingFileNames(), {}, os.path.join(root, ""), {}
    found = _Listed(array.array("q"), FileNames.of(()), array.array("q"), [], array.array("q"))
    while part := list(itertools.islice(rows, AT_A_TIME)):
        numbers, paths, labels, groups = zip(*part, strict=True)
        paths = [path if path[0] == "/" else begin + path for path in paths]
        if not found.numbers:
            suffix = _lacking(paths[0])
        if suffix:
            paths = [path if _has_suffix(path) else path + suffix for path in paths]
        growing.add(paths)
        found.hashes.extend(map(hash, map(_normal, paths)))
        found.numbers.extend(numbers)
        found.labels.extend(same.setdefault(label, label) for label in labels)
        found.groups.extend(known.setdefault(each, len(known)) for each in groups)
    return found._replace(paths=growing.done())


def _has_suffix(path: str) -> bool:
    return os.path.splitext(path)[1].lower() in IMAGE_SUFFIXES


def _lacking(path: str) -> str:
    """Returns the suffix with which the first image exists, if its path lacks one; else ""."""
    if _has_suffix(path) or os.path.isfile(path):
        return ""
    suffixes = (*IMAGE_SUFFIXES, *map(str.upper, IMAGE_SUFFIXES))
    found = next((each for each in suffixes if os.path.isfile(path + each)), "")
    if found:
        log.info("data: paths of the list without a suffix get %s, as %s has it", found, path)
    return found


def _normal(path: str) -> str:
    return os.path.normpath(path) if "/." in path or "//" in path else path


def _check_repeated(
    file: pathlib.Path, paths: Sequence[str], labels: list[str], numbers: Sequence[int]
) -> None:
    """Raises UserError if a path has two labels; warns if lines repeat a path and its label."""
    first, repeated = {}, []
    for index, path in enumerate(map(_normal, paths)):
        before = first.setdefault(path, index)
        if labels[before] != labels[index]:
            raise UserError(
                f"{file} lines {numbers[before]} and {numbers[index]} give {path} the labels "
                f"'{labels[before]}' and '{labels[index]}'; expected one class for each image: "
                f"remove one of the lines. For several labels of an image, {OWN_DATA}"
            )
        if before != index:
            repeated.append((before, index))
    if repeated:
        before, index = repeated[0]
        log.warning(
            "data: %d lines of %s repeat an image of an earlier line with the same label, first "
            "lines %d and %d; such images count more than once",
            len(repeated),
            file,
            numbers[before],
            numbers[index],
        )


def find_list(file: pathlib.Path) -> None:
    """Raises UserError if there is no such file. Its contents are not read.

    Args:
      file: an absolute path.
    """
    if not file.exists():
        hint = nearest(file, kind="file", wanted="a file of paths and labels")
        raise UserError(f"image list {file} does not exist{hint}")
    if file.is_dir():
        raise UserError(f"image list {file} is a folder; give a file of paths and labels")


def _lines(file: pathlib.Path) -> Iterator[str]:
    """Yields the file's lines with their line ends, without empty lines at the end of the file."""
    find_list(file)
    empty = 0  # empty lines that are not yet yielded
    try:
        with io.TextIOWrapper(open_regular(file), encoding="utf-8-sig") as opened:
            for number, line in enumerate(opened, start=1):
                if line == "\n":
                    empty += 1
                    continue
                if "\0" in line:
                    raise UserError(
                        f"{file} line {number} holds a zero byte, which no path may have; expected "
                        "text in UTF-8: write the file again"
                    )
                if empty:
                    yield from itertools.repeat("\n", empty)
                    empty = 0
                yield line
    except (OSError, UnicodeDecodeError) as error:
        cause = getattr(error, "strerror", None) or error
        packed = compression_of(file)
        fix = f"it is {packed}: unpack or convert it to text" if packed else "expected UTF-8"
        raise UserError(f"image list {file} cannot be read ({cause}); {fix}") from None


def _header(
    file: pathlib.Path, line: str, asked: Mapping[str, str | None]
) -> tuple[str, int, int, int | None] | None:
    """Returns (delimiter, columns of path, label and group), or None if it is not a header.

    Args:
      file: the file, for messages.
      line: its first line.
      asked: the names of the columns, if they are given: path_column, label_column, group_column.
    """
    usual = {"path_column": PATH_COLUMNS, "label_column": LABEL_COLUMNS, "group_column": ()}
    wanted = {
        each: usual[each] if name is None else (name.strip().lower(),)
        for each, name in asked.items()
    }
    named = [each for each, name in asked.items() if name is not None]
    for delimiter in DELIMITERS:
        try:
            columns = [each.strip() for each in next(csv.reader([line], delimiter=delimiter))]
        except csv.Error:  # the line is longer than any header
            return None
        lower = [each.lower() for each in columns]
        found = {
            each: next((lower.index(name) for name in names if name in lower), None)
            for each, names in wanted.items()
        }
        if all(each is None for each in found.values()):
            continue
        for each in named:
            if found[each] is None:
                raise UserError(
                    f"{each}={asked[each]!r}, but {file} line 1 has the columns "
                    f"{', '.join(columns)}; give one of them"
                )
        if found["path_column"] is None or found["label_column"] is None:
            raise UserError(
                f"{file} line 1 has the columns {', '.join(columns)}; expected one of "
                f"{', '.join(PATH_COLUMNS)} and one of {', '.join(LABEL_COLUMNS)}: give "
                "path_column and label_column, or rename them"
            )
        return delimiter, *found.values()
    if named:
        raise UserError(
            f"{named[0]}={asked[named[0]]!r}, but {file} line 1 has no such column; expected a "
            "header with the names of the columns, such as path,label,patient"
        )
    return None


def _csv_rows(
    file, lines, delimiter, path_column, label_column, group_column
) -> Iterator[tuple[int, str, str, str]]:
    least = max(path_column, label_column, group_column or 0) + 1
    for number, row in itertools.islice(_numbered(file, lines, delimiter), 1, None):
        pair = (row[path_column], row[label_column].strip()) if len(row) >= least else ("", "")
        # A path with a line end comes from a quote that is not closed.
        if not all(pair) or "\n" in "".join(pair):
            raise UserError(
                f"{file} line {number} is {_line(file, number)!r}; expected a path in column "
                f"{path_column + 1} and a label in column {label_column + 1}, as in the header"
            )
        yield number, *pair, "" if group_column is None else row[group_column].strip()


def _line(file: pathlib.Path, number: int) -> str:
    return next(itertools.islice(_lines(file), number - 1, None)).removesuffix("\n")


def _numbered(file, lines, delimiter) -> Iterator[tuple[int, list[str]]]:
    """Yields each row with the number of the line on which it begins."""
    reader = csv.reader(lines, delimiter=delimiter, strict=True)
    while True:
        number = reader.line_num + 1
        try:
            yield number, next(reader)
        except StopIteration:
            return
        except csv.Error as error:
            raise UserError(
                f"{file} line {number} cannot be read as CSV ({error}); close the quote that it "
                'opens, or write "" for a quote within quotes'
            ) from None


def _plain_rows(file, lines) -> Iterator[tuple[int, str, str, str]]:
    for number, line in enumerate(lines, start=1):
        fields = line.rsplit(maxsplit=1)
        if len(fields) < 2 or not WHOLE_NUMBER.fullmatch(fields[1]):
            raise UserError(
                f"{file} line {number} is {line.rstrip()!r:.200}; expected a path, blanks and a "
                "whole number, or on line 1 a header with the columns path and label"
            )
        yield number, *fields, ""
