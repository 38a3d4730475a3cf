"""Runs functions side by side as lanes: in turn, one at a time, until each waits for the others.

    def lane(lane):
        total = sum(lane.meet(own))     # the values of all lanes, in their order
        return total

    results = run([lane, lane], names=["replica 0", "replica 1"])

A lane runs until it calls `meet`. Then the next lane runs. When all lanes have met, each goes on
with the list of all values, in the same order as before. So two lanes never run at the same time,
and one is a function like any other: it may print, stop in `breakpoint()` and read from the
keyboard. Ctrl-C is raised in the lane that runs.

Each lane has a thread of its own, because TensorFlow keeps gradient tapes for each thread. `enter`
makes the context of that thread; the default is what TensorFlow and Keras have in the caller's. So
lanes work while a `tf.function` is traced, too: all of them add to the caller's graph. What a lane
has replaced with `patched` holds only while the lane runs.

If a lane raises an exception, the others end where they wait, and `run` raises it. A lane may
itself run lanes, and those may meet in its place.
"""

import contextlib
import contextvars
import ctypes
import functools
import threading
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from tfaccel.common.errors import UserError
from tfaccel.keras_internals.carried import carried_over
from tfaccel.keras_internals.patching import suspended, swaps, swaps_of_a_lane

THREAD = "tfaccel lane: "  # how the names of the threads begin
SIGNALS_S = 0.1  # how often the thread that waits for a lane looks for signals


class _Unwound(BaseException):
    """Ends a lane in which nothing is wrong, because another one has failed."""


class Lane:
    """One of several functions that run in turn.

    Attributes:
      index: of the lane among all, from 0.
      name: what a message calls it.
    """

    def __init__(self, index: int, name: str):
        """Starts nothing yet."""
        self.index, self.name = index, name
        self.num_meetings = 0  # that this lane has begun
        self._swaps, self._place = swaps(), _place()

    def meet(self, value: Any) -> list:
        """Waits until every lane has met, and returns their values in the lanes' order.

        Raises:
          UserError: the lane is within a function or a branch of TensorFlow's that is traced.
        """
        if _place() != self._place:
            raise UserError(
                f"{self.name} makes a collective within a tf.function, tf.cond or tf.while_loop "
                "that the step calls; make it outside of that, or let the step's functions run as "
                "Python, with tf.config.run_functions_eagerly(True)"
            )
        self.num_meetings += 1
        return self._exchange(value)

    def _exchange(self, value: Any) -> list:
        return [value]  # of the only lane


def run(
    functions: Sequence[Callable[[Lane], Any]],
    *,
    names: Sequence[str] | None = None,
    enter: Callable[[], contextlib.AbstractContextManager] | None = None,
) -> list:
    """Runs each function in a lane, and returns their results in the same order.

    One function runs in this thread.

    Args:
      functions: each takes its lane.
      names: of the lanes, for messages, such as "replica 0".
      enter: makes a context that a lane's thread enters before its function runs; None for a
        context in which TensorFlow and Keras work as in this thread.

    Raises:
      UserError: a lane has ended while another one waits for it.
      BaseException: the first exception of a lane, or of a signal's handler.
    """
    names = names or [f"part {index}" for index in range(len(functions))]
    if len(functions) == 1:
        return [functions[0](Lane(0, names[0]))]
    enter = enter or carried_over()
    lanes = [
        _Threaded(index, name, function, enter)
        for index, (name, function) in enumerate(zip(names, functions, strict=True))
    ]
    try:
        while waiting := [each for each in lanes if not each.has_ended]:
            for each in waiting:
                each.go_on()
            _check_numbers(lanes)
            values = [each.value for each in lanes]
            for each in lanes:
                each.values = list(values)
    except BaseException:
        for each in lanes:
            each.unwind()
        raise
    return [each.result for each in lanes]


def _check_numbers(lanes: "Sequence[_Threaded]") -> None:
    """Raises UserError if a lane waits for one that has ended."""
    ended = [each for each in lanes if each.has_ended]
    waiting = [each for each in lanes if not each.has_ended]
    if ended and waiting:
        raise UserError(
            f"{waiting[0].name} waits in its collective number {waiting[0].num_meetings}, but "
            f"{ended[0].name} has ended after {ended[0].num_meetings}: the steps make different "
            "numbers of collectives. Each must make the same ones in the same order, so no `if` on "
            "a replica's own values may decide about one"
        )


def _place() -> tuple:
    """Returns whether operations run at once, and else to which graph they are added."""
    is_eager = tf.executing_eagerly()
    return is_eager, None if is_eager else tf.compat.v1.get_default_graph()


class _Threaded(Lane):
    """A lane that runs in its own thread, whenever the thread that made it lets it go on.

    A turn has a number. Both threads wait for one, so that a signal that interrupts the one that
    conducts, between any two statements, neither loses a turn nor gives it twice.

    Attributes:
      has_ended: whether the function has returned or raised.
      value: with which the lane has met.
      values: with which all lanes have met.
      result: of the function.
    """

    def __init__(self, index: int, name: str, function: Callable, enter: Callable):
        super().__init__(index, name)
        self._function, self._enter, self._outer = function, enter, self._swaps
        self.has_ended, self.value, self.values, self.result = False, None, None, None
        self._error, self._is_unwound, self._changed = None, False, threading.Condition()
        self._given = self._paused = 0  # the numbers of the last turns
        run_lane = functools.partial(contextvars.copy_context().run, self._run)
        self._thread = threading.Thread(target=run_lane, name=THREAD + name, daemon=True)

    # In the thread that conducts.

    def go_on(self) -> None:
        """Lets the lane run until it meets or ends.

        Raises:
          BaseException: of the lane; or of a signal's handler, if the lane cannot take it.
        """
        number, interrupts = self._paused + 1, []
        while self._paused < number:
            try:
                self._give(number)
                with self._changed:
                    while self._paused < number:
                        # A signal that comes just before the wait does not end it.
                        self._changed.wait(timeout=SIGNALS_S)
            except BaseException as error:  # a signal's handler has raised it here
                interrupts.append(_Interrupt(error))
                self._interrupt(interrupts[-1])
        if self.has_ended:
            self._thread.join()
        error, self._error = self._error, None
        for each in interrupts:
            if error is not None and isinstance(error, each.kind):
                raise each.error.with_traceback(error.__traceback__)
        if error is not None:
            raise error
        for each in interrupts:
            if not each.is_delivered:
                raise each.error

    def unwind(self) -> None:
        """Ends the lane where it waits, if it has begun."""
        self._is_unwound = True
        if self._paused == 0 and self._given == 0:
            self.has_ended = True  # it never began
        while not self.has_ended:
            with contextlib.suppress(BaseException):
                self.go_on()

    def _give(self, number: int) -> None:
        with self._changed:
            self._given = number
            self._changed.notify_all()
        if self._thread.ident is None:
            self._thread.start()

    def _interrupt(self, interrupt: "_Interrupt") -> None:
        """Raises the exception in the lane, at the next statement of Python that it runs."""
        with self._changed:
            if self._thread.is_alive() and self._paused < self._given:
                ident, kind = ctypes.c_ulong(self._thread.ident), ctypes.py_object(interrupt.kind)
                ctypes.pythonapi.PyThreadState_SetAsyncExc(ident, kind)

    # In the lane's own thread.

    def _run(self) -> None:
        try:
            with swaps_of_a_lane(self._outer) as self._swaps, self._enter():
                self._place = _place()
                self.result = self._function(self)
        except BaseException as error:
            # The lane that this one's caller runs in may be unwound, too; then that one must end.
            if not (self._is_unwound and isinstance(error, _Unwound)):
                self._error = error
        finally:
            self.has_ended = True
            self._pause()

    def _exchange(self, value: Any) -> list:
        if not self._is_unwound:
            self.value = value
            with suspended(self._swaps):
                self._pause()
                self._wait()
        if self._is_unwound:
            raise _Unwound
        values, self.value, self.values = self.values, None, None
        return values

    def _pause(self) -> None:
        with self._changed:
            self._paused = self._given
            self._changed.notify_all()

    def _wait(self) -> None:
        with self._changed:
            while self._given == self._paused:
                self._changed.wait()


class _Interrupt:
    """An exception that a signal's handler has raised in one thread, to be raised in another.

    Attributes:
      error: the exception.
      kind: a class that behaves as the exception's. Python raises a class in another thread.
      is_delivered: whether it was raised there.
    """

    def __init__(self, error: BaseException):
        self.error, self.is_delivered = error, False

        def delivered(_) -> None:
            self.is_delivered = True

        self.kind = type(type(error).__name__, (type(error),), {"__init__": delivered})
