"""The results in the JSON files of tools/bench.py, as Markdown tables.

The long table has a line for each row and each machine on which the row ran. The short one, for
README.md, has a line for each row.

    print(speed_table(make_rows(batch=256), pathlib.Path("tools/results")))
"""

import itertools
import json
import pathlib
from collections.abc import Iterator, Sequence

from bench_arms.rows import Row

HEADER = "| row | ratio | measured | goal | hardware, date |\n|---|---|---|---|---|"
GPUS = ("H100", "H200")  # the columns of the short table


def speed_table(rows: Sequence[Row], folder: pathlib.Path) -> str:
    """Returns the table of all rows; a row without a file is "not run"."""
    lines = [HEADER]
    for row, results in _results_of(rows, folder):
        lines += [_line(row, each) for each in results or [{"not run": ""}]]
    return "\n".join(lines)


def short_lines(rows: Sequence[Row], folder: pathlib.Path) -> str:
    """Returns a line of README's table for each row that was measured: its ratio on each GPU."""
    lines = []
    for row, results in _results_of(rows, folder):
        cells = [
            ", ".join(_measured(row, each) for each in results if gpu in each["hardware"])
            for gpu in GPUS
        ]
        if results:
            lines.append(f"| {row.compared} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _results_of(rows: Sequence[Row], folder: pathlib.Path) -> Iterator[tuple[Row, list[dict]]]:
    """Yields each row with its results, in the order of the names of their files."""
    results = [json.loads(each.read_text()) for each in sorted(folder.glob("speed-*.json"))]
    for row in rows:
        key = row.name, row.gpus
        yield row, [each for each in results if (each["row"], each["gpus"]) == key]


def _line(row: Row, result: dict) -> str:
    """Returns a line of the table."""
    goal = f"{row.goal:g} or {'more' if row.is_rate else 'less'}"
    if row.step_goal is not None:
        goal += f"; {row.step_goal:g} or less"
    if row.memory_goal is not None:
        goal += f"; memory {row.memory_goal:g} or less"
    where = ", ".join(result[name] for name in ("hardware", "date") if name in result)
    return f"| {row.name} | {row.compared} | {_measured(row, result)} | {goal} | {where} |"


def _measured(row: Row, result: dict) -> str:
    if "not run" in result:
        return f"not run: {result['not run']}" if result["not run"] else "not run"
    if result["ratio"] is None:
        return "at least one side did not reach 94%"
    measured = _rounded(result["ratio"], row.goal, more=row.is_rate)
    if row.step_goal is not None:
        ratio = result["p99/p50"]
        spread = "was not measured" if ratio is None else _rounded(ratio, row.step_goal, more=False)
        measured += f"; p99/p50 {spread}"
    if result.get("memory ratio") is not None:
        memory = result["memory ratio"]
        in_words = f"{memory:.3g}"
        if row.memory_goal is not None:
            in_words = _rounded(memory, row.memory_goal, more=False)
        measured += f"; memory {in_words}"
    for name in result.get("without", ()):
        measured += f"; without the rival {name}"
    return measured


def _rounded(value: float, goal: float, *, more: bool) -> str:
    """Returns the value with three digits; with more if rounding would change "goal met"."""

    def is_met(value: float) -> bool:
        return value >= goal if more else value <= goal

    texts = (f"{value:.{digits}g}" for digits in itertools.count(3))
    return next(each for each in texts if is_met(float(each)) == is_met(value))
