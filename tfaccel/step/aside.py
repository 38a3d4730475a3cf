"""Compiles a step with XLA in a thread, while the step runs without XLA.

    aside = Aside(recoverable, arguments)       # traces it here; then a thread compiles it
    while aside.runs: ...                       # other steps
    aside.fault                                 # why it has no program; None if it has one

The thread runs the step once on stand-ins of the variables, so that the step's next call finds the
program (tfaccel/keras_internals/stand_ins.py).

Nothing can stop XLA meanwhile, and a process that ended beside it sometimes crashed (TensorFlow
2.21 on a CPU, 2026-11-29). So a script waits for it at its end. A command ends at once, by
`leave_at_once`.
"""

import atexit
import logging
import threading
import time
from collections.abc import Sequence

import tensorflow as tf

from tfaccel.keras_internals.function_names import Alike
from tfaccel.keras_internals.stand_ins import StandIns
from tfaccel.process import leave, waits
from tfaccel.process.out_of_memory import is_of_xla, is_out_of_memory
from tfaccel.step.recoverable import keep_memory_of

log = logging.getLogger("tfaccel")

_threads: list[threading.Thread] = []  # those that have begun


class Aside:
    """The compilation of a step in a thread of its own.

    Attributes:
      fault: why the step has no program yet, as an exception; None while it is compiled, and if it
        was compiled. It is None for a lack of memory, too: XLA's step alone may have room.
      seconds: the seconds that the compilation took, once it has ended.
    """

    fault: Exception | None = None
    seconds: float | None = None

    def __init__(self, step: Alike, arguments: Sequence):
        """Traces the step, makes the stand-ins, and starts the thread.

        Args:
          step: the step, which XLA compiles.
          arguments: the batch of its next call; the thread reads them, too.

        Raises:
          HasOtherStateError: the step has state that is no variable.
          tf.errors.ResourceExhaustedError: there is no room for the stand-ins.
          Exception: whatever the trace of the step raises.
        """
        self._stand_ins = StandIns(step.get_concrete_function(*arguments))
        self._arguments = arguments
        self._thread = threading.Thread(target=self._compile, name="tfaccel-xla", daemon=True)
        _threads.append(self._thread)
        self._thread.start()

    @property
    def runs(self) -> bool:
        """Whether the step is still being compiled."""
        return self._thread.is_alive()

    def wait(self) -> None:
        """Waits until the step is compiled, or cannot be."""
        self._thread.join()

    def _compile(self) -> None:
        began = time.monotonic()
        try:
            self._stand_ins.run(self._arguments)
        except tf.errors.OpError as error:
            if is_of_xla(str(error)):
                keep_memory_of(self._stand_ins.handles)  # XLA has freed it
            if not is_out_of_memory(str(error)):
                self.fault = error
        except Exception as error:
            self.fault = error
        self.seconds = time.monotonic() - began
        self._stand_ins = self._arguments = None


def leave_at_once(code: int) -> None:
    """Ends the process with this exit code if XLA compiles a step in a thread; else returns."""
    if _compiling():
        leave.now(code)


def _compiling() -> list[threading.Thread]:
    return [each for each in _threads if each.is_alive()]


@atexit.register
def _wait() -> None:
    """Waits for XLA before Python ends."""
    if not _compiling():
        return
    try:
        with waits.on("waiting for XLA, which still compiles the training step (Ctrl-C ends it)"):
            for each in _compiling():
                each.join()
    except KeyboardInterrupt:  # after which Python 3.11 takes the thread for ended
        leave.now(130)
