"""Early stopping for which a metric that is infinite or NaN is never the best."""

import logging
import math

import keras

log = logging.getLogger("tfaccel")


class EarlyStopping(keras.callbacks.EarlyStopping):
    """Keras's, but an epoch whose metric is not finite counts as one without improvement.

    Keras 3.15 takes the first epoch's metric for the best whatever it is. No later number is less
    or greater than NaN, so that it stops, and restores the weights of that epoch.
    """

    def on_epoch_end(self, epoch: int, logs: dict | None = None) -> None:
        """Compares the epoch's metric with the best one, if it is a finite number."""
        value = (logs or {}).get(self.monitor)
        if value is None or math.isfinite(value):
            super().on_epoch_end(epoch, logs)
            return
        log.warning("early stopping: %s is %s, which is never the best", self.monitor, value)
        self.wait += 1
        if self.wait >= self.patience and epoch > 0:  # as Keras does
            self.stopped_epoch = epoch
            self.model.stop_training = True
