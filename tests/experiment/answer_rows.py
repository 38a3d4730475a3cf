"""What the tests of `predict --output` share: the rows of a file, and a call that is stopped."""

import csv

import pytest

from tfaccel.experiment.pieces import Pieces


def rows_of(path):
    """Each row as a dict by the names of the columns; None for a cell without a value."""
    if path.suffix == ".parquet":
        return pytest.importorskip("pyarrow.parquet").read_table(path).to_pylist()
    with open(path, newline="") as file:
        rows = list(csv.DictReader(file))
    return [{name: cell or None for name, cell in row.items()} for row in rows]


class StopError(Exception):
    """Stands for Ctrl-C, which pytest would take for its own."""


def stopping_after(patch, number):
    """Lets the process end before it adds another row than so many."""
    own, added = Pieces.add, []

    def add(self, row):
        if len(added) == number:
            raise StopError
        added.append(row)
        own(self, row)

    patch.setattr(Pieces, "add", add)
