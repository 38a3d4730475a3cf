"""Reports the progress of `fit`, `evaluate` and `predict` to the launcher, if there is one.

Takes the loader that `fit` trains on, if it is one; gives beats (tfaccel/process/progress.py).

    beats.loader = loader
    model.fit(loader, callbacks=[beats])

The first execution of each kind and length compiles, so it counts as part of the start. Only the
beginning of a batch is reported: before it reports an end, Keras waits for the device, which would
slow down `evaluate` and `predict`. `progress.call` reports the end of the whole call.
"""

import math

import keras

from tfaccel.process import progress


class Beats(keras.callbacks.Callback):
    """Sends a beat when a batch begins.

    Attributes:
      loader: the step number is its position. None to count the steps from `optimizer.iterations`,
        which a script may have restored by its own means.
    """

    def __init__(self):
        """Has counted no step."""
        super().__init__()
        self.loader, self._num_begun, self._compiled = None, None, set()
        self._num_batches = None

    def on_train_begin(self, logs=None):
        """Forgets what was compiled, because every `fit` traces and compiles again."""
        self._compiled.clear()
        # Read it here: `evaluate` within `fit` sets its own. A user's CallbackList may have none.
        self._num_batches = (self.params or {}).get("steps")
        progress.beat("start")

    def on_train_batch_begin(self, batch, logs=None):
        """Sends a beat with the number of the step."""
        length = self._length(batch)
        if self.loader is not None:
            begun = self.loader.position
        else:
            # The iterations are read once, because a later read would wait for the device.
            begun = self._num_begun if self._num_begun is not None else self._iterations()
            self._num_begun = begun + length
        progress.beat(self._phase("train", length), step=begun + 1)

    def on_test_batch_begin(self, batch, logs=None):
        """Sends a beat."""
        progress.beat(self._phase("evaluation"))

    def on_predict_batch_begin(self, batch, logs=None):
        """Sends a beat."""
        progress.beat(self._phase("evaluation", "predict"))

    def _iterations(self) -> int:
        optimizer = None if self.model is None else self.model.optimizer
        return 0 if optimizer is None else int(optimizer.iterations.numpy())

    def _length(self, batch: int) -> int:
        """Returns the number of steps of this execution: an epoch's last one may be shorter."""
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
