"""The files that rows of answers are written to: CSV, and Parquet by pyarrow.

A form writes rows into a file of their own, and joins such files into one. A row has text, numbers
and None, for a cell without a value. Needs no TensorFlow.

    form = form_of(pathlib.Path("answers.parquet"))     # by the ending of the name
    form.check(columns, texts)
    part.write_bytes(form.encoded(columns, rows))
    form.join(columns, [part, other], file)

Parquet becomes one file at the end, as CSV does, and not a folder of parts: a reader would take a
folder with the parts of half the images for all of them.
"""

import csv
import io
import pathlib
import shutil
from collections.abc import Iterable, Sequence
from typing import BinaryIO, NamedTuple, Protocol

from tfaccel.common.errors import UserError
from tfaccel.common.extras import how_to_add, is_installed
from tfaccel.common.redact import shown

# The values in a row group of a Parquet file, about: few groups are read fast, and one must fit
# into memory while the file is joined. 4 MB of numbers.
VALUES_PER_GROUP = 2**20
ENDINGS = (".csv", ".parquet")


class Column(NamedTuple):
    """A column of the file.

    Attributes:
      name: its name.
      kind: `str`, or `float` for numbers in float32.
    """

    name: str
    kind: type


class Form(Protocol):
    """How rows become a file.

    Attributes:
      ending: of the names of its files.
    """

    ending: str

    def check(self, columns: Sequence[Column], texts: Iterable[str]) -> None:
        """Raises UserError if the form cannot have these names of columns and texts of cells."""

    def encoded(self, columns: Sequence[Column], rows: Sequence[Sequence[object]]) -> bytes:
        """Returns the content of a part's file."""

    def num_filled(self, columns: Sequence[Column], index: int, part: pathlib.Path) -> int:
        """Returns how many rows of a part have a value in the column of this index."""

    def join(
        self, columns: Sequence[Column], parts: Sequence[pathlib.Path], file: BinaryIO
    ) -> None:
        """Writes the whole file of all parts, in their order."""


def form_of(path: pathlib.Path) -> Form:
    """Returns the form of a file by the ending of its name.

    Raises:
      UserError: it has another ending, or what writes such files is not installed.
    """
    ending = path.suffix.lower()
    if ending == ".csv":
        return Csv()
    if ending != ".parquet":
        raise UserError(
            f"output {path} ends in {shown(ending) if ending else 'nothing'}; give a file that "
            f"ends in {' or '.join(ENDINGS)}"
        )
    if not is_installed("pyarrow"):
        raise UserError(
            f"output {path} is a Parquet file, which needs pyarrow, and that is not installed; add "
            f"the extra ({how_to_add('parquet')}), or give a file that ends in .csv"
        )
    return Parquet()


class Csv:
    """CSV with a line of heads. A name that is not valid UTF-8 keeps its bytes."""

    ending = ".csv"

    def check(self, columns: Sequence[Column], texts: Iterable[str]) -> None:
        """Takes all texts."""

    def encoded(self, columns: Sequence[Column], rows: Sequence[Sequence[object]]) -> bytes:
        """Returns lines without the heads. Numbers have the seven digits that a float32 holds."""
        lines = (
            [f"{each:.7g}" if isinstance(each, float) else each for each in row] for row in rows
        )
        return _as_csv(lines)

    def num_filled(self, columns: Sequence[Column], index: int, part: pathlib.Path) -> int:
        """Returns how many rows of a part are not empty in the column of this index."""
        with open(part, newline="", encoding="utf-8", errors="replace") as file:
            return sum(row[index] != "" for row in csv.reader(file))

    def join(
        self, columns: Sequence[Column], parts: Sequence[pathlib.Path], file: BinaryIO
    ) -> None:
        """Writes the heads and the lines of all parts."""
        file.write(_as_csv([[each.name for each in columns]]))
        for each in parts:
            with open(each, "rb") as part:
                shutil.copyfileobj(part, file)


class Parquet:
    """Parquet, with texts as UTF-8, numbers as float32, and null for a cell without a value."""

    ending = ".parquet"

    def check(self, columns: Sequence[Column], texts: Iterable[str]) -> None:
        """Raises UserError if a text is not valid UTF-8, as Parquet demands of text."""
        for text in (*(each.name for each in columns), *texts):
            try:
                text.encode()
            except UnicodeEncodeError:
                raise UserError(
                    f"{shown(text)} is not valid UTF-8, which the text of a Parquet file must be; "
                    "rename it, or give an output that ends in .csv"
                ) from None

    def encoded(self, columns: Sequence[Column], rows: Sequence[Sequence[object]]) -> bytes:
        """Returns a Parquet file of one row group."""
        import pyarrow as pa
        from pyarrow import parquet

        schema = _schema(columns)
        cells = ([_as_utf8(each) for each in row] for row in rows)
        arrays = [
            pa.array(each, field.type)
            for each, field in zip(zip(*cells, strict=True), schema, strict=True)
        ]
        written = io.BytesIO()
        parquet.write_table(pa.Table.from_arrays(arrays, schema=schema), written)
        return written.getvalue()

    def num_filled(self, columns: Sequence[Column], index: int, part: pathlib.Path) -> int:
        """Returns how many rows of a part are not null in the column of this index."""
        from pyarrow import parquet

        # By a file object, because pyarrow takes some characters of a name for those of an address.
        with open(part, "rb") as file:
            (column,) = parquet.ParquetFile(file).read([columns[index].name]).columns
        return len(column) - column.null_count

    def join(
        self, columns: Sequence[Column], parts: Sequence[pathlib.Path], file: BinaryIO
    ) -> None:
        """Writes row groups of whole parts, with about VALUES_PER_GROUP values each."""
        import pyarrow as pa
        from pyarrow import parquet

        tables, num_values = [], 0
        with parquet.ParquetWriter(file, _schema(columns)) as writer:
            for index, each in enumerate(parts):
                with open(each, "rb") as part:
                    tables.append(parquet.ParquetFile(part).read())
                num_values += tables[-1].num_rows * len(columns)
                if num_values >= VALUES_PER_GROUP or index == len(parts) - 1:
                    table = pa.concat_tables(tables)
                    writer.write_table(table, row_group_size=table.num_rows)
                    tables, num_values = [], 0


def _schema(columns: Sequence[Column]):
    import pyarrow as pa

    types = {str: pa.string(), float: pa.float32()}
    return pa.schema([(each.name, types[each.kind]) for each in columns])


def _as_utf8(cell: object) -> object:
    # `check` has refused names, but an error may repeat any bytes of a file.
    return cell.encode("utf-8", "backslashreplace").decode() if isinstance(cell, str) else cell


def _as_csv(rows: Iterable[Sequence[object]]) -> bytes:
    text = io.StringIO(newline="")
    csv.writer(text, lineterminator="\n").writerows(rows)
    return text.getvalue().encode("utf-8", "surrogateescape")
