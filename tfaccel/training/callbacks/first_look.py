"""Calls a function when `fit` begins, once the model is built.

look = FirstLook(lambda model, train, test: ...)
look.reads = train, test
model.fit(train, validation_data=test, callbacks=[look])
"""

from collections.abc import Callable

import keras


class FirstLook(keras.callbacks.Callback):
    """Calls a function when training begins.

    Attributes:
      reads: the training data and the validation data of `fit`; None for no data.
    """

    def __init__(self, look: Callable):
        """Takes the function, which gets the model, the training data and the validation data."""
        super().__init__()
        self._look, self.reads = look, (None, None)

    def on_train_begin(self, logs=None):
        """Calls the function. Keras has built the model by now, even if it could not before."""
        self._look(self.model, *self.reads)
