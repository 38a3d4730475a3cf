"""Treats SIGTERM, SIGUSR1 and SIGINT as a request to stop between two steps.

A second signal ends the process at once. There are two exceptions. At a Python prompt, a second
Ctrl-C is a KeyboardInterrupt. Under a launcher, a second signal that follows soon is the same
request from another sender. Existing handlers are called too, and are restored afterwards.

    with StopSignals() as stop:      # after the strategy, which handles SIGTERM itself
        ... stop.requested           # None, or the signal's name
        with at_once("no run begins"):
            ...                      # a wait for a server, which the first signal ends

For a program without steps, `exiting_on_sigterm` turns SIGTERM into SystemExit.

Python runs its handlers between two instructions of the main thread, but there are none while XLA
compiles or a collective waits. Therefore a thread reads the signals as the system delivers them.
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
# A scheduler may signal both the ranks and their launcher. The launcher passes the signal on to a
# rank that has not confirmed it within a second, for example because it holds Python's lock. To end
# a rank at once, a launcher uses SIGKILL.
SAME_REQUEST_S = 10.0


@contextlib.contextmanager
def exiting_on_sigterm() -> Iterator[None]:
    """Makes SIGTERM raise SystemExit with code 143 within the context, but only once.

    It is for commands that have results to write, but no steps to finish. Later signals are ignored
    so that the results are complete. It works only in the main thread.
    """

    def leave(*_):
        signal.signal(signal.SIGTERM, lambda *_: None)  # not SIG_IGN, which children inherit
        sys.exit(128 + signal.SIGTERM)

    before = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


_installed = []  # the StopSignals whose handlers are installed
_forking = threading.local()


def _hold_back() -> None:
    """Blocks signals around a fork until the child has its own handlers."""
    _forking.mask = signal.pthread_sigmask(signal.SIG_BLOCK, HEARD if _installed else ())


def _let_through() -> None:
    signal.pthread_sigmask(signal.SIG_SETMASK, _forking.mask)


def _forget() -> None:
    """Removes the handlers from a forked child, whose signals would also reach its parent."""
    while _installed:
        signal.set_wakeup_fd(-1)
        _installed.pop()._put_back()
    _let_through()


os.register_at_fork(before=_hold_back, after_in_parent=_let_through, after_in_child=_forget)


def _what_comes() -> str:
    return "this step is finished, the state is saved, and training stops"


class StopSignals:
    """Hears signals within its context, in the main thread; in other threads it hears none.

    Attributes:
      requested: the name of the first signal that asked to stop; None if there was none.
    """

    def __init__(
        self,
        what_comes: Callable[[], str] = _what_comes,
        *,
        error: BaseException | None = None,
        speaks: bool = True,
    ):
        """Does not hear signals yet.

        Args:
          what_comes: returns what a signal at this moment will cause, in words. It is called in a
            thread other than the main one.
          error: what `at_once` raises; None is SystemExit with 128 and the signal's number.
          speaks: whether to show the request to the user. If a terminal signals several workers
            together, only the chief shows it.
        """
        self.requested, self._since = None, 0.0
        self._what_comes, self._error, self._speaks = what_comes, error, speaks
        self._at_once = ""  # what a signal causes within `at_once`
        self._has_raised = False
        self._before, self._interrupts, self._is_echo = {}, False, False

    def __enter__(self) -> "StopSignals":
        """Installs the handlers."""
        if threading.current_thread() is not threading.main_thread():
            summary("signals: not heard, because training does not run in the main thread")
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
        """Restores the previous handlers."""
        if not self._before:
            return
        _installed.remove(self)
        try:
            signal.set_wakeup_fd(self._wakeup_before)
            self._delivered.close()  # ends the thread, which may send one more signal
            self._thread.join()
        finally:
            self._put_back()
            self._ours.close()

    def _put_back(self) -> None:
        for number, handler in self._before.items():
            # None means a handler that was not installed from Python.
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        self._before = {}

    def _listen(self) -> None:
        while numbers := self._ours.recv(16):
            for number in numbers:
                if number in HEARD:
                    self._heard(signal.Signals(number))

    def _heard(self, received: signal.Signals) -> None:
        if self.requested and received == signal.SIGINT and hasattr(sys, "ps1"):
            # This is a person at a prompt, such as IPython's. If two signals arrive while the main
            # thread is in C, Python sees only one. So it is sent again, and also heard here again.
            self._is_echo = not self._is_echo
            if self._is_echo:
                self._interrupts = True
                _thread.interrupt_main()
            return
        if (
            self.requested
            and progress.is_launched()
            and time.monotonic() - self._since < SAME_REQUEST_S
        ):
            log.info("signals: %s, which repeats the same request", received.name)
            return
        if self.requested:
            log.warning("signals: %s, the second signal: this process ends now", received.name)
            os._exit(128 + received)
        self._since, self.requested = time.monotonic(), received.name
        progress.asked()
        log.log(
            logging.WARNING if self._speaks else logging.INFO,
            "signals: %s: %s; a second signal ends it at once",
            received.name,
            self._at_once or self._what_comes(),
        )

    def _call_users(self, number: int, frame) -> None:
        """Calls the program's own handler in the main thread.

        Raises:
          KeyboardInterrupt: a person at a prompt has pressed Ctrl-C twice.
          BaseException: the error of this object, within `at_once`.
        """
        if self._interrupts:
            self._interrupts = False
            raise KeyboardInterrupt
        handler = self._before.get(number)
        if callable(handler) and handler is not signal.default_int_handler:
            handler(number, frame)
        if self._at_once and not self._has_raised:
            self._has_raised = True  # a launcher may repeat the signal while the error passes
            raise self._error or SystemExit(128 + number)


@contextlib.contextmanager
def at_once(what_comes: str) -> Iterator[None]:
    """Lets the first signal raise StopSignals's error within the context.

    It is for a wait that could be long and has nothing to save. Without StopSignals, and beside the
    main thread, it does nothing.

    Args:
      what_comes: what the signal causes, in words.
    """
    if not _installed or threading.current_thread() is not threading.main_thread():
        yield
        return
    stop = _installed[-1]
    stop._at_once, stop._has_raised = what_comes, False
    yield
    stop._at_once = ""  # after an error it stays, because the thread that speaks may be late
