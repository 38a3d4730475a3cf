"""Measures how long a network's training takes to start, in processes of their own.

This module takes a row of START and a function that starts an arm. After each turn it gives the
records of both sides. Each arm starts with empty compile caches, after the one before it has ended.
Ours then starts once more with the caches that it filled.

    for sides in measure_starts(row, start, repeats=3, limit=TimeLimit(600)):
        ...

An arm trains at least FIRST_STEPS steps, and notes the time after every STEPS_OF_MARK. Then it
waits for the device, so the time is that at which the steps were done.
"""

import itertools
import statistics
import sys
import tempfile
from collections.abc import Iterator, Sequence

from bench_arms.arm_records import OUT, Sides, as_recorded, check_any_is_left, out_if_it_fails
from bench_arms.rows import START, Row
from bench_arms.time_limit import TimeLimit

# The folders in which tfaccel and torch.compile keep what they compiled for later processes.
CACHES = ("XDG_CACHE_HOME", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")
FULL_SPEED = 0.95  # of the rate at the end, for three marks
NUM_LAST = 20  # marks at the end, whose median rate is the full speed


def measure_starts(row: Row, start, *, repeats: int, limit: TimeLimit) -> Iterator[Sides]:
    """Yields the records of both sides after each turn, in which every arm starts."""
    sides = ({}, {})
    turn_s = 0
    for number in range(repeats):
        if number and not limit.allows(turn_s):
            limit.say_no_further(number, repeats, turn_s)
            return
        began = limit.clock()
        for side, arms, is_ours in zip(sides, (row.ours, row.rivals), (True, False), strict=True):
            for name, settings in arms.items():
                with tempfile.TemporaryDirectory() as folder:
                    names = (name, f"{name}, warm") if is_ours else (name,)
                    for each in names:
                        record = side.setdefault(each, {})
                        if OUT & (side[name].keys() | record.keys()):
                            break
                        _start(each, settings, folder, start, record, limit)
            for name in side:
                if not name.endswith(", warm") and "starts" in side[name]:
                    side[name]["median"] = statistics.median(
                        each[START] for each in side[name]["starts"]
                    )
            check_any_is_left(side)
        turn_s = limit.clock() - began
        yield sides


def _start(name: str, settings: dict, folder: str, start, record: dict, limit: TimeLimit) -> None:
    """Starts an arm once, and adds its figures to its record."""
    with (
        start(name, settings, dict.fromkeys(CACHES, folder)) as process,
        out_if_it_fails(process, record),
    ):
        ready = as_recorded(process.ready(limit_s=max(1, limit.left())))
        starts = record.get("starts", [])
        marks = ready.pop("marks")
        ready.pop(START)
        record |= ready | {"starts": [*starts, found := figures(marks)]}
        reached = f"{found[START]:.1f} s, full speed after {found['seconds_to_full_speed']:.1f} s"
        print(f"bench: arm '{name}': first step after {reached}", file=sys.stderr, flush=True)


def figures(marks: Sequence[tuple[int, float]]) -> dict:
    """Returns the figures of a start.

    Args:
      marks: numbers of steps that were done, and the seconds since the process's start.
    """
    rates = [
        (then - step) / (at - before) for (step, before), (then, at) in itertools.pairwise(marks)
    ]
    full = statistics.median(rates[-NUM_LAST:])
    is_full = [rate >= FULL_SPEED * full for rate in rates]
    reached = next(
        (index for index in range(len(rates)) if all(is_full[index : index + 3])), len(rates)
    )
    thousandth = next((at for step, at in marks if step >= 1000), None)
    return {
        START: marks[0][1],
        "seconds_to_step_1000": thousandth,
        "seconds_to_full_speed": marks[reached][1],
        "steps_per_second": full,
        "marks": [list(each) for each in marks],
    }
