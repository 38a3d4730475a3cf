"""An export tried before training: written for good measure, and asked beside the first steps.

Takes an export that was asked for; writes it into a temporary folder and has a fresh process answer
what the untrained model answers. That takes 6 s for a small model and 15 s for ResNet-50 (2 cores,
2026-11-27), so it goes on beside the training, which ends as soon as the export is known to fail.

    with Rehearsal(asked, samples) as rehearsal:
        model.fit(..., callbacks=[rehearsal.callback()])

Of an untrained model, no more is judged than what training cannot change: that the export loads and
answers without tfaccel and DALI, decodes, makes the pixels, and computes the same layers.
"""

import logging
import pathlib
import tempfile
import threading

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
from tfaccel.process.child import Stopped
from tfaccel.process.out_of_memory import is_out_of_memory

log = logging.getLogger("tfaccel")

NUM_SAMPLES = 2  # images that the process answers: a CPU may be slow in float16
# Rounding grows otherwise in weights that were never trained: the end's limit, so many times.
MARGIN = 10.0
OF_TRAINED_WEIGHTS = ("answers", "top-1", "ONNX answers", "ONNX top-1")  # not judged before


class Rehearsal:
    """The export of a model as it is before training. Close it, or use it as a context."""

    def __init__(
        self,
        asked: Asked,
        samples: Samples | None = None,
        *,
        parent: pathlib.Path | None = None,
    ):
        """Writes the export, and begins to ask it.

        Args:
          asked: what will be exported.
          samples: of the evaluation, for a model of images.
          parent: the folder that it is written in; None for the one for temporary files.

        Raises:
          UserError: the model cannot be written, or answers the same input in two ways.
          RunError: the folder cannot be written.
        """
        self._stop, self._folder, self._thread = threading.Event(), None, None
        self._fault: RunError | None = None
        try:
            with draws_kept():
                self._folder = temporary.Held("rehearsal", parent=parent)
                asked.write(self._folder.path)
                question, again = (_question(asked, samples) for _ in range(2))
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
        # A daemon: should nobody close this, Python's end does not wait for it.
        self._thread = threading.Thread(target=self._ask, args=(question,), daemon=True)
        self._thread.start()

    def __enter__(self):
        """Returns itself."""
        return self

    def __exit__(self, *_):
        """Ends it."""
        self.close()

    def close(self) -> None:
        """Ends the process, if it runs, and removes what was written. You may call it again."""
        self._stop.set()
        if self._thread:
            self._thread.join()
        if self._folder:
            self._folder.remove()

    def wait(self) -> None:
        """Returns when the export has answered.

        Raises:
          RunError: as `check`.
        """
        self._thread.join()
        self.check()

    def check(self) -> None:
        """Raises RunError if it is known by now that the export fails."""
        if self._fault:
            raise self._fault

    def callback(self) -> keras.callbacks.Callback:
        """Returns what looks before each execution of steps, and ends the rehearsal with `fit`."""
        return _Watch(self)

    def _ask(self, question: parity.Question) -> None:
        try:
            proof = question.ask(self._folder.path, self._stop)
        except Stopped:
            return
        except parity.NoAnswerError as error:
            if error.may_pass:
                log.warning("export: tried before training, %s; the end will tell", error)
            else:
                self._fault = RunError(f"{error}; found before the training that it would follow")
            return
        except Exception as error:
            log.warning("export: it could not be tried beside the training (%s)", error)
            return
        wrong = [each for each in proof.checks if self._is_certain(each)]
        if not wrong:
            log.info(
                "export: the untrained model was exported and answered in a process of its own"
            )
            return
        words = "; ".join(f"{each.name}: {each.words} (limit {each.limit:g})" for each in wrong)
        self._fault = RunError(
            f"the export does not answer as the model does, which is not trained yet: {words}; it "
            "would be refused at the end, so training ends here"
        )

    def _is_certain(self, check: parity.Check) -> bool:
        """Returns whether training will not mend a comparison."""
        if check.name in OF_TRAINED_WEIGHTS:
            return False
        if check.name in ("model", "ONNX"):
            return self._judges_model and not check.value <= MARGIN * check.limit
        return check.failed


class _Watch(keras.callbacks.Callback):
    def __init__(self, rehearsal: Rehearsal):
        super().__init__()
        self._rehearsal = rehearsal

    # Not at a batch's end, where it would keep `fit` from being one step ahead.
    def on_train_batch_begin(self, batch, logs=None):
        self._rehearsal.check()

    def on_epoch_end(self, epoch, logs=None):
        self._rehearsal.check()

    def on_train_end(self, logs=None):
        self._rehearsal.close()  # the export itself comes now


def _question(asked: Asked, samples: Samples | None) -> parity.Question:
    if asked.images:
        return parity.about_images(asked.model, asked.images, samples.first(NUM_SAMPLES))
    return parity.about_inputs(asked.model, asked.given)


def _check_repeats(model: keras.Model, first: parity.Question, second: parity.Question) -> None:
    """Raises UserError where the model answers the same input in two ways."""
    for name, one in first.expected.items():
        apart = np.abs(one.astype(np.float64) - second.expected[name]).max(initial=0.0)
        if apart > first.tolerance * max(parity.LEAST, np.abs(one).max(initial=0.0)):
            raise UserError(
                f"model {model.name} answers the same input in another way each time, in {name} by "
                f"up to {apart:.2g}, with training=False; an export is compared with it and would "
                "be refused: let its layers draw in training alone"
            )


def _not_written(error: Exception, parent: pathlib.Path | None) -> RunError:
    folder = pathlib.Path(parent or tempfile.gettempdir())
    cause = error if isinstance(error, OSError) else from_tensorflow(error, folder)
    return RunError(
        f"the export that is tried before training, in {folder}, {not_written(cause, folder)}, or "
        "set TMPDIR to another folder"
    )
