"""Measures one row: sets up its arms, times them in turn, and computes the ratio.

This module takes a row and a function that starts an arm. After each turn it gives the result for
the row's JSON file.

    for found in measure_row(row, start, repeats=3, limit=TimeLimit(600)):
        write(found)

Arms stay alive between their turns, so that both sides meet the same state of the machine without
compiling again. They are set up one after the other, because XLA and cuDNN choose kernels by timing
them. If an arm fails, its side continues with its other arms. An arm that is far behind the best of
its side gets no further turns. A time limit for the whole call leaves out arms that are not set up
in time, and then turns.
"""

import contextlib
import statistics
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping

from bench_arms.arm_process import ArmProcess
from bench_arms.arm_records import OUT, Sides, as_recorded, check_any_is_left, out_if_it_fails
from bench_arms.rows import MEMORY, ROWS_RATE, START, Row
from bench_arms.starts import measure_starts
from bench_arms.time_limit import TimeLimit

# Starts an arm from its name, its settings, and variables to add to its environment.
Start = Callable[[str, dict, Mapping[str, str]], ArmProcess]
MAX_BEHIND = 0.1  # the turns of one arm differ by less than 0.01


def measure_row(
    row: Row, start: Start, *, repeats: int, limit: TimeLimit, together: bool = False
) -> Iterator[dict]:
    """Measures a row; yields its result so far after each turn of all arms.

    Args:
      row: the row to measure.
      start: starts an arm from its name, its settings, and variables to add to its environment.
      repeats: the number of turns.
      limit: the time limit for the setup of an arm, for each stretch, and for the whole call.
      together: whether the arms are set up at the same time; not of START.

    Raises:
      ArmError: all arms of a side died, or did not answer in time.
    """
    if row.measure == START:
        turns = measure_starts(row, start, repeats=repeats, limit=limit)
    else:
        turns = measure_stretches(row, start, repeats=repeats, limit=limit, together=together)
    for number, sides in enumerate(turns, start=1):
        yield {"repeats": number} | result_of(row, sides)


def result_of(row: Row, arms: Sides) -> dict:
    """Returns the records of the arms, and the ratio of the best arms of both sides."""
    sides = [
        {
            name: each["median"]
            for name, each in side.items()
            if "median" in each and "failed" not in each
        }
        for side in arms
    ]
    best = [(max if row.is_rate else min)(side, key=side.get) for side in sides]
    ours, rivals = (side[name] for side, name in zip(sides, best, strict=True))
    result = {
        "ratio": ours / rivals,
        "is_met": ours / rivals >= row.goal if row.is_rate else ours / rivals <= row.goal,
        "ours": best[0],
        "best rival": best[1],
        "ratio to each rival": {name: ours / each for name, each in sides[1].items()},
    }
    if row.step_goal is not None:
        # Only arms with one step in each execution have step times; they need not be the quickest.
        ratios = [
            each["step_p99_s"] / each["step_p50_s"]
            for arm in arms[0].values()
            for each in arm["stretches"]
            if "step_p99_s" in each
        ]
        # None if all of these arms failed; JSON has no infinity.
        ratio = statistics.median(ratios) if ratios else None
        is_even = ratio is not None and ratio <= row.step_goal
        result |= {"p99/p50": ratio, "is_met": result["is_met"] and is_even}
    if row.measure == ROWS_RATE:
        ratio = memory_ratio(arms[0][best[0]], [arms[1][name] for name in sides[1]])
        result["memory ratio"] = ratio
        if row.memory_goal is not None:
            is_small = ratio is not None and ratio <= row.memory_goal
            result["is_met"] = result["is_met"] and is_small
    environment = arms[0][best[0]]["environment"]
    return result | {"environment": environment, "arms": arms[0], "rivals": arms[1]}


def memory_ratio(ours: dict, rivals: Iterable[dict]) -> float | None:
    """Returns the peak memory of an arm divided by the least of its rivals; None without GPUs.

    The batches that an arm keeps on the device, so that it need not wait for data, do not count.
    """

    def memory_mib(arm):
        stretches = arm["stretches"]
        return max(each[MEMORY] - each["data_mib"] for each in stretches)

    if any(each[MEMORY] is None for arm in (ours, *rivals) for each in arm["stretches"]):
        return None
    return memory_mib(ours) / min(map(memory_mib, rivals))


def measure_stretches(
    row: Row, start: Start, *, repeats: int, limit: TimeLimit, together: bool = False
) -> Iterator[Sides]:
    """Yields the records of both sides after each turn; in a turn, each arm has a stretch."""
    sides, running, waiting = ({}, {}), [], []
    kept_s = limit.kept_for_stretches()
    with contextlib.ExitStack() as stack:
        for side, arms in zip(sides, (row.ours, row.rivals), strict=True):
            for name, settings in arms.items():
                record = side[name] = {"stretches": []}
                left_s = limit.left(kept_s=kept_s)
                if left_s <= 0:
                    record["failed"] = f"arm '{name}' was not started: the time limit is reached"
                    print(f"bench: {record['failed']}", file=sys.stderr, flush=True)
                    continue
                arm = stack.enter_context(start(name, settings, {}))
                running.append((arm, record))
                if together:
                    waiting.append((name, arm, record))
                else:
                    wait_for(name, arm, record, limit_s=left_s)
            if not together:
                check_any_is_left(side)
        for name, arm, record in waiting:
            wait_for(name, arm, record, limit_s=max(1, limit.left(kept_s=kept_s)))
        for side in sides:
            check_any_is_left(side)
        turn_s = 0
        for turn in range(repeats):
            if turn and not limit.allows(turn_s):
                limit.say_no_further(turn, repeats, turn_s)
                break
            began = limit.clock()
            for side in sides if turn else ():
                leave_out_slow(row, side, f"after {turn} of {repeats} turns")
            end_all(arm for arm, record in running if "left out" in record)
            running = [each for each in running if not OUT & each[1].keys()]
            for arm, record in running:
                with out_if_it_fails(arm, record):
                    stretch = with_percentiles(arm.stretch(limit_s=max(1, limit.left())))
                    record["stretches"].append(stretch)
                    values = [each[row.measure] for each in record["stretches"]]
                    record["median"] = statistics.median(values)
                    record["spread"] = (max(values) - min(values)) / record["median"]
            for side in sides:
                check_any_is_left(side)
            turn_s = limit.clock() - began
            yield sides
        for arm, _ in running:
            arm.tell_end()  # all at once, so that they end at the same time


def wait_for(name: str, arm: ArmProcess, record: dict, *, limit_s: float) -> None:
    """Waits until an arm is set up, and records how; an arm that fails is out."""
    with out_if_it_fails(arm, record):
        record |= as_recorded(arm.ready(limit_s=limit_s))
        took = f"its first step ended after {record[START]:.1f} s"
        print(f"bench: set up arm '{name}': {took}", file=sys.stderr, flush=True)


def leave_out_slow(row: Row, side: dict[str, dict], when: str) -> None:
    """Marks the arms that are far behind the best of their side as left out."""
    medians = {name: each["median"] for name, each in side.items() if not OUT & each.keys()}
    best = (max if row.is_rate else min)(medians.values())
    for name, value in medians.items():
        behind = 1 - (value / best if row.is_rate else best / value)
        # An arm for step times may be slow, because it serves another measure.
        if behind > MAX_BEHIND and not side[name]["settings"].get("step_times"):
            side[name]["left out"] = f"{behind:.0%} behind the best of its side, {when}"


def end_all(arms: Iterable[ArmProcess]) -> None:
    """Ends arms, and waits until they have ended."""
    arms = list(arms)
    for arm in arms:
        arm.tell_end()
    for arm in arms:
        arm.kill()


def with_percentiles(result: dict) -> dict:
    """Replaces the step times of a stretch by their median and their 99th percentile."""
    result = dict(result)
    seconds = result.pop("step_seconds", None)
    if not seconds:
        return result
    hundredths = statistics.quantiles(seconds, n=100, method="inclusive")
    return result | {"step_p50_s": hundredths[49], "step_p99_s": hundredths[98]}
