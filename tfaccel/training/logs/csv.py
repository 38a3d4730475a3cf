"""metrics.csv: a row for each epoch, for spreadsheets and pandas.

Takes the records of epochs; gives a file with a header. The whole file is replaced after each
epoch, so a later epoch can add a column, and the file is complete at any moment.

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
    """Keeps all rows, and writes all of them after each epoch."""

    def __init__(self, path: pathlib.Path):
        """Takes the path of the file, which is made at the end of the first epoch."""
        self.name = path.name
        self._path, self._rows = path, []

    def resume_at(self, *, step: int, epoch: int) -> None:
        """Removes the rows of later epochs."""
        if not self._rows and self._path.exists():
            self._rows = read(self._path)
        self._rows = [each for each in self._rows if each["epoch"] <= epoch]
        if self._rows:
            self._write()

    def epoch(self, record: Record) -> None:
        """Adds a row. Rows that could not be written before are written with it."""
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
    """Returns the rows of a file as numbers. It skips damaged rows, with a warning in the log.

    Raises:
      OSError: the file cannot be read.
    """
    rows = []
    reader = csv.DictReader(io.StringIO(read_regular(path).decode(errors="replace"), newline=""))
    for row in reader:
        try:
            row = {name: _number(text) for name, text in row.items() if text != ""}
            whole = "epoch" in row
        except (AttributeError, ValueError):  # too few values, too many values, or text
            whole = False
        if whole:
            rows.append(row)
        else:
            log.warning("logs: %s: line %d is damaged and is skipped", path, reader.line_num)
    return rows


def _number(text: str) -> float:
    return int(text) if text.lstrip("-").isdigit() else float(text)
