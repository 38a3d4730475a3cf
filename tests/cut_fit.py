"""Ends a fit in the middle, for tests that resume it."""

import keras


class CutError(Exception):
    """Stands for a SIGKILL."""


class Cut(keras.callbacks.Callback):
    """Ends a fit after some steps, as if the process were killed."""

    def __init__(self, step):
        super().__init__()
        self.left = step

    def on_train_batch_end(self, batch, logs=None):
        self.left -= 1
        if not self.left:
            raise CutError

    def get_state(self):
        return {}

    def set_state(self, state):
        pass
