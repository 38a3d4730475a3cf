"""Lets training begin before XLA has compiled its step.

    at_once = AtOnce(model)
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

    def __init__(self, model, of: str):
        """Takes the model whose step runs.

        Args:
          model: the model.
          of: what the program of the step depends on, in words.
        """
        self._model, self._aside, self._num, self._of = model, None, 0, of
        self._before = frozenset()  # the programs that were there at the beginning
        self._step = None  # the first one: steps for batches of other shapes wait for XLA

    def __call__(self, step: Alike, plain: Alike, arguments: Sequence):
        """Returns the outputs of an execution.

        Args:
          step: the step, which XLA compiles.
          plain: the same step, not compiled by XLA.
          arguments: the arguments of both.

        Raises:
          Exception: whatever the step raises, also while it is traced or compiled for XLA.
        """
        if self._step not in (None, step):
            return self._end(step, arguments)
        if self._step is None and compile_cache.has(self._of):
            log.info("step: it waits for XLA's program, which is in the compile cache")
            return self._end(step, arguments)
        self._step = step
        try:
            if self._num == 0:
                return self._first(step, plain, arguments)
        except (HasOtherStateError, tf.errors.ResourceExhaustedError) as error:
            why = "memory ran out" if isinstance(error, tf.errors.OpError) else str(error)
            summary("step: training waits for XLA, because %s", why)
            if self._aside is not None:
                self._aside.wait()
            return self._end(step, arguments)
        if self._aside.runs:
            self._num += 1
            return plain(*arguments)
        if self._aside.fault is not None:
            self.is_over = True
            raise self._aside.fault
        compile_cache.note(self._of, self._before)
        summary(
            "step: XLA compiled it in %.0f s, beside %d executions without XLA; now it is used",
            self._aside.seconds,
            self._num,
        )
        return self._end(step, arguments)

    def _first(self, step: Alike, plain: Alike, arguments: Sequence):
        """Begins the compilation, and runs the first execution without XLA.

        A lack of memory leaves the variables as they were.
        """
        began = time.monotonic()
        if self._aside is None:
            self._before = compile_cache.programs()
            waits.now("tracing the training step for XLA")
            self._aside = Aside(step, arguments)
        waits.now("running the first training step without XLA")
        restore = restorer(plain, arguments, self._model)
        try:
            outputs = plain(*arguments)
        except tf.errors.ResourceExhaustedError:
            restore()
            raise
        self._num = 1
        summary(
            "step: training has begun without XLA (%.0f s), which compiles the step meanwhile",
            time.monotonic() - began,
        )
        return outputs

    def _end(self, step: Callable, arguments: Sequence):
        self.is_over, self._step, self._aside = True, None, None
        before = compile_cache.programs()
        outputs = step(*arguments)
        compile_cache.note(self._of, before)
        return outputs
