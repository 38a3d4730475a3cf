"""Early stopping, and Keras's own callbacks of its kind: what is infinite or NaN is never the best.

Takes the callbacks of a `fit`; within the context those that compare a metric with their best one
go on as in an epoch without improvement.

    with never_best([keras.callbacks.ModelCheckpoint("best.keras", save_best_only=True)]):
        model.fit(...)
"""

import contextlib
import functools
import logging
import math
from collections.abc import Iterator

import keras

from tfaccel.keras_internals.callbacks import compared_by, monitors_in

log = logging.getLogger("tfaccel")


@contextlib.contextmanager
def never_best(callbacks: list[keras.callbacks.Callback]) -> Iterator[None]:
    """Within the context, no metric that is infinite or NaN is the best of these callbacks.

    Keras 3.15 takes the first one for the best whatever it is, and no number is less or greater
    than NaN: EarlyStopping then stops and restores it, ModelCheckpoint keeps it, and
    ReduceLROnPlateau lowers the learning rate for good.

    Args:
      callbacks: any; those that monitor nothing stay as they are.
    """
    with contextlib.ExitStack() as stack:
        for each in monitors_in(callbacks):
            compare = functools.partial(_compare, each, said=set())
            stack.enter_context(compared_by(each, compare))
        yield


def _compare(callback, is_improvement, value, reference, *, said: set) -> bool:
    if value is None or math.isfinite(value):
        return is_improvement(value, reference)
    if not said:
        said.add(value)
        log.warning(
            "%s: %s is %s, which is never the best",
            *(type(callback).__name__, callback.monitor, value),
        )
    return False


class EarlyStopping(keras.callbacks.EarlyStopping):
    """Keras's, but an epoch whose metric is not finite counts as one without improvement.

    Keras 3.15 takes the first epoch's metric for the best whatever it is. No later number is less
    or greater than NaN, so that it stops, and restores the weights of that epoch.
    """

    def on_epoch_end(self, epoch: int, logs: dict | None = None) -> None:
        """Compares the epoch's metric with the best one, if it is a finite number."""
        value = (logs or {}).get(self.monitor)
        if value is None or math.isfinite(value) or epoch < self.start_from_epoch:
            super().on_epoch_end(epoch, logs)
            return
        log.warning("early stopping: %s is %s, which is never the best", self.monitor, value)
        self.wait += 1
        if self.wait >= self.patience and epoch > 0:  # as Keras does
            self.stopped_epoch = epoch
            self.model.stop_training = True
