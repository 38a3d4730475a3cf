"""Images per second as they were found: the median of several looks at a steady stretch.

Takes times of executions as they come; gives the rate once there are enough.

    watch = Stopwatch(seconds=5.0)
    while not watch.is_done:
        watch.add(Lap(steps=10, seconds=0.1))
    watch.rate(images_per_step=256)
"""

import dataclasses
from collections.abc import Sequence

from tfaccel.diagnostics.compare.judge import quartiles

DROPPED_LAPS = 2  # the first compiles, and what is prefetched makes the next one too quick
DROPPED_SHARE = 0.3  # of the seconds that are then measured, before them: queues fill, clocks rise
LEAST_LAPS = 5
LOOKS = 10


@dataclasses.dataclass(frozen=True)
class Lap:
    """One execution, of one step or of several.

    Attributes:
      steps: in it.
      seconds: that it took.
      waited_s: seconds of those in which steps waited for their batches.
    """

    steps: int
    seconds: float
    waited_s: float = 0.0


@dataclasses.dataclass(frozen=True)
class Rate:
    """Images per second over all replicas.

    Attributes:
      median: of the looks.
      low: their first quartile.
      high: their third.
      looks: how many parts of the steady stretch were looked at.
      steps: in all of them.
      waited_s: seconds of a step in which it waited for its batch, on average.
    """

    median: float
    low: float
    high: float
    looks: int = 1
    steps: int = 1
    waited_s: float = 0.0


class Stopwatch:
    """Collects laps: drops the first ones, and says when there are enough."""

    def __init__(self, *, seconds: float):
        """Has nothing yet.

        Args:
          seconds: to be measured, after the dropped laps; more where fewer than 5 laps fit in.
        """
        self._seconds, self._num_laps, self._dropped_s = seconds, 0, 0.0
        self._kept_s = 0.0  # not summed anew for each lap, which would be a part of the next one
        self._laps: list[Lap] = []

    def add(self, lap: Lap) -> None:
        """Takes one more."""
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
        """Whether there are enough."""
        return self._kept_s >= self._seconds and len(self._laps) >= LEAST_LAPS

    def rate(self, images_per_step: int) -> Rate:
        """Returns what was measured."""
        steps = sum(each.steps for each in self._laps)
        looks = [images_per_step * _steps_per_second(each) for each in cut(self._laps)]
        low, median, high = quartiles(looks)
        waited = sum(each.waited_s for each in self._laps) / steps
        return Rate(median, low, high, len(looks), steps, waited)


def cut(laps: Sequence[Lap]) -> list[list[Lap]]:
    """Returns the laps in up to 10 parts of about one length of time.

    A queue gives several batches at once and then none: a lap alone says little.
    """
    total = sum(each.seconds for each in laps)
    parts, passed = [[] for _ in range(min(LOOKS, len(laps)))], 0.0
    for each in laps:
        middle = (passed + each.seconds / 2) / total if total else 0.0
        parts[min(len(parts) - 1, int(middle * len(parts)))].append(each)
        passed += each.seconds
    return [each for each in parts if each]


def _steps_per_second(laps: Sequence[Lap]) -> float:
    return sum(each.steps for each in laps) / max(1e-9, sum(each.seconds for each in laps))
