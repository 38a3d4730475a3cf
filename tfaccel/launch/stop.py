"""Signals that tell the launcher to stop, which are for its ranks.

with Stop() as stop:
    stop.signal, stop.count     # 15, 1 once there was a SIGTERM
"""

import math
import signal
import time

HEARD = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)


class Stop:
    """The signals that tell the launcher to stop.

    Attributes:
      signal: the first one's number; 0 while there was none.
      count: how many came.
    """

    def __init__(self):
        """Hears nothing yet."""
        self.signal = self.count = 0
        self._since = math.inf

    @property
    def age_s(self) -> float:
        """Seconds since the first one; below 0 while there was none."""
        return time.monotonic() - self._since

    def __enter__(self) -> "Stop":
        """Installs the handlers."""
        self._before = {each: signal.signal(each, self._hear) for each in HEARD}
        return self

    def __exit__(self, *_):
        """Puts back what was there."""
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _hear(self, number: int, _frame) -> None:
        self.count += 1
        if self.count == 1:
            self.signal, self._since = number, time.monotonic()
