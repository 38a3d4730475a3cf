"""How long the parts of a call of tools/bench.py may take.

This module takes the limit of each part and the end of the whole call, and gives the time that is
left.

    limit = TimeLimit(1200, ends=time.monotonic() + 580)
    arm.ready(limit_s=limit.left(kept_s=limit.kept_for_stretches()))
"""

import dataclasses
import math
import sys
import time
from collections.abc import Callable

FOR_STRETCHES_S = 100  # four arms with three stretches of 4 seconds and their untimed steps


@dataclasses.dataclass(frozen=True)
class TimeLimit:
    """The time limits of a call.

    Attributes:
      each_s: the limit for the setup of an arm, and for each stretch.
      ends: when the whole call shall have ended, by `clock`.
      clock: returns the time in seconds.
    """

    each_s: float
    ends: float = math.inf
    clock: Callable[[], float] = time.monotonic

    def left(self, *, kept_s: float = 0) -> float:
        """Returns the seconds that the next part may take; `kept_s` are kept for later parts."""
        return min(self.each_s, self.ends - kept_s - self.clock())

    def allows(self, seconds: float) -> bool:
        """Checks whether so many seconds are left for the whole call."""
        return self.clock() + seconds <= self.ends

    def kept_for_stretches(self) -> float:
        """Returns the seconds that setups must leave: at most a quarter of those that are left."""
        return min(FOR_STRETCHES_S, max(0, self.ends - self.clock()) / 4)

    def say_no_further(self, turn: int, repeats: int, seconds: float) -> None:
        """Says that the time limit has no room for a further turn."""
        why = f"the time limit has no room for a further one of {seconds:.0f} s"
        print(f"bench: ends after {turn} of {repeats} turns: {why}", file=sys.stderr, flush=True)
