"""How long stretches can be, so that more than the first variant fits into the time. Arithmetic.

Takes what the plain one's first steps showed; gives the stretches, and the minutes to ask for.

    settings = fitted(settings, pace, variants=8, left_s=120)
    minutes_for(settings, pace, variants=8)

A variant costs its start, its warming up, and its stretches in turn with the best so far: twice
`repeats`. The plain one has `repeats` of its own, and then a second process with another seed.
"""

import dataclasses
import math
from typing import NamedTuple

# Steps in which a variant's process learns how long one takes: the first compiles.
LEARNING = 3
# A stretch of fewer steps, or of less time, says too little: single steps differ.
LEAST_STEPS, LEAST_STRETCH_S = 3, 1.0


class Settings(NamedTuple):
    """How a variant's process trains.

    Attributes:
      steps: of a stretch that is timed.
      lead_in: steps before it, in which what was made ahead in the pause is used up.
      warm_up: the first steps of all, at least.
      repeats: stretches of each variant.
      variants: that share `left_s`, the plain one and its other seed among them.
      left_s: seconds in which the plain one's process makes all of this fit; None where it is to
        be taken as it is.
    """

    steps: int
    lead_in: int
    warm_up: int
    repeats: int
    variants: int = 0
    left_s: float | None = None


@dataclasses.dataclass(frozen=True)
class Pace:
    """What a process's first steps showed.

    Attributes:
      start_s: seconds from its start to its first step's end.
      step_s: seconds of a step after that.
      epoch_steps: of an epoch.
      execution_steps: between two looks.
    """

    start_s: float
    step_s: float
    epoch_steps: int
    execution_steps: int = 1


def fitted(settings: Settings, pace: Pace) -> Settings:
    """Returns the settings with stretches as long as the time allows, no longer than asked for.

    Where it allows not even the shortest, they are the shortest: as many figures as possible.
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
    """Returns the settings with stretches of so many steps, and little before them."""
    lead_in = max(1, min(settings.lead_in, steps // 5))
    return settings._replace(steps=steps, lead_in=lead_in, warm_up=min(settings.warm_up, LEARNING))


def least_steps(pace: Pace) -> int:
    """Returns the steps of the shortest stretch that says something."""
    return max(LEAST_STEPS, math.ceil(LEAST_STRETCH_S / max(1e-9, pace.step_s)))


def seconds_for(settings: Settings, pace: Pace) -> float:
    """Returns how long all variants take at this pace."""
    steps = {"epoch_steps": pace.epoch_steps, "execution_steps": pace.execution_steps}
    first_s = pace.start_s + pace.step_s * warm_up_steps(settings, **steps)
    whole = _whole(settings.lead_in, pace) + _whole(settings.steps, pace)
    stretches = (2 * settings.variants - 1) * settings.repeats
    return settings.variants * first_s + stretches * whole * pace.step_s


def minutes_for(settings: Settings, pace: Pace) -> int:
    """Returns the whole minutes in which all variants fit at this pace."""
    return max(1, math.ceil(seconds_for(settings, pace) / 60))


def warm_up_steps(settings: Settings, *, epoch_steps: int, execution_steps: int) -> int:
    """Returns the steps before the first stretch.

    Where an epoch would end in what is timed, its end comes before: a partial batch, or fewer steps
    in an execution, are compiled there.

    Args:
      settings: how it trains.
      epoch_steps: of an epoch.
      execution_steps: steps between two looks.
    """

    def whole(steps: int) -> int:
        return -(-steps // execution_steps) * execution_steps

    timed = settings.repeats * (whole(settings.lead_in) + whole(settings.steps))
    ends_in_between = epoch_steps <= whole(settings.warm_up) + timed
    return max(settings.warm_up, epoch_steps if ends_in_between else 0)


def _whole(steps: int, pace: Pace) -> int:
    return -(-steps // pace.execution_steps) * pace.execution_steps
