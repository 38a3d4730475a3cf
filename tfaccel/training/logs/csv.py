"""metrics.csv: a row for each epoch, for spreadsheets and pandas.

Takes the records of epochs; gives a file with a header, which is written anew after each epoch, so
that a column that comes later finds its place and the file is whole at any moment.

    epoch,step,seconds,...,loss,accuracy,val_loss,val_accuracy
    1,5005,2410.0,...,6.2,0.02,5.8,0.03
"""

import csv
import io
import logging
import pathlib

from tfaccel.common.own_files import replace
from tfaccel.common.regular_file import read_regular
from tfaccel.training.logs import Record, Writer

log = logging.getLogger("tfaccel")


class Csv(Writer):
    """Keeps the rows, and writes them all."""

    def __init__(self, path: pathlib.Path):
        """Takes the file's path. It is made at the first epoch's end."""
        self.name = path.name
        self._path, self._rows = path, []

    def resume_at(self, *, step: int, epoch: int) -> None:
        """Drops the rows of later epochs."""
        if not self._rows and self._path.exists():
            self._rows = read(self._path)
        self._rows = [each for each in self._rows if each["epoch"] <= epoch]
        if self._rows:
            self._write()

    def epoch(self, record: Record) -> None:
        """Adds a row, and those that could not be written before."""
        self._rows.append(record)
        self._write()

    def _write(self) -> None:
        columns = list(dict.fromkeys(name for row in self._rows for name in row))
        first = [name for name in ("epoch", "step", "seconds", "images") if name in columns]
        text = io.StringIO()
        writer = csv.DictWriter(text, dict.fromkeys([*first, *columns]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(self._rows)
        replace(self._path, text.getvalue().encode())


def read(path: pathlib.Path) -> list[Record]:
    """Returns the rows of a file, as numbers. Damaged ones are named in the log and left out.

    Raises:
      OSError: it cannot be read.
    """
    rows = []
    reader = csv.DictReader(io.StringIO(read_regular(path).decode(errors="replace"), newline=""))
    for row in reader:
        try:
            row = {name: _number(text) for name, text in row.items() if text != ""}
            whole = "epoch" in row
        except (AttributeError, ValueError):  # of too few, too many, or text
            whole = False
        if whole:
            rows.append(row)
        else:
            log.warning("logs: %s: line %d is damaged and left out", path, reader.line_num)
    return rows


def _number(text: str) -> float:
    return int(text) if text.lstrip("-").isdigit() else float(text)
