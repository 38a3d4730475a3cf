"""Turns the times of executions into images per second: a median, and quartiles.

This module takes the time of each execution, drops the warm-up, and says when there are enough. The
rest is cut into parts of about equal length, and each part gives one value.

    watch = Stopwatch(seconds=5.0)
    while not watch.is_done:
        watch.add(Lap(steps=10, seconds=0.1))
    watch.rate(images_per_step=256)
"""

import dataclasses
from collections.abc import Sequence

from tfaccel.diagnostics.compare.judge import quartiles

DROPPED_LAPS = 2  # the first lap compiles, and prefetched batches make the second too quick
# A further warm-up, as a share of the measured seconds: queues fill, and clock rates rise.
DROPPED_SHARE = 0.3
LEAST_LAPS = 5
MAX_PARTS = 10


@dataclasses.dataclass(frozen=True)
class Lap:
    """The time of one execution.

    Attributes:
      steps: the number of steps in the execution.
      seconds: the seconds that it took.
      waited_s: the part of these seconds in which steps waited for their batches.
    """

    steps: int
    seconds: float
    waited_s: float = 0.0


@dataclasses.dataclass(frozen=True)
class Rate:
    """Images per second over all replicas.

    Attributes:
      median: the median of the parts.
      low: the first quartile.
      high: the third quartile.
      looks: the number of parts.
      steps: the number of steps in all parts.
      waited_s: the mean seconds that a step waited for its batch.
    """

    median: float
    low: float
    high: float
    looks: int = 1
    steps: int = 1
    waited_s: float = 0.0


class Stopwatch:
    """Collects laps, drops the first ones, and says when there are enough."""

    def __init__(self, *, seconds: float):
        """Measures for `seconds` after the dropped laps; longer if fewer than 5 laps fit in."""
        self._seconds, self._num_laps, self._dropped_s = seconds, 0, 0.0
        self._kept_s = 0.0  # a running sum, because summing all laps would slow down the next lap
        self._laps: list[Lap] = []

    def add(self, lap: Lap) -> None:
        """Adds a lap."""
        self._num_laps += 1
        if self._num_laps <= DROPPED_LAPS:
            return
        if self._dropped_s < DROPPED_SHARE * self._seconds:
            self._dropped_s += lap.seconds
            return
        self._laps.append(lap)
        self._kept_s += lap.seconds

    @property
    def is_done(self) -> bool:
        """True if the laps cover enough seconds, and there are at least 5."""
        return self._kept_s >= self._seconds and len(self._laps) >= LEAST_LAPS

    def rate(self, images_per_step: int) -> Rate:
        """Returns the rate of all laps that were not dropped."""
        steps = sum(each.steps for each in self._laps)
        looks = [images_per_step * _steps_per_second(each) for each in cut(self._laps)]
        low, median, high = quartiles(looks)
        waited = sum(each.waited_s for each in self._laps) / steps
        return Rate(median, low, high, len(looks), steps, waited)


def cut(laps: Sequence[Lap]) -> list[list[Lap]]:
    """Cuts the laps into at most 10 parts of about equal duration.

    A single lap tells little, because a queue may give several batches at once and then none.
    """
    total = sum(each.seconds for each in laps)
    parts, passed = [[] for _ in range(min(MAX_PARTS, len(laps)))], 0.0
    for each in laps:
        middle = (passed + each.seconds / 2) / total if total else 0.0
        parts[min(len(parts) - 1, int(middle * len(parts)))].append(each)
        passed += each.seconds
    return [each for each in parts if each]


def _steps_per_second(laps: Sequence[Lap]) -> float:
    return sum(each.steps for each in laps) / max(1e-9, sum(each.seconds for each in laps))
