"""What each arm of a network's row reached, as lines of text.

print(*arm_lines(found), sep="\\n")

ours mixed_bfloat16: 3,144 rows/s, 40.7 ms a step, spread 0.4%; peak 9,549 MiB, 963 of batches; ...
"""

import statistics
from collections.abc import Iterator

from bench_arms.rows import MEMORY, START


def arm_lines(found: dict) -> Iterator[str]:
    """Yields a line for each arm of a result: its figures, or why it has none."""
    for side, arms in (("ours", found["arms"]), ("rival", found["rivals"])):
        for name, arm in arms.items():
            # What the log of an arm said last is printed when it fails.
            whys = [arm[why].split("; its last")[0] for why in ("failed", "left out") if why in arm]
            parts = [*_figures(arm), *whys]
            yield f"  {side} {name}: {'; '.join(parts)}"


def _figures(arm: dict) -> Iterator[str]:
    """Yields the figures of an arm with a stretch, in groups."""
    if "starts" in arm:
        yield from _start_figures(arm["starts"])
    stretches = arm.get("stretches")
    if not stretches:
        return
    rates = [f"{arm['median']:,.0f} rows/s"]
    if "tokens_per_second" in stretches[0]:
        tokens = statistics.median(each["tokens_per_second"] for each in stretches)
        rates.append(f"{tokens:,.0f} tokens/s")
    step_ms = statistics.median(each["step_ms"] for each in stretches)
    yield ", ".join([*rates, f"{step_ms:.2f} ms a step, spread {arm['spread']:.1%}"])
    peaks = [each[MEMORY] for each in stretches]
    if None not in peaks:
        yield f"peak {max(peaks):,.0f} MiB, {stretches[0]['data_mib']:,.0f} of them batches"
    yield f"first step after {arm[START]:.1f} s"


def _start_figures(starts: list[dict]) -> Iterator[str]:
    """Yields the figures of an arm that was started, of which the medians count."""

    def median(name):
        values = [each[name] for each in starts if each[name] is not None]
        return statistics.median(values) if values else float("nan")

    yield f"first step after {median(START):.1f} s"
    yield f"1,000 steps after {median('seconds_to_step_1000'):.1f} s"
    full = f"full speed after {median('seconds_to_full_speed'):.1f} s"
    yield f"{full} ({median('steps_per_second'):.1f} steps/s)"
