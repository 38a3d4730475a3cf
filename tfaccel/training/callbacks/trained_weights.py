"""Warns if `trainable` was changed without `run.compile`: the step would not notice.

    model.fit(train, callbacks=[TrainedWeights()])

A step is built once, for the weights that are trainable then. Keras 3.15 is silent about a later
change, and trains on as before.
"""

import logging

import keras

from tfaccel.common.tables import counted

log = logging.getLogger("tfaccel")


class TrainedWeights(keras.callbacks.Callback):
    """Compares the trainable weights with those that the compiled step was built for.

    One object is for all `fit` of a compiled model.
    """

    def __init__(self):
        """Knows no step yet."""
        super().__init__()
        self._known = None  # the path of each weight that the step trains, by its id

    def on_train_begin(self, logs=None):
        """Compares, if an earlier `fit` has built the step."""
        if self._known is not None:
            self._compare()

    def on_epoch_end(self, epoch, logs=None):
        """Notes the weights when the step has just been built, and compares them after that."""
        if self._known is None:
            self._known = self._now()
        else:
            self._compare()

    def _now(self) -> dict[int, str]:
        return {id(each): each.path for each in self.model.trainable_variables}

    def _compare(self) -> None:
        now = self._now()
        more = [path for key, path in now.items() if key not in self._known]
        fewer = [path for key, path in self._known.items() if key not in now]
        self._known = now  # so that each change is said once
        if more or fewer:
            log.warning(
                "step: %s became trainable and %s became frozen since the step was built, for "
                "example %s; the step still trains what it did before: call run.compile after "
                "each change of `trainable`, and then fit",
                counted(len(more), "weight"),
                counted(len(fewer), "weight"),
                (more or fewer)[0],
            )
