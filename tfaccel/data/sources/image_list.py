"""A file that lists images and their labels: a CSV file, or a list as DALI and Caffe read it.

    path,label                 n01440764/10026.JPEG 0
    cats/1.jpg,cat             n01440764/10027.JPEG 0
    "dogs/a, b.jpg",dog        n01443537/10007.JPEG 1

Takes the file; gives its images in its order.

    source = image_list("train.csv", root="/data/images")
"""

import csv
import itertools
import os
import pathlib
import re
from collections.abc import Iterator

import numpy as np

from tfaccel.data.source import Blobs, ImageSource
from tfaccel.data.sources.labels import named, numbered
from tfaccel.data.sources.paths import absolute, nearest
from tfaccel.errors import UserError

PATH_COLUMNS = ("path", "filename", "image", "file")  # as a header names them, in any case
LABEL_COLUMNS = ("label", "class")
DELIMITERS = "\t;,"

WHOLE_NUMBER = re.compile(r"[-+]?[0-9]{1,18}")  # of 64 bits
FRACTION = re.compile(r"[-+]?[0-9]+\.[0-9]*")  # pandas writes 3 as 3.0 in a column with gaps


def image_list(file: str | os.PathLike, *, root: str | os.PathLike | None = None) -> ImageSource:
    """Lists the images that a file names, in its order.

    Of the paths only the first is looked for here (on a network drive 1.3 million take minutes);
    any other that leads nowhere is named when it is read, and by `tfaccel audit`.

    Gives whole files, and labels [num_examples] int32. Labels that are whole numbers stay as they
    are, with the class names "0", "1", ... up to the largest; others are class names, sorted as
    text. The images may be of any size and of 1 or 3 channels.

    Args:
      file: UTF-8. Either with a header and columns apart by comma, semicolon or tab: a path (path,
        filename, image or file) and a label (label or class), others being passed over. Or without
        a header: on each line a path, blanks, and a whole number.
      root: what relative paths start from; None for the file's own folder.

    Raises:
      UserError: the file is missing or empty, a line is not as said, or the first image is missing.
    """
    file = absolute(file)
    root = str(file.parent if root is None else absolute(root))
    lines = _lines(file)
    header = _header(file, lines[0])
    if header:
        first_line, rows = 2, _csv_rows(file, lines, *header)
    else:
        first_line, rows = 1, [_plain_row(file, *each) for each in enumerate(lines, start=1)]
    files = tuple(os.path.join(root, path) for path, _ in rows)
    if not os.path.isfile(files[0]):
        raise UserError(
            f"{file} line {first_line}: {files[0]} does not exist; relative paths start from "
            f"{root}: give another as root="
        )
    labels, class_names = _labels([label for _, label in rows], file, first_line)
    return ImageSource(Blobs(files), labels, class_names)


def _lines(file: pathlib.Path) -> list[str]:
    """Returns the file's lines, less empty ones at its end."""
    try:
        text = file.read_text(encoding="utf-8-sig").rstrip("\n")
    except FileNotFoundError:
        cure = nearest(file, kind="file", wanted="a file of paths and labels")
        raise UserError(f"image list {file} does not exist{cure}") from None
    except (OSError, UnicodeDecodeError) as error:
        cause = getattr(error, "strerror", None) or error
        raise UserError(f"image list {file} cannot be read ({cause}); expected UTF-8") from None
    if not text:
        raise UserError(f"image list {file} is empty; expected a path and a label on each line")
    return text.split("\n")


def _header(file: pathlib.Path, line: str) -> tuple[str, int, int] | None:
    """Returns (delimiter, path's column, label's column), or None where it is no header."""
    for delimiter in DELIMITERS:
        try:
            columns = [each.strip() for each in next(csv.reader([line], delimiter=delimiter))]
        except csv.Error:  # longer than any header
            return None
        lower = [each.lower() for each in columns]
        found = [
            next((lower.index(name) for name in names if name in lower), None)
            for names in (PATH_COLUMNS, LABEL_COLUMNS)
        ]
        if found == [None, None]:
            continue
        if None in found:
            raise UserError(
                f"{file} line 1 has the columns {', '.join(columns)}; expected one of "
                f"{', '.join(PATH_COLUMNS)} and one of {', '.join(LABEL_COLUMNS)}: rename them"
            )
        return delimiter, *found
    return None


def _csv_rows(file, lines, delimiter, path_column, label_column) -> list[tuple[str, str]]:
    rows, least = [], max(path_column, label_column) + 1
    for number, row in itertools.islice(_numbered(file, lines, delimiter), 1, None):
        pair = (row[path_column], row[label_column].strip()) if len(row) >= least else ("", "")
        # A line's end in a path is that of a quote which was left open.
        if not all(pair) or "\n" in "".join(pair):
            raise UserError(
                f"{file} line {number} is {lines[number - 1]!r}; expected a path in column "
                f"{path_column + 1} and a label in column {label_column + 1}, as the header says"
            )
        rows.append(pair)
    if not rows:
        raise UserError(f"image list {file} holds a header alone; expected images below it")
    return rows


def _numbered(file, lines, delimiter) -> Iterator[tuple[int, list[str]]]:
    """Yields each row after the number of the line on which it begins."""
    reader = csv.reader((f"{line}\n" for line in lines), delimiter=delimiter, strict=True)
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


def _plain_row(file, number, line) -> tuple[str, str]:
    fields = line.rsplit(maxsplit=1)
    if len(fields) < 2 or not WHOLE_NUMBER.fullmatch(fields[1]):
        raise UserError(
            f"{file} line {number} is {line!r:.200}; expected a path, blanks and a whole number, "
            "or on line 1 a header that names the columns path and label"
        )
    return fields[0], fields[1]


def _labels(labels, file, first_line) -> tuple[np.ndarray, tuple[str, ...]]:
    if FRACTION.fullmatch(labels[0]):
        raise UserError(
            f"{file} line {first_line}: the label is '{labels[0]}'; expected a whole number or a "
            "name: write it without a fraction"
        )
    if not WHOLE_NUMBER.fullmatch(labels[0]):
        return named(labels)
    for number, label in enumerate(labels, start=first_line):
        if not WHOLE_NUMBER.fullmatch(label):
            raise UserError(
                f"{file} line {number}: the label is '{label}'; expected a whole number, as on "
                f"line {first_line}"
            )
    return numbered(
        np.array(labels).astype(np.int64), name_of=lambda index: f"{file} line {first_line + index}"
    )
