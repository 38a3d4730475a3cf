"""Reads the lines of an image list: CSV, lines of JSON, or a path and numbers on each line.

    read = read_rows(file, Asked(label_column="species"), task="auto")
    read.columns.labels               # ("species",)
    for number, path, labels, group in read.rows: ...

Every value is text here, as a CSV file has it. In a line of JSON, true and false become 1 and 0,
null becomes "", and a list stays JSON.
"""

import csv
import functools
import io
import itertools
import json
import pathlib
import re
import shlex
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from tfaccel.common.errors import UserError
from tfaccel.common.regular_file import open_regular
from tfaccel.data.sources.compression import compression_of
from tfaccel.data.sources.labels import NUMBER, WHOLE_NUMBER
from tfaccel.data.sources.paths import nearest
from tfaccel.data.sources.pillow import IMAGE_SUFFIXES
from tfaccel.data.sources.several_labels import matching, trailing_numbers

# Names in a header, in any case. Of several, the first one here counts.
PATH_COLUMNS = (
    *("path", "filename", "image", "file", "image_path", "file_path", "filepath", "file_name"),
    *("image_name", "image_id", "img", "id"),
)
LABEL_COLUMNS = ("label", "class", "class_name", "category", "target")
DELIMITERS = "\t;,"

Row = tuple[int, str, tuple[str, ...], str]  # the number of the line, path, labels, group


class Asked(NamedTuple):
    """The names of columns, if they are given: see `image_list`."""

    path_column: str | None = None
    label_column: str | None = None
    label_columns: Sequence[str] | None = None
    group_column: str | None = None


class Columns(NamedTuple):
    """Where a row has what: places of columns, from 0.

    Attributes:
      path: the place of the path.
      label_places: the places of the labels.
      group: the place of the group, or None.
      labels: the names of the labels' columns.
    """

    path: int
    label_places: tuple[int, ...]
    group: int | None
    labels: tuple[str, ...]


class Rows(NamedTuple):
    """The rows of a list, one after another, the names of the labels' columns, and an error.

    Attributes:
      rows: the rows.
      labels: the names of the labels' columns; "0", "1", ... for numbers without a header.
      is_field: whether the labels are one field, which may have several names.
      without_label: returns the error for the line with the given number, which has no label.
      pattern: the label_columns that were asked for, if they have a "*"; else None.
    """

    rows: Iterator[Row]
    labels: tuple[str, ...]
    is_field: bool
    without_label: Callable[[int], UserError]
    pattern: str | None = None


def read_rows(file: pathlib.Path, asked: Asked, *, task: str) -> Rows:
    """Returns the rows of a list.

    Args:
      file: the list, an absolute path.
      asked: the names of the columns.
      task: the task that is asked for, or "auto"; it tells which lines without a header are right.

    Raises:
      UserError: the file is missing or empty, or has no such columns. The rows raise it for a line
        that has another form.
    """
    lines = _lines(file)
    first = next(lines, None)
    if first is None:
        raise UserError(f"image list {file} is empty; expected a path and a label on each line")
    lines = itertools.chain([first], lines)
    if re.match(r'\{\s*"', first):
        columns = _columns(f"{file} line 1", list(_object(file, 1, first)), asked)
        rows = _json_rows(file, lines, list(_object(file, 1, first)), columns)
        wrong = functools.partial(_without_label, file, " and ".join(map(repr, columns.labels)))
    elif header := _header(file, first.removesuffix("\n"), asked):
        delimiter, columns = header
        rows = _csv_rows(file, lines, delimiter, columns)
        wrong = functools.partial(_malformed, file, columns)
    else:
        count = trailing_numbers(first, _is_image)
        names = ("label",) if count == 1 else tuple(map(str, range(count)))
        rows = _plain_rows(file, lines, count, task)
        return Rows(rows, names, count == 1, functools.partial(_without_label, file, "a number"))
    pattern = ",".join(asked.label_columns or ())
    return Rows(
        rows,
        columns.labels,
        asked.label_columns is None,
        wrong,
        pattern if "*" in pattern else None,
    )


def _is_image(path: str) -> bool:
    return pathlib.PurePath(path).suffix.lower() in IMAGE_SUFFIXES


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
        if isinstance(error, UnicodeDecodeError) and not packed:
            # Spreadsheets write the encoding of the system, mostly this one in the West.
            quoted = shlex.quote(str(file))
            fix += f"; if it is Windows-1252: iconv -f WINDOWS-1252 -t UTF-8 {quoted} > utf8.csv"
        raise UserError(f"image list {file} cannot be read ({cause}); {fix}") from None


def _header(file: pathlib.Path, line: str, asked: Asked) -> tuple[str, Columns] | None:
    """Returns the delimiter and the columns, or None if the first line is not a header."""
    for delimiter in DELIMITERS:
        try:
            columns = [each.strip() for each in next(csv.reader([line], delimiter=delimiter))]
        except csv.Error:  # the line is longer than any header
            return None
        if _has_any(columns, asked):
            return delimiter, _columns(f"{file} line 1", columns, asked)
    given = {name: each for name, each in asked._asdict().items() if each is not None}
    if given:
        name, value = next(iter(given.items()))
        value = ",".join(value) if name == "label_columns" else value
        parts = max((line.split(each) for each in DELIMITERS), key=len)
        raise UserError(
            f"{name}={value!r}, but {file} line 1 has no such column; it has "
            f"{', '.join(map(str.strip, parts)):.300}: give one of them; if line 1 names no "
            "columns, add a header, such as path,label,patient"
        )
    return None


def _wanted(asked: Asked) -> dict[str, tuple[str, ...]]:
    """Returns the names, in lower case, of which one must be there for each kind of column."""
    usual = {"path_column": PATH_COLUMNS, "label_column": LABEL_COLUMNS, "group_column": ()}
    return {
        each: names if getattr(asked, each) is None else (getattr(asked, each).strip().lower(),)
        for each, names in usual.items()
    }


def _has_any(columns: Sequence[str], asked: Asked) -> bool:
    names = set(itertools.chain.from_iterable(_wanted(asked).values()))
    # One column is the whole line, which "*_x" would match, where the delimiter is another one.
    several = asked.label_columns or () if len(columns) > 1 else ()
    own = [each for each in several if each != "*" and not each.startswith("-")]
    is_label = any(not isinstance(matching([each], columns), str) for each in own)
    return is_label or not names.isdisjoint(each.lower() for each in columns)


def _columns(where: str, columns: Sequence[str], asked: Asked) -> Columns:
    """Returns the places of the columns.

    Raises:
      UserError: a column that is asked for, the path or the label is missing.
    """
    lower = [each.lower() for each in columns]
    found = {
        each: next((lower.index(name) for name in names if name in lower), None)
        for each, names in _wanted(asked).items()
    }
    shown = ", ".join(columns)
    for each in ("path_column", "label_column", "group_column"):
        if getattr(asked, each) is not None and found[each] is None:
            raise UserError(
                f"{each}={getattr(asked, each)!r}, but {where} has the columns {shown}; give one "
                "of them"
            )
    labels = [found["label_column"]]
    if asked.label_columns is not None:
        others = [found["path_column"], found["group_column"]]
        left = ["" if place in others else each for place, each in enumerate(columns)]
        labels = matching(asked.label_columns, left)
        if isinstance(labels, str):
            raise UserError(
                f"label_columns={','.join(asked.label_columns)}, but {where} has no column "
                f"'{labels}' for a label; it has {shown}: give some of them"
            )
        labels = [each for each in labels if each not in others]
    lacking = {
        "path_column": (PATH_COLUMNS, found["path_column"] is None),
        "label_column (or label_columns)": (LABEL_COLUMNS, None in labels or not labels),
    }
    lacking = {name: usual for name, (usual, is_lacking) in lacking.items() if is_lacking}
    if lacking:
        usual = " and one of ".join(", ".join(each) for each in lacking.values())
        raise UserError(
            f"{where} has the columns {shown}; expected one of {usual}: give "
            f"{' and '.join(lacking)}, or rename the column{'s' if len(lacking) > 1 else ''}"
        )
    names = tuple(columns[each] for each in labels)
    return Columns(found["path_column"], tuple(labels), found["group_column"], names)


def _csv_rows(file, lines, delimiter: str, columns: Columns) -> Iterator[Row]:
    path, places, group = columns.path, columns.label_places, columns.group
    least = max(path, *places, group or 0) + 1
    for number, row in itertools.islice(_numbered(file, lines, delimiter), 1, None):
        labels = tuple(row[each].strip() for each in places) if len(row) >= least else ()
        # A path with a line end comes from a quote that is not closed.
        if not labels or not row[path] or "\n" in row[path] or "\n" in "".join(labels):
            raise _malformed(file, columns, number)
        yield number, row[path], labels, "" if group is None else row[group].strip()


def _malformed(file, columns: Columns, number: int) -> UserError:
    labels = " and ".join(str(each + 1) for each in columns.label_places[:3])
    what = f"a label in column {labels}" if len(columns.labels) == 1 else f"labels in {labels}"
    return UserError(
        f"{file} line {number} is {_line(file, number)!r}; expected a path in column "
        f"{columns.path + 1} and {what}, as in the header"
    )


def _without_label(file, what: str, number: int) -> UserError:
    return UserError(
        f"{file} line {number} is {_line(file, number)!r:.200}; expected a path and {what}"
    )


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


def _object(file, number: int, line: str) -> dict:
    try:
        found = json.loads(line)
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise UserError(
            f"{file} line {number} is {line.rstrip()!r:.200}; expected an object of JSON on each "
            'line, such as {"path": "1.jpg", "label": ["cat", "dog"]}'
        )
    return found


def _json_rows(file, lines, names: Sequence[str], columns: Columns) -> Iterator[Row]:
    for number, line in enumerate(lines, start=1):
        found = _object(file, number, line)
        row = [_text(found.get(each)) for each in names]
        path = row[columns.path]
        if not path or "\0" in path:
            raise UserError(
                f"{file} line {number} is {line.rstrip()!r:.200}; expected a path as "
                f"'{names[columns.path]}'"
            )
        labels = tuple(row[each] for each in columns.label_places)
        yield number, path, labels, "" if columns.group is None else row[columns.group]


def _text(value: object) -> str:
    """Returns a value of JSON as a CSV file would have it."""
    if value is None:
        return ""
    if isinstance(value, bool):
        return str(int(value))
    return value.strip() if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _plain_rows(file, lines, count: int, task: str) -> Iterator[Row]:
    """Yields rows of a path and `count` labels, with blanks between them."""
    for number, line in enumerate(lines, start=1):
        fields = line.rsplit(maxsplit=count)
        if len(fields) <= count or not all(_is_label(each, count, task) for each in fields[1:]):
            what = "a whole number" if count == 1 else f"{count} numbers, as on line 1"
            raise UserError(
                f"{file} line {number} is {line.rstrip()!r:.200}; expected a path, blanks and "
                f"{what}, or on line 1 a header with the columns path and label"
            )
        yield number, fields[0], tuple(fields[1:]), ""


def _is_label(field: str, count: int, task: str) -> bool:
    if WHOLE_NUMBER.fullmatch(field) or (task == "multilabel" and count == 1):
        return True
    # A longer whole number is an identifier.
    is_number = NUMBER.fullmatch(field) and not field.lstrip("+-").isdigit()
    return bool(is_number) and (task in ("auto", "regression") or count > 1)
