"""Lets training begin before XLA has compiled its step.

    at_once = AtOnce(model, "ResNet-50, 256 x 224 x 224 x 3", begins=True)
    at_once(step, plain, arguments)      # for each execution, until `at_once.is_over`

At the first execution the step is traced for XLA, and a thread begins to compile it (see
tfaccel/step/aside.py). Executions run without XLA until it has ended. The next one is XLA's.
"""

import logging
import time
from collections.abc import Callable, Sequence

import tensorflow as tf

from tfaccel.common.run_log import summary
from tfaccel.keras_internals.function_names import Alike
from tfaccel.keras_internals.stand_ins import HasOtherStateError
from tfaccel.process import waits
from tfaccel.runtime import compile_cache
from tfaccel.step.aside import Aside
from tfaccel.step.recoverable import restorer

log = logging.getLogger("tfaccel")


class AtOnce:
    """Runs the executions of a step until XLA has compiled it.

    Attributes:
      is_over: whether XLA's program is there, or must be waited for.
    """

    is_over = False

    def __init__(self, model, of: str, *, begins: bool):
        """Takes the model whose step runs.

        Args:
          model: the model.
          of: what the program of the step depends on, in words.
          begins: whether to begin without XLA. If not, it is only noted that the program is there.
        """
        self._model, self._aside, self._num, self._of = model, None, 0, of
        self._begins = begins
        self._before = frozenset()  # the programs that were there at the beginning

    def __call__(self, step: Alike, plain: Alike | None, arguments: Sequence):
        """Returns the outputs of an execution.

        Args:
          step: the step, which XLA compiles. The thread compiles that of the first execution.
          plain: the same step, not compiled by XLA; None if `begins` is not set.
          arguments: the arguments of both.

        Raises:
          Exception: whatever the step raises, also while it is traced or compiled for XLA.
        """
        if self._num == 0:
            if not self._begins:
                return self._end(step, arguments)
            if self._aside is None and compile_cache.has(self._of):
                log.info("step: it waits for XLA: the compile cache has a program of such a step")
                return self._end(step, arguments)
            outputs, why_not = self._first(step, plain, arguments)
            if why_not is None:
                return outputs
            summary("step: training waits for XLA, because %s", why_not)
            if self._aside is not None:
                waits.now("waiting until XLA has compiled the training step")
                self._aside.wait()
            return self._end(step, arguments)
        if self._aside.runs:
            self._num += 1
            return plain(*arguments)
        if self._aside.fault is not None:
            self.is_over = True
            raise self._aside.fault
        summary(
            "step: XLA compiled it in %.0f s, beside %d executions without XLA; now it is used",
            self._aside.seconds,
            self._num,
        )
        return self._end(step, arguments)

    def _first(self, step: Alike, plain: Alike, arguments: Sequence) -> tuple:
        """Begins the compilation, and runs the first execution without XLA.

        Returns:
          The outputs, and None; or None, and why training waits. A lack of memory leaves the
          variables as they were.
        """
        began = time.monotonic()
        try:
            if self._aside is None:
                self._before = compile_cache.programs()
                self._aside = Aside(step, arguments)
            restore = restorer(plain, arguments, self._model)
            waits.now("running the first training step without XLA")
            try:
                outputs = plain(*arguments)
            except tf.errors.ResourceExhaustedError:
                restore()
                raise
        except HasOtherStateError as error:
            return None, str(error)
        except tf.errors.ResourceExhaustedError:
            return None, "memory ran out"
        self._num = 1
        summary(
            "step: training has begun without XLA (%.0f s), which compiles the step meanwhile",
            time.monotonic() - began,
        )
        return outputs, None

    def _end(self, step: Callable, arguments: Sequence):
        """Runs XLA's step, and notes the programs that came since the beginning."""
        before = self._before or compile_cache.programs()
        self.is_over, self._aside = True, None
        outputs = step(*arguments)
        compile_cache.note(self._of, before)
        return outputs
