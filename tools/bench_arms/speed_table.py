"""What the JSON files of tools/bench.py hold, as a table for people.

Takes rows and a folder; gives Markdown: a line for each row and each machine that it was run on.

    print(speed_table(make_rows(batch=256), pathlib.Path("tools/results")))
"""

import itertools
import json
import pathlib
from collections.abc import Sequence

from bench_arms.rows import Row

HEADER = "| row | ratio | measured | goal | hardware, date |\n|---|---|---|---|---|"
GPUS = ("H100", "H200")  # the columns of the short table


def speed_table(rows: Sequence[Row], folder: pathlib.Path) -> str:
    """Returns the table of all rows; those without a file are "not run"."""
    files = sorted(folder.glob("speed-*.json"))
    results = [json.loads(each.read_text()) for each in files]
    lines = [HEADER]
    for row in rows:
        own = [each for each in results if (each["row"], each["gpus"]) == (row.name, row.gpus)]
        lines += [_line(row, each) for each in own] or [_line(row, {"not run": ""})]
    return "\n".join(lines)


def short_lines(rows: Sequence[Row], folder: pathlib.Path) -> str:
    """Returns a line of README's table for each row that was measured: its ratio on each GPU."""
    results = [json.loads(each.read_text()) for each in sorted(folder.glob("speed-*.json"))]
    lines = []
    for row in rows:
        own = [each for each in results if (each["row"], each["gpus"]) == (row.name, row.gpus)]
        cells = [
            ", ".join(_measured(row, each) for each in own if gpu in each["hardware"])
            for gpu in GPUS
        ]
        if own:
            lines.append(f"| {row.compared} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _line(row: Row, result: dict) -> str:
    """Returns a line of the table."""
    goal = f"{row.goal:g} or {'more' if row.is_rate else 'less'}"
    if row.step_goal is not None:
        goal += f"; {row.step_goal:g} or less"
    where = ", ".join(result[name] for name in ("hardware", "date") if name in result)
    return f"| {row.name} | {row.compared} | {_measured(row, result)} | {goal} | {where} |"


def _measured(row: Row, result: dict) -> str:
    if "not run" in result:
        return f"not run: {result['not run']}" if result["not run"] else "not run"
    if result["ratio"] is None:
        return "94% was not reached on both sides"
    measured = _rounded(result["ratio"], row.goal, more=row.is_rate)
    if row.step_goal is not None:
        ratio = result["p99/p50"]
        spread = "was not measured" if ratio is None else _rounded(ratio, row.step_goal, more=False)
        measured += f"; p99/p50 {spread}"
    return measured


def _rounded(value: float, goal: float, *, more: bool) -> str:
    """Returns three digits, or as many as do not make a missed goal a met one, or the reverse."""

    def is_met(value: float) -> bool:
        return value >= goal if more else value <= goal

    texts = (f"{value:.{digits}g}" for digits in itertools.count(3))
    return next(each for each in texts if is_met(float(each)) == is_met(value))
