"""SIGTERM, SIGUSR1 and SIGINT as a request to stop between two steps.

Takes nothing; gives, within a context, whether this process was asked to stop. A second signal ends
the process at once; where Python has a prompt, a second Ctrl-C is a KeyboardInterrupt instead, and
under a launcher one that follows soon is no other request, but the same from elsewhere. The
handlers that were there before are called too, and come back afterwards.

    with StopSignals() as stop:      # after the strategy: TensorFlow's own takes SIGTERM away
        ... stop.requested           # None, or the signal's name

Where there are no steps, SIGTERM may be a SystemExit instead: `exiting_on_sigterm`.

Python runs its handlers between two lines of the main thread, of which there is none while XLA
compiles or a collective waits; a thread reads the signals as the system delivers them instead.
"""

import _thread
import contextlib
import logging
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator

from tfaccel.common.run_log import summary
from tfaccel.process import progress

log = logging.getLogger("tfaccel")

HEARD = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
# A scheduler may signal the ranks and their launcher, which passes it on to a rank that has not
# said within a second that it heard: one that holds Python's lock meanwhile. For "at once" a
# launcher has SIGKILL.
SAME_REQUEST_S = 10.0


@contextlib.contextmanager
def exiting_on_sigterm() -> Iterator[None]:
    """Within the context SIGTERM raises SystemExit, with 143: once, lest a report be cut short.

    For a command that has work to keep, but no steps to finish. In the main thread alone.
    """

    def leave(*_):
        signal.signal(signal.SIGTERM, lambda *_: None)  # not SIG_IGN, which children inherit
        sys.exit(128 + signal.SIGTERM)

    before = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


_installed = []  # those whose handlers are in place
_forking = threading.local()


def _hold_back() -> None:
    """Keeps signals away from a child until it has its own handlers."""
    _forking.mask = signal.pthread_sigmask(signal.SIG_BLOCK, HEARD if _installed else ())


def _let_through() -> None:
    signal.pthread_sigmask(signal.SIG_SETMASK, _forking.mask)


def _forget() -> None:
    """Takes the handlers out of a forked child: its signals would be its parent's request too."""
    while _installed:
        signal.set_wakeup_fd(-1)
        _installed.pop()._put_back()
    _let_through()


os.register_at_fork(before=_hold_back, after_in_parent=_let_through, after_in_child=_forget)


def _what_comes() -> str:
    return "this step is finished, the state saved, then training stops"


class StopSignals:
    """Hears signals within its context; elsewhere, and in other threads than the main one, none.

    Attributes:
      requested: the name of the first signal that asked to stop; None while there was none.
    """

    def __init__(self, what_comes: Callable[[], str] = _what_comes, *, speaks: bool = True):
        """Hears nothing yet.

        Args:
          what_comes: returns what a signal that comes now leads to, in words. It is called in
            another thread than the main one.
          speaks: whether that is shown to a person; of several workers that a terminal signals
            together, the chief speaks.
        """
        self.requested, self._since = None, 0.0
        self._what_comes, self._speaks = what_comes, speaks
        self._before, self._interrupts, self._is_echo = {}, False, False

    def __enter__(self) -> "StopSignals":
        """Installs the handlers."""
        if threading.current_thread() is not threading.main_thread():
            summary("signals: not heard, because training runs beside the main thread")
            return self
        self.requested, self._interrupts, self._is_echo = None, False, False
        self._ours, self._delivered = socket.socketpair()
        self._delivered.setblocking(False)
        self._wakeup_before = signal.set_wakeup_fd(
            self._delivered.fileno(), warn_on_full_buffer=False
        )
        self._before = {each: signal.signal(each, self._call_users) for each in HEARD}
        _installed.append(self)
        self._thread = threading.Thread(target=self._listen, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_):
        """Puts back what was there."""
        if not self._before:
            return
        _installed.remove(self)
        try:
            signal.set_wakeup_fd(self._wakeup_before)
            self._delivered.close()  # the thread's end, which may have sent a signal once more
            self._thread.join()
        finally:
            self._put_back()
            self._ours.close()

    def _put_back(self) -> None:
        for number, handler in self._before.items():
            # None stands for one that was not installed from Python.
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        self._before = {}

    def _listen(self) -> None:
        while numbers := self._ours.recv(16):
            for number in numbers:
                if number in HEARD:
                    self._heard(signal.Signals(number))

    def _heard(self, received: signal.Signals) -> None:
        if self.requested and received == signal.SIGINT and hasattr(sys, "ps1"):
            # A person at a prompt, as IPython's and Jupyter's too. Python makes one of two signals
            # that come while the main thread is in C: so it is sent once more, and heard here too.
            self._is_echo = not self._is_echo
            if self._is_echo:
                self._interrupts = True
                _thread.interrupt_main()
            return
        if self.requested and progress.is_launched() and self._age_s < SAME_REQUEST_S:
            log.info("signals: %s, the same request once more", received.name)
            return
        if self.requested:
            log.warning("signals: %s, the second one: this process ends now", received.name)
            os._exit(128 + received)
        self._since, self.requested = time.monotonic(), received.name
        progress.asked()
        log.log(
            logging.WARNING if self._speaks else logging.INFO,
            "signals: %s: %s; a second signal ends it at once",
            received.name,
            self._what_comes(),
        )

    @property
    def _age_s(self) -> float:
        return time.monotonic() - self._since

    def _call_users(self, number: int, frame) -> None:
        """Calls the handler that a program had of its own, in the main thread as it expects.

        Raises:
          KeyboardInterrupt: a person at a prompt has asked twice.
        """
        if self._interrupts:
            self._interrupts = False
            raise KeyboardInterrupt
        handler = self._before.get(number)
        if callable(handler) and handler is not signal.default_int_handler:
            handler(number, frame)
