"""A long file of rows, written in pieces, so that a stopped program continues where it was.

Each piece has the same number of rows and is a file of its own, which is written completely or not
at all. When the last piece is there, all of them become the one file. Needs no TensorFlow.

    columns = [Column("image", str), Column("probability", float)]
    pieces = Pieces(path, columns, Csv(), num_rows=10**6, settings={...}, rows_per_piece=4096)
    with pieces.held():
        pieces.start                    # the first row that is missing: 0 for a new file
        for row in rows[pieces.start :]:
            pieces.add(row)
        pieces.join()

    answers.csv                         the whole file; it appears at the end
    answers.csv.pieces/settings.json    what the rows were computed from
    answers.csv.pieces/00000000.csv     rows 0 to 4,095
    answers.csv.pieces/lock             held by the process that writes
"""

import contextlib
import json
import os
import pathlib
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence

from tfaccel.common.continued_output import check_settings, errors_in_words, locked
from tfaccel.common.errors import UserError
from tfaccel.common.own_files import open_own, replace
from tfaccel.common.regular_file import read_regular
from tfaccel.experiment.row_files import Column, Form

SETTINGS, LOCK = "settings.json", "lock"


class Pieces:
    """The pieces of one file.

    Attributes:
      start: the first row that is not in a piece yet, a multiple of the rows of a piece or the
        number of all rows.
    """

    def __init__(
        self,
        path: pathlib.Path,
        columns: Sequence[Column],
        form: Form,
        *,
        num_rows: int,
        settings: Mapping[str, object],
        rows_per_piece: int,
    ):
        """Touches nothing on the disk; `held` does.

        Args:
          path: the file, which does not exist yet.
          columns: the names and kinds of the columns.
          form: how rows become the file.
          num_rows: the number of all rows.
          settings: JSON-ready facts that decide the rows. Pieces with other ones are not continued.
          rows_per_piece: the rows of each piece but the last.
        """
        self._path, self._folder = path, path.with_name(f"{path.name}.pieces")
        self._columns, self._form = columns, form
        self._num_rows, self._rows_per_piece = num_rows, rows_per_piece
        heads = [each.name for each in columns]
        own = {"rows": num_rows, "rows_per_piece": rows_per_piece, "columns": heads}
        self._settings = json.loads(json.dumps(own | dict(settings)))
        self.start, self._rows = 0, []

    @contextlib.contextmanager
    def held(self) -> Iterator["Pieces"]:
        """Creates the folder or continues in it, and keeps other processes out within the context.

        Raises:
          UserError: the file exists, or the folder has pieces of other rows, or is not ours.
          RunError: another process writes there, or the folder cannot be written.
        """
        if self._path.exists():
            raise UserError(f"output {self._path} exists; give a new file")
        with errors_in_words(self._path):
            self._folder.mkdir(exist_ok=True)
        with locked(self._folder / LOCK, folder=self._folder, output=self._path):
            self._begin()
            yield self

    def add(self, row: Sequence[object]) -> None:
        """Adds the next row; a full piece is written.

        Raises:
          RunError: it cannot be written, for example because the disk is full.
        """
        self._rows.append(row)
        is_last = self.start + len(self._rows) == self._num_rows
        if len(self._rows) == self._rows_per_piece or is_last:
            with errors_in_words(self._path):
                replace(self._piece(self.start), self._form.encoded(self._columns, self._rows))
            self.start, self._rows = self.start + len(self._rows), []

    def count(self, index: int) -> int:
        """Returns how many written rows have a value in the column of this index.

        Rows that an earlier process wrote count too.
        """
        parts = map(self._piece, range(0, self.start, self._rows_per_piece))
        return sum(self._form.num_filled(self._columns, index, each) for each in parts)

    def join(self) -> None:
        """Makes the one file of all pieces, and removes them.

        Raises:
          RunError: it cannot be written.
        """
        unfinished = self._folder / self._whole
        parts = [self._piece(row) for row in range(0, self._num_rows, self._rows_per_piece)]
        with errors_in_words(self._path):
            with open(open_own(unfinished, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), "wb") as file:
                self._form.join(self._columns, parts, file)
                file.flush()
                os.fsync(file.fileno())
            os.replace(unfinished, self._path)
            shutil.rmtree(self._folder)

    def _begin(self) -> None:
        """Checks what an earlier process left, and finds the first row that is missing."""
        settings = self._folder / SETTINGS
        ours = [LOCK, SETTINGS, self._whole]
        with errors_in_words(self._path):
            there = [each for each in os.listdir(self._folder) if each not in ours]
            piece = rf"\d{{8}}{re.escape(self._form.ending)}"
            # A killed process may leave the hidden file that it wrote: see `replace`.
            piece = re.compile(rf"{piece}|\.({piece}|{re.escape(SETTINGS)})\.\d+\.\w+")
            foreign = [each for each in there if not piece.fullmatch(each)]
            if foreign:
                raise UserError(
                    f"{self._folder} holds {foreign[0]}, which is no piece of an output; give "
                    "another output"
                )
            if settings.exists():
                check_settings(
                    settings, read_regular(settings), self._settings, folder=self._folder
                )
            else:
                replace(settings, (json.dumps(self._settings, indent=2) + "\n").encode())
            starts = range(0, self._num_rows, self._rows_per_piece)
            missing = (each for each in starts if not self._piece(each).is_file())
            self.start = next(missing, self._num_rows)

    def _piece(self, row: int) -> pathlib.Path:
        return self._folder / f"{row // self._rows_per_piece:08d}{self._form.ending}"

    @property
    def _whole(self) -> str:
        return f"whole{self._form.ending}"
