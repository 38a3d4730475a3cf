"""A look at what `fit` is about to train, once the model is built.

Takes what looks, and what `fit` reads and evaluates; calls it as `fit` begins.

    look = FirstLook(lambda model, train, test: ...)
    look.reads = train, test
    model.fit(train, validation_data=test, callbacks=[look])
"""

from collections.abc import Callable

import keras


class FirstLook(keras.callbacks.Callback):
    """Looks as training begins.

    Attributes:
      reads: what `fit` reads, and what it evaluates; None for nothing.
    """

    def __init__(self, look: Callable):
        """Keeps what looks.

        Args:
          look: takes the model, what `fit` reads, and what it evaluates.
        """
        super().__init__()
        self._look, self.reads = look, (None, None)

    def on_train_begin(self, logs=None):
        """Looks: by now Keras has built a model that it could not build before."""
        self._look(self.model, *self.reads)
