"""Callbacks that keep a best value, such as early stopping: infinity and NaN are never best.

Takes the callbacks of a `fit`. Within the context, callbacks that compare a metric with its best
value treat an infinite or NaN metric as no improvement.

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
    """Within the context, an infinite or NaN metric never counts as these callbacks' best.

    Keras 3.15 takes the first value for the best, whatever it is, and no number is less or greater
    than NaN. EarlyStopping then stops and restores that epoch's weights, ModelCheckpoint keeps
    them, and ReduceLROnPlateau lowers the learning rate for good.
    """
    with contextlib.ExitStack() as stack:
        for each in monitors_in(callbacks):
            compare = functools.partial(_compare, each, warned=set())
            stack.enter_context(compared_by(each, compare))
        yield


def _compare(callback, is_improvement, value, reference, *, warned: set) -> bool:
    if value is None or math.isfinite(value):
        return is_improvement(value, reference)
    if not warned:
        warned.add(value)
        log.warning(
            "%s: %s is %s, which never counts as the best",
            *(type(callback).__name__, callback.monitor, value),
        )
    return False
