"""One row: its arms set up, then timed in turn, and what came of it.

Takes a row and what starts an arm; gives what the row's JSON file holds of it.

    measure_row(row, start, repeats=3, limit_s=600)

Arms stay alive between their turns, so that both sides meet the same state of the machine without
compiling again. They are set up one after the other: XLA and cuDNN choose kernels by timing them.
"""

import contextlib
import statistics
import tempfile
from collections.abc import Callable, Mapping

from bench_arms.arm_process import ArmProcess
from bench_arms.rows import START, Row

# Starts an arm, from its name, its settings, and what to add to its environment.
Start = Callable[[str, dict, Mapping[str, str]], ArmProcess]


def measure_row(row: Row, start: Start, *, repeats: int, limit_s: float) -> dict:
    """Returns the row's arms, what each gave, and the ratio.

    Args:
      row: what is measured.
      start: starts an arm, from its name, its settings, and what to add to its environment.
      repeats: stretches of each arm.
      limit_s: for an arm to be set up, and for a stretch.

    Raises:
      ArmError: an arm died, or said nothing for so long.
    """
    measure = measure_starts if row.measure == START else measure_stretches
    arms = measure(row, start, repeats=repeats, limit_s=limit_s)
    sides = [{name: each["median"] for name, each in side.items()} for side in arms]
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
        # To time each step is to wait for it, so that the arms that do are not the quickest.
        ratio = statistics.median(
            each["step_p99_s"] / each["step_p50_s"]
            for arm in arms[0].values()
            for each in arm["stretches"]
            if "step_p99_s" in each
        )
        result |= {"p99/p50": ratio, "is_met": result["is_met"] and ratio <= row.step_goal}
    environment = next(iter(arms[0].values()))["environment"]
    return result | {"environment": environment, "arms": arms[0], "rivals": arms[1]}


def measure_stretches(row: Row, start: Start, *, repeats: int, limit_s: float) -> tuple:
    """Returns both sides' arms, whose stretches took turns."""
    with contextlib.ExitStack() as stack:

        def set_up(name, settings):
            arm = stack.enter_context(start(name, settings, {}))
            return arm, as_recorded(arm.ready(limit_s=limit_s)) | {"stretches": []}

        sides = [
            {name: set_up(name, settings) for name, settings in arms.items()}
            for arms in (row.ours, row.rivals)
        ]
        both = [each for side in sides for each in side.values()]
        for _ in range(repeats):
            for arm, record in both:
                record["stretches"].append(with_percentiles(arm.stretch(limit_s=limit_s)))
        for arm, _ in both:
            arm.tell_end()  # all at once: then none is waited for long
    for _, record in both:
        record["median"] = statistics.median(each[row.measure] for each in record["stretches"])
    return tuple({name: record for name, (_, record) in side.items()} for side in sides)


def measure_starts(row: Row, start: Start, *, repeats: int, limit_s: float) -> tuple:
    """Returns the starts of one arm, with a warm compile cache, and with a cold one, in turn.

    Each pair has a new folder for what is cached. A process starts when the one before has ended.
    """
    ((name, settings),) = row.ours.items()
    sides = ({}, {})
    for _ in range(repeats):
        with tempfile.TemporaryDirectory() as folder:
            for side, label in ((1, "cold"), (0, "warm")):
                with start(f"{name}, {label}", settings, {"XDG_CACHE_HOME": folder}) as process:
                    ready = as_recorded(process.ready(limit_s=limit_s))
                arm = sides[side].setdefault(label, ready | {"starts": []})
                arm["starts"].append(ready[START])
    for side in sides:
        for arm in side.values():
            arm["median"] = statistics.median(arm["starts"])
    return sides


def as_recorded(ready: dict) -> dict:
    """Returns what an arm said of itself, less what concerns this run of it alone."""
    settings = {
        name: value
        for name, value in ready["settings"].items()
        if name not in ("driver", "started")
    }
    return ready | {"settings": settings}


def with_percentiles(result: dict) -> dict:
    """Returns a stretch with the median and the 99th percentile of its step times, not each."""
    result = dict(result)
    seconds = result.pop("step_seconds", None)
    if not seconds:
        return result
    hundredths = statistics.quantiles(seconds, n=100, method="inclusive")
    return result | {"step_p50_s": hundredths[49], "step_p99_s": hundredths[98]}
