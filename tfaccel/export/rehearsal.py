"""Tries an export at the start of training: writes it to a temporary folder, and runs it.

A `Rehearsal` writes an `Asked` export of the model, before training or after its first execution.
A fresh process then answers the same inputs as that model. This takes 6 s for a small model and
15 s for ResNet-50 (2 cores, 2026-11-27), so it runs beside the training. Training stops as soon as
the export is known to fail.

    with Rehearsal(asked) as rehearsal:
        model.fit(..., callbacks=[rehearsal.callback()])       # the second execution begins it
    with Rehearsal(asked) as rehearsal:
        rehearsal.begin()
        rehearsal.wait()

The rehearsal judges only what training cannot change: that the export loads and answers without
tfaccel and DALI, decodes files to the same pixels, and computes the same layers.
"""

import logging
import pathlib
import tempfile
import threading
import time
from collections.abc import Callable

import keras
import numpy as np
import tensorflow as tf

from tfaccel.common import temporary
from tfaccel.common.disk_errors import from_tensorflow, not_written
from tfaccel.common.errors import RunError, UserError
from tfaccel.export import parity
from tfaccel.export.asked import Asked
from tfaccel.export.samples import Samples
from tfaccel.keras_internals.seeds import draws_kept
from tfaccel.process import waits
from tfaccel.process.child import Stopped
from tfaccel.process.out_of_memory import is_out_of_memory

log = logging.getLogger("tfaccel")

BEFORE_IT = 1  # executions that training has begun before the trial
NUM_SAMPLES = 2  # images for the process, because a CPU may be slow in float16
# Rounding errors are larger with untrained weights, so the limits are this many times larger.
MARGIN = 10.0
# Judged only at the end.
OF_TRAINED_WEIGHTS = tuple(
    f"{prefix}{each}"
    for prefix in ("", "ONNX ", "LiteRT ")
    for each in ("answers", "top-1", "classes")
)


class Rehearsal:
    """The trial export of a model. Close it, or use it as a context.

    Attributes:
      seconds: the seconds that `begin` took; 0 before it.
    """

    seconds = 0.0

    def __init__(
        self,
        asked: Asked,
        prepare: Callable[[], Samples | None] | None = None,
        *,
        parent: pathlib.Path | None = None,
    ):
        """Takes what `begin` needs.

        Args:
          asked: the export request.
          prepare: makes further checks, and returns images of the evaluation, for a model of
            images; None if there are none.
          parent: the folder to write in; None for the folder for temporary files.
        """
        self._asked, self._prepare, self._parent = asked, prepare, parent
        self._stop, self._folder, self._thread = threading.Event(), None, None
        self._fault: RunError | None = None
        self._has_begun = False

    @waits.on("trying the export of the model")
    def begin(self) -> None:
        """Writes the export, and starts the process that runs it. A second call does nothing.

        Raises:
          UserError: the model cannot be written, or gives two answers for the same input; or
            `prepare` raises it.
          RunError: the folder cannot be written.
        """
        if self._has_begun:
            return
        self._has_begun, began = True, time.monotonic()
        asked, parent = self._asked, self._parent
        try:
            samples = self._prepare() if self._prepare else None
            samples = samples and samples.first(NUM_SAMPLES)
            with draws_kept():
                self._folder = temporary.Held("rehearsal", parent=parent)
                question, again = (asked.question(samples) for _ in range(2))
                asked.write(self._folder.path, question.inputs)
            expected = question.expected.values()
            self._judges_model = all(np.isfinite(each).all() for each in expected)
            if self._judges_model:
                _check_repeats(asked.model, question, again)
        except (OSError, tf.errors.OpError) as error:
            self.close()
            if is_out_of_memory(str(error)):
                raise
            raise _not_written(error, parent) from error
        except BaseException:
            self.close()
            raise
        self.seconds = time.monotonic() - began
        log.info("export: it can be written (%.1f s)", self.seconds)
        # A daemon thread, so that Python can end even if nobody closes the rehearsal.
        self._thread = threading.Thread(target=self._ask, args=(question,), daemon=True)
        self._thread.start()

    def __enter__(self):
        """Returns itself."""
        return self

    def __exit__(self, *_):
        """Ends it."""
        self.close()

    def close(self) -> None:
        """Ends the process if it runs, and removes the folder. You may call it several times."""
        self._stop.set()
        if self._thread:
            self._thread.join()
        if self._folder:
            self._folder.remove()

    def wait(self) -> None:
        """Waits until the export has answered.

        Raises:
          RunError: as for `check`.
        """
        with waits.on("waiting for the export of the untrained model to answer"):
            self._thread.join()
        self.check()

    def check(self) -> None:
        """Raises RunError if the export is already known to fail."""
        if self._fault:
            raise self._fault

    def callback(self) -> keras.callbacks.Callback:
        """Returns a callback that begins this, checks it before each execution, and closes it."""
        return _Watch(self)

    def _ask(self, question: parity.Question) -> None:
        try:
            proof = question.ask(self._folder.path, self._stop)
        except Stopped:
            return
        except parity.NoAnswerError as error:
            if error.may_pass:
                log.warning(
                    "export: in the trial at the start, %s; the export at the end will show",
                    error,
                )
            else:
                self._fault = RunError(
                    f"{error}; tfaccel tried the export at the start of training"
                )
            return
        except Exception as error:
            log.warning("export: the trial at the start of training failed (%s)", error)
            return
        wrong = [each for each in proof.checks if self._is_certain(each)]
        if not wrong:
            log.info("export: the untrained model was exported, and answered in its own process")
            return
        words = "; ".join(f"{each.name}: {each.words} (limit {each.limit:g})" for each in wrong)
        self._fault = RunError(
            f"the export does not answer as the untrained model does: {words}; it would be refused "
            "at the end, so training stops here"
        )

    def _is_certain(self, check: parity.Check) -> bool:
        """Returns whether a comparison has failed in a way that training cannot change."""
        if check.name in OF_TRAINED_WEIGHTS:
            return False
        if check.name in ("model", "ONNX"):
            return self._judges_model and not check.value <= MARGIN * check.limit
        return check.failed


class _Watch(keras.callbacks.Callback):
    def __init__(self, rehearsal: Rehearsal):
        super().__init__()
        self._rehearsal, self._num_executions = rehearsal, 0

    # Not at the end of a batch, which would keep `fit` from preparing the next step early.
    def on_train_batch_begin(self, batch, logs=None):
        if self._num_executions == BEFORE_IT:
            self._begin()
        self._num_executions += 1
        self._rehearsal.check()

    def on_epoch_end(self, epoch, logs=None):
        self._begin()  # unless it has begun
        self._rehearsal.check()

    def on_train_end(self, logs=None):
        self._rehearsal.close()  # the real export follows

    def _begin(self):
        try:
            self._rehearsal.begin()
        except tf.errors.OpError as error:
            if not is_out_of_memory(str(error)):
                raise
            log.warning(
                "export: the trial at the start found no memory beside the training; the export "
                "at the end will show whether it can be written"
            )


def _check_repeats(model: keras.Model, first: parity.Question, second: parity.Question) -> None:
    """Raises UserError if the model gives two answers for the same input."""
    for name, one in first.expected.items():
        apart = np.abs(one.astype(np.float64) - second.expected[name]).max(initial=0.0)
        if apart > first.tolerance * max(parity.LEAST, np.abs(one).max(initial=0.0)):
            raise UserError(
                f"model {model.name} gives another answer for the same input each time, in {name} "
                f"by up to {apart:.2g}, with training=False; its export would be refused: let its "
                "layers draw random numbers only in training"
            )


def _not_written(error: Exception, parent: pathlib.Path | None) -> RunError:
    folder = pathlib.Path(parent or tempfile.gettempdir())
    cause = error if isinstance(error, OSError) else from_tensorflow(error, folder)
    return RunError(
        f"the trial export at the start of training, in {folder}, {not_written(cause, folder)}, "
        "or set TMPDIR to another folder"
    )
