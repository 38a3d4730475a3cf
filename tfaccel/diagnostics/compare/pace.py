"""Chooses stretches so short that more than the first variant fits into the time; only arithmetic.

This module takes the pace of the plain variant's first steps. It gives the length of the stretches,
and the number of minutes to ask for.

    settings = fitted(settings._replace(variants=8, left_s=120), pace)
    minutes_for(settings, pace)

The cost of a variant is its start, its warm-up, and 2 * `repeats` stretches: its own, in turn with
those of the best variant so far. The plain variant first has `repeats` stretches alone. A second
process then trains it with another seed.
"""

import dataclasses
import math
from typing import NamedTuple

# A process needs this many steps to measure how long a step takes: the first step compiles.
LEARNING = 3
# Single steps differ, so a stretch with fewer steps, or of less time, tells too little.
LEAST_STEPS, LEAST_STRETCH_S = 3, 1.0


class Settings(NamedTuple):
    """How a variant's process trains.

    Attributes:
      steps: the number of timed steps in a stretch.
      lead_in: untimed steps before each stretch; they use up the batches that were prepared during
        the pause.
      warm_up: the least number of untimed steps after the start.
      repeats: the number of stretches for each variant.
      variants: the number of variants that share `left_s`, including the plain variant and its run
        with another seed.
      left_s: the seconds into which the plain variant's process fits all of this; None if the
        settings are final.
    """

    steps: int
    lead_in: int
    warm_up: int
    repeats: int
    variants: int = 0
    left_s: float | None = None


@dataclasses.dataclass(frozen=True)
class Pace:
    """The pace of a process, measured in its first steps.

    Attributes:
      start_s: seconds from the start of the process to the end of its first step.
      step_s: seconds for each later step.
      epoch_steps: steps in an epoch.
      execution_steps: steps in an execution; the process reads the clock after each execution.
    """

    start_s: float
    step_s: float
    epoch_steps: int
    execution_steps: int = 1


def fitted(settings: Settings, pace: Pace) -> Settings:
    """Returns the settings with the longest stretches that fit into the time.

    The stretches are never longer than requested. If even the shortest useful stretch does not fit,
    the settings have that length, which gives as many figures as possible.
    """
    if settings.left_s is None or seconds_for(settings, pace) <= settings.left_s:
        return settings
    least = min(settings.steps, least_steps(pace))
    for steps in range(settings.steps - 1, least, -1):
        shorter = shortened(settings, steps)
        if seconds_for(shorter, pace) <= settings.left_s:
            return shorter
    return shortened(settings, least)


def shortened(settings: Settings, steps: int) -> Settings:
    """Returns the settings with stretches of `steps` steps, a short lead-in and a short warm-up."""
    lead_in = max(1, min(settings.lead_in, steps // 5))
    return settings._replace(steps=steps, lead_in=lead_in, warm_up=min(settings.warm_up, LEARNING))


def least_steps(pace: Pace) -> int:
    """Returns the number of steps in the shortest useful stretch."""
    return max(LEAST_STEPS, math.ceil(LEAST_STRETCH_S / max(1e-9, pace.step_s)))


def seconds_for(settings: Settings, pace: Pace) -> float:
    """Returns the seconds that all variants take at this pace."""
    first_s = pace.start_s + pace.step_s * warm_up_steps(settings, pace)
    stretches = (2 * settings.variants - 1) * settings.repeats
    stretch_s = pace.step_s * _steps_with_lead_in(settings, pace)
    return settings.variants * first_s + stretches * stretch_s


def minutes_for(settings: Settings, pace: Pace) -> int:
    """Returns the least number of whole minutes into which all variants fit at this pace."""
    return max(1, math.ceil(seconds_for(settings, pace) / 60))


def warm_up_steps(settings: Settings, pace: Pace) -> int:
    """Returns the number of untimed steps before the first lead-in.

    If the first epoch would end during the stretches, the warm-up contains the end of the epoch. A
    partial batch, or a shorter execution, is compiled there.
    """
    stretches = settings.repeats * _steps_with_lead_in(settings, pace)
    epoch_ends_in_stretches = (
        pace.epoch_steps <= _whole_executions(settings.warm_up, pace) + stretches
    )
    return max(settings.warm_up, pace.epoch_steps if epoch_ends_in_stretches else 0)


def _steps_with_lead_in(settings: Settings, pace: Pace) -> int:
    return _whole_executions(settings.lead_in, pace) + _whole_executions(settings.steps, pace)


def _whole_executions(steps: int, pace: Pace) -> int:
    """Returns the steps, rounded up to whole executions."""
    return -(-steps // pace.execution_steps) * pace.execution_steps
