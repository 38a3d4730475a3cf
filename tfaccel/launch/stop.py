"""Signals that tell the launcher to stop, which are for its ranks.

with Stop() as stop:
    stop.signal, stop.count     # 15, 1 once there was a SIGTERM
"""

import math
import signal
import time

HEARD = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT, signal.SIGHUP)


def hear_no_more() -> None:
    """Ignores them, so that a process that has nothing left to do ends with its own exit code.

    That takes Python 20 ms, and srun -K1 signals all as soon as one launcher has ended.
    """
    for each in HEARD:
        signal.signal(each, signal.SIG_IGN)


class Stop:
    """The signals that tell the launcher to stop.

    Attributes:
      signal: the first one's number; 0 while there was none. SIGTERM for SIGHUP, by which a lost
        terminal or ssh session asks for the same, and which ranks do not hear.
      count: how many came, where SIGHUP counts only if no other did: the kernel and the shell
        each send one, and systemd one beside its SIGTERM.
    """

    def __init__(self):
        """Hears nothing yet."""
        self.signal = self.count = self._num_others = 0
        self._since = math.inf

    @property
    def age_s(self) -> float:
        """Seconds since the first one; below 0 while there was none."""
        return time.monotonic() - self._since

    def __enter__(self) -> "Stop":
        """Installs the handlers."""
        # Under nohup, SIGHUP is ignored, and stays so.
        heard = HEARD if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN else HEARD[:-1]
        self._before = {each: signal.signal(each, self._hear) for each in heard}
        return self

    def __exit__(self, *_):
        """Puts back what was there, but for what is ignored by now: see `hear_no_more`."""
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
