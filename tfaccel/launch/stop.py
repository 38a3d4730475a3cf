"""Signals that tell the launcher to stop, and that it passes on to its ranks.

with Stop() as stop:
    stop.signal, stop.count     # 15, 1 once there was a SIGTERM
"""

import math
import signal
import time

HEARD = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT, signal.SIGHUP)


def hear_no_more() -> None:
    """Ignores the signals, so that a process at its end keeps its exit code.

    Python takes 20 ms to end, and srun -K1 signals all launchers as soon as one has ended.
    """
    for each in HEARD:
        signal.signal(each, signal.SIG_IGN)


class Stop:
    """The signals that tell the launcher to stop.

    Attributes:
      signal: the number of the first signal; 0 if there was none. It is SIGTERM for SIGHUP, which
        a lost terminal or ssh session sends, because ranks do not handle SIGHUP.
      count: number of signals. SIGHUP counts only if there was no other: the kernel and the shell
        each send one, and systemd sends one with its SIGTERM.
    """

    def __init__(self):
        """Handles no signals yet."""
        self.signal = self.count = self._num_others = 0
        self._since = math.inf

    @property
    def age_s(self) -> float:
        """Seconds since the first signal; below 0 if there was none."""
        return time.monotonic() - self._since

    def __enter__(self) -> "Stop":
        """Installs the handlers."""
        # nohup makes processes ignore SIGHUP, and that must stay so.
        heard = HEARD if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN else HEARD[:-1]
        self._before = {each: signal.signal(each, self._hear) for each in heard}
        return self

    def __exit__(self, *_):
        """Restores the handlers, except for signals that are ignored now; see `hear_no_more`."""
        for number, handler in self._before.items():
            if signal.getsignal(number) != signal.SIG_IGN:
                signal.signal(number, handler)

    def _hear(self, number: int, _frame) -> None:
        if number != signal.SIGHUP:
            self._num_others += 1
        self.count = max(1, self._num_others)
        if not self.signal:
            self.signal = signal.SIGTERM if number == signal.SIGHUP else number
            self._since = time.monotonic()
