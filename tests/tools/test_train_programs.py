"""The tool that trains all programs and writes a table."""

import argparse

import numpy as np
import pytest
from loaded_tool import loaded
from programs import harness

COLUMNS = ["1", "2", "1, XLA", "2, XLA"]
PROGRAM = {"name": "GAN", "source": "a paper", "rtol": 1e-4, "stock_fails": ""}


@pytest.fixture(scope="module")
def tool():
    with loaded("train_programs") as module:
        yield module


def lines(program, cells):
    """What a process prints of trainings: all cells with a number as figure."""
    return [
        {"program": program, "column": column, "cell": cell, "figure": figure}
        for column, (cell, figure) in cells.items()
    ]


def test_a_row_has_a_cell_for_each_training_and_the_largest_difference(tool):
    assert tool.columns_of((1, 2)) == COLUMNS
    cells = {"stock Keras": ("same", None), "1": ("same", 2e-7), "2": ("0.3", 0.3)}
    cells |= {"1, XLA": ("refused", None)}
    row = tool.row(PROGRAM, cells, COLUMNS)
    assert row == "| GAN | a paper | trains | same | 0.3 | refused |  | 0.3 | 1e-04 |"
    by_hand = tool.row(PROGRAM | {"stock_fails": "it needs two"}, cells, COLUMNS)
    assert "| by hand: it needs two |" in by_hand


def test_rows_of_other_programs_stay_unless_the_columns_differ(tool, tmp_path):
    output = tmp_path / "table.md"
    assert tool.rows_in(output, COLUMNS) == {}
    rows = {"GAN": tool.row(PROGRAM, {}, COLUMNS), "VAE": "| VAE | else |"}
    output.write_text(tool.table(list(rows.values()), COLUMNS, "2 cores"))
    assert tool.rows_in(output, COLUMNS) == rows
    assert tool.rows_in(output, COLUMNS[:2]) == {}


def test_a_process_that_ends_costs_the_program_it_was_at(tool, monkeypatch):
    good = dict.fromkeys(("stock Keras", *COLUMNS), ("same", 0.0))
    begun = {"stock Keras": ("same", None), "1": ("same", 0.0)}
    processes = iter([lines("a", good) + lines("b", begun), lines("c", good)])
    monkeypatch.setattr(tool, "run", lambda arguments, timeout_s: next(processes))
    options = argparse.Namespace(group=3, timeout_s=1, replicas=(1, 2))
    found = {name: dict(cells) for name, cells in tool.trained(["a", "b", "c"], options, COLUMNS)}
    assert found["a"] == found["c"] == good
    ended = dict.fromkeys(COLUMNS[1:], ("the process ends", None))
    assert found["b"] == begun | ended


def test_differences_are_relative_and_nan_is_none():
    logs, weights = {"loss": [1.0]}, [np.array([0.0, 3.9]), np.array(5)]
    got = {"loss": [1.0], "more": [2.0]}, [np.array([0.01, 3.9]), np.array(6)]
    assert harness.difference(got, (logs, weights)) == (pytest.approx(0.1), "variable 0")
    wrong = {"loss": [float("nan")]}, weights
    assert harness.difference(wrong, (logs, weights)) == (float("inf"), "loss")
    assert harness.difference(wrong, wrong)[0] == 0
    with pytest.raises(AssertionError, match="logs"):
        harness.difference(({}, weights), (logs, weights))
