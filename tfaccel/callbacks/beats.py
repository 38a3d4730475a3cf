"""Says to the launcher, if there is one, how far `fit`, `evaluate` and `predict` have come.

Takes the loader that `fit` trains on, or none; gives beats: see tfaccel/progress.py.

    model.fit(loader, callbacks=[Beats(loader)])

The first batch of each kind compiles, so that it belongs to the start. Only beginnings are told:
Keras waits for the device before the end of a batch, which would slow `evaluate` and `predict`.
"""

import keras

from tfaccel import progress
from tfaccel.data.distribute import Loader


class Beats(keras.callbacks.Callback):
    """A beat as each batch begins.

    Attributes:
      loader: whose position says which step it is; None to count the steps from here.
    """

    def __init__(self, loader: Loader | None = None):
        """Counts from the start."""
        super().__init__()
        self.loader, self._num_begun, self._compiled = loader, 0, set()

    def on_train_begin(self, logs=None):
        """Starts anew: every `fit` traces and compiles."""
        self._compiled.clear()
        progress.beat("start")

    def on_train_batch_begin(self, batch, logs=None):
        """Names the step."""
        self._num_begun += 1
        step = self.loader.position + 1 if self.loader is not None else self._num_begun
        progress.beat(self._phase("train"), step=step)

    def on_test_batch_begin(self, batch, logs=None):
        """Counts a batch."""
        progress.beat(self._phase("evaluation"))

    def on_test_end(self, logs=None):
        """Goes back to training, of which validation is a part."""
        progress.beat("train")

    def on_predict_batch_begin(self, batch, logs=None):
        """Counts a batch."""
        progress.beat(self._phase("evaluation"))

    def on_predict_end(self, logs=None):
        """Leaves the phase."""
        progress.beat("train")

    def _phase(self, phase: str) -> str:
        if phase in self._compiled:
            return phase
        self._compiled.add(phase)
        return "start"
