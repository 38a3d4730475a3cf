"""The epochs: Keras's own `fit`, with the callbacks of a run.

Takes a compiled model and its loaders; gives the metrics and how long it took.

    outcome = fit(model, train, test, epochs=5, writes_to=workdir)
"""

import dataclasses
import logging
import math
import pathlib
import sys
import time

import keras

from tfaccel.callbacks.throughput import Throughput
from tfaccel.data.distribute import Loader
from tfaccel.errors import UserError

log = logging.getLogger("tfaccel")


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What training came to.

    Attributes:
      metrics: the last epoch's, by Keras's names; `val_` is the test images'.
      images_per_second: over all replicas; validation and compilation left out.
      steps: optimizer updates asked for.
      seconds: wall time of `fit`, compilation and validation included.
    """

    metrics: dict[str, float]
    images_per_second: float
    steps: int
    seconds: float


def fit(
    model: keras.Model, train: Loader, test: Loader, *, epochs: int, writes_to: pathlib.Path | None
) -> Outcome:
    """Trains for `epochs` and measures on `test` after each.

    Args:
      model: compiled.
      train: what to train on.
      test: what to measure on.
      epochs: passes over `train`.
      writes_to: the workdir, for metrics.csv and tensorboard/; None for a worker that writes none.

    Raises:
      UserError: the loss is no number at the end: there is nothing to export.
    """
    throughput = Throughput(
        global_batch_size=train.global_batch_size, num_examples=train.num_examples
    )
    callbacks = [
        throughput,  # first, so that those below see what it adds to the logs
    ]
    if writes_to:
        callbacks.append(keras.callbacks.CSVLogger(writes_to / "metrics.csv"))
        callbacks.append(keras.callbacks.TensorBoard(writes_to / "tensorboard", write_graph=False))
        log.info("watch: uv run tensorboard --logdir %s", writes_to / "tensorboard")
    start = time.perf_counter()
    history = model.fit(
        train,
        validation_data=test,
        epochs=epochs,
        callbacks=callbacks,
        # A bar redraws itself; in a file or pipe that is noise, so a line per epoch there.
        verbose=1 if sys.stdout.isatty() else 2,
    )
    metrics = {name: float(values[-1]) for name, values in history.history.items()}
    del metrics["images_per_second"]  # the last epoch's; that of the run stands beside
    if not all(map(math.isfinite, metrics.values())):
        raise UserError(
            f"training diverged: loss={metrics['loss']}, val_loss={metrics['val_loss']} after the "
            "last epoch (metrics.csv in the workdir has all); lower the learning rate"
        )
    return Outcome(
        metrics=metrics,
        images_per_second=throughput.images_per_second,
        steps=epochs * train.num_batches,
        seconds=time.perf_counter() - start,
    )
