"""Says to the launcher, if there is one, how far `fit`, `evaluate` and `predict` have come.

Takes the loader that `fit` trains on, if it is one; gives beats: see tfaccel/process/progress.py.

    beats.loader = loader
    model.fit(loader, callbacks=[beats])

The first execution of each kind and length compiles, so that it belongs to the start. Of batches
only beginnings are told: Keras waits for the device before their end, which would slow `evaluate`
and `predict`. The end of all is told by `progress.call`.
"""

import math

import keras

from tfaccel.process import progress


class Beats(keras.callbacks.Callback):
    """A beat as each batch begins.

    Attributes:
      loader: whose position says which step it is; None to count the steps, from the optimizer's
        on, which a script may have restored by its own means.
    """

    def __init__(self):
        """Counts from the start."""
        super().__init__()
        self.loader, self._num_begun, self._compiled = None, None, set()
        self._num_batches = None

    def on_train_begin(self, logs=None):
        """Starts anew: every `fit` traces and compiles."""
        self._compiled.clear()
        # Not later: an `evaluate` meanwhile has its own. A user's CallbackList may have none.
        self._num_batches = (self.params or {}).get("steps")
        progress.beat("start")

    def on_train_batch_begin(self, batch, logs=None):
        """Names the step."""
        length = self._length(batch)
        if self.loader is not None:
            begun = self.loader.position
        else:
            # Once: to read it later is to wait for the device.
            begun = self._num_begun if self._num_begun is not None else self._iterations()
            self._num_begun = begun + length
        progress.beat(self._phase("train", length), step=begun + 1)

    def on_test_batch_begin(self, batch, logs=None):
        """Counts a batch."""
        progress.beat(self._phase("evaluation"))

    def on_predict_batch_begin(self, batch, logs=None):
        """Counts a batch."""
        progress.beat(self._phase("evaluation", "predict"))

    def _iterations(self) -> int:
        optimizer = None if self.model is None else self.model.optimizer
        return 0 if optimizer is None else int(optimizer.iterations.numpy())

    def _length(self, batch: int) -> int:
        """Returns how many steps the execution that begins has: less at the end of an epoch."""
        if self.loader is not None:
            left = self.loader.num_batches - self.loader.position % self.loader.num_batches
        else:
            left = (self._num_batches or math.inf) - batch
        most = self.model.steps_per_execution if self.model is not None else 1
        return min(most, left)

    def _phase(self, phase: str, kind: int | str | None = None) -> str:
        if (phase, kind) in self._compiled:
            return phase
        self._compiled.add((phase, kind))
        return "start"
