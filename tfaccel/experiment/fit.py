"""Trains with Keras's own `fit` and the callbacks of a run.

`fit` takes a compiled model, its loaders and the recipe, and returns metrics and times.

    outcome = fit(model, train, test, config.train, checkpoints=..., writes_to=workdir, devices=...)
"""

import contextlib
import dataclasses
import logging
import math
import pathlib
import shlex
import time
from collections.abc import Callable, Sequence

import keras

from tfaccel.common.errors import RunError
from tfaccel.config import TrainConfig
from tfaccel.data.distribute import Loader
from tfaccel.data.stores.files import say_what_was_fetched
from tfaccel.runtime.devices import Device
from tfaccel.runtime.gpu_usage import GpuUsage
from tfaccel.training.callbacks.checkpoints import Checkpoints
from tfaccel.training.callbacks.ema import EMA
from tfaccel.training.callbacks.logs import Logs
from tfaccel.training.callbacks.near_chance import NearChance
from tfaccel.training.callbacks.throughput import Throughput
from tfaccel.training.checkpoint.rotation import largest_is_best
from tfaccel.training.logs import Writer
from tfaccel.training.logs.writers import make_writers

log = logging.getLogger("tfaccel")


@dataclasses.dataclass(frozen=True)
class Outcome:
    """The result of training.

    Attributes:
      metrics: the last epoch's metrics by Keras's names; `val_` is for the test images.
      images_per_second: over all replicas, since this process began, without validation and
        compilation; None if nothing else was trained.
      steps: optimizer steps, including skipped steps and those before a resume.
      seconds: wall time, including compilation and validation, and the time of earlier processes as
        far as checkpoints recorded it.
      first_execution_seconds: the part of `seconds` for this process's first execution, of one or
        several steps. Nearly all of it is compilation.
    """

    metrics: dict[str, float]
    images_per_second: float | None
    steps: int
    seconds: float
    first_execution_seconds: float


def fit(
    model: keras.Model,
    train: Loader,
    test: Loader,
    recipe: TrainConfig,
    *,
    checkpoints: Checkpoints,
    writes_to: pathlib.Path | None,
    devices: Sequence[Device],
    accumulation_steps: int = 1,
    until: int | None = None,
    trackers: Sequence[Writer] = (),
    watches: Sequence[keras.callbacks.Callback] = (),
    paused_s: Callable[[], float] = float,
) -> Outcome:
    """Trains for the recipe's epochs, and evaluates on `test` after each epoch.

    Args:
      model: the compiled model.
      train: the loader of training images.
      test: the loader of test images.
      recipe: epochs, averaged weights, and when to stop early.
      checkpoints: the callback that resumes and saves.
      writes_to: the workdir for the logs; None for a worker that writes none.
      devices: the devices of this worker's replicas, whose use is logged.
      accumulation_steps: the parts of a batch, which batch norm sees one by one.
      until: the epoch after the last one of this call; None for the recipe's epochs.
      trackers: further writers of the logs, on the chief.
      watches: further callbacks, which are called last.
      paused_s: returns the seconds that these have taken so far; they do not count for the speed.

    Raises:
      RunError: the loss is infinite or NaN at the end, so there is nothing to export.
    """
    throughput = Throughput(train, clock=lambda: time.perf_counter() - paused_s())
    writers = make_writers(writes_to, loader=train, num_epochs=recipe.epochs) if writes_to else []
    writers += trackers
    until = recipe.epochs if until is None else until
    how = {"throughput": throughput, "epochs_later": recipe.epochs - until}
    logs = Logs(writers, loader=train, gpus=GpuUsage(devices), **how)
    hints = [NearChance(train, test, updates_per_step=accumulation_steps)] if writes_to else []
    if writes_to:
        log.info("watch: tensorboard --logdir %s", shlex.quote(str(writes_to / "tensorboard")))
    with contextlib.closing(logs):
        history = model.fit(
            train,
            validation_data=test,
            epochs=until,
            # Each callback sees the logs that earlier ones add.
            callbacks=[throughput, *_of_recipe(recipe), logs, *hints, checkpoints, *watches],
            verbose=0,
        )
    say_what_was_fetched()
    metrics = {name: float(values[-1]) for name, values in history.history.items()}
    metrics.pop("images_per_second", None)  # of the last epoch; the run's own value is used instead
    if bad := [f"{name}={each}" for name, each in metrics.items() if not math.isfinite(each)]:
        raise RunError(
            f"training diverged: {', '.join(bad)} after the last epoch (metrics.csv in the workdir "
            "has all epochs); lower the learning rate"
        )
    return Outcome(
        metrics=metrics,
        images_per_second=throughput.images_per_second or None,
        steps=train.position,
        seconds=logs.seconds,
        first_execution_seconds=throughput.first_execution_s,
    )


def _of_recipe(recipe: TrainConfig) -> list[keras.callbacks.Callback]:
    """Returns the callbacks for early stopping and averaged weights, if the recipe has them."""
    callbacks = []
    if recipe.ema_momentum is not None:
        callbacks.append(EMA())
    if recipe.early_stopping_epochs is not None:
        callbacks.append(
            keras.callbacks.EarlyStopping(
                recipe.monitor,
                patience=recipe.early_stopping_epochs,
                mode="max" if largest_is_best(recipe.monitor) else "min",
                # With averaged weights the last ones count: the best epoch's are not kept.
                restore_best_weights=recipe.ema_momentum is None,
                verbose=1,
            )
        )
    return callbacks
