"""The epochs: Keras's own `fit`, with the callbacks of a run.

Takes a compiled model, its loaders and the recipe; gives the metrics and how long it took.

    outcome = fit(model, train, test, config.train, checkpoints=..., writes_to=workdir, devices=...)
"""

import contextlib
import dataclasses
import logging
import math
import pathlib
import shlex
from collections.abc import Sequence

import keras

from tfaccel.common.errors import RunError
from tfaccel.config import TrainConfig
from tfaccel.data.distribute import Loader
from tfaccel.runtime.devices import Device
from tfaccel.runtime.gpu_usage import GpuUsage
from tfaccel.training.callbacks.checkpoints import Checkpoints
from tfaccel.training.callbacks.early_stopping import EarlyStopping
from tfaccel.training.callbacks.ema import EMA
from tfaccel.training.callbacks.logs import Logs
from tfaccel.training.callbacks.near_chance import NearChance
from tfaccel.training.callbacks.throughput import Throughput
from tfaccel.training.checkpoint.rotation import largest_is_best
from tfaccel.training.logs.writers import make_writers

log = logging.getLogger("tfaccel")


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What training came to.

    Attributes:
      metrics: the last epoch's, by Keras's names; `val_` is the test images'.
      images_per_second: over all replicas, since this process began; validation and compilation
        left out; None where nothing else was trained.
      steps: optimizer updates asked for, those before a resume included.
      seconds: wall time, compilation and validation included, and of earlier processes what their
        checkpoints kept.
      first_execution_seconds: of those, what the first step (or the first of several steps in one
        execution) of this process took: nearly all of it is compilation.
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
    watches: Sequence[keras.callbacks.Callback] = (),
) -> Outcome:
    """Trains for as many epochs as the recipe says, and measures on `test` after each.

    Args:
      model: compiled.
      train: what to train on.
      test: what to measure on.
      recipe: epochs, averaged weights, and when to stop early.
      checkpoints: where it goes on from, and saves to.
      writes_to: the workdir, for the logs; None for a worker that writes none.
      devices: of this worker's replicas, whose use is logged.
      accumulation_steps: parts of a batch that batch norm sees by turns.
      watches: further callbacks, which come last.

    Raises:
      UserError: the loss is no number at the end: there is nothing to export.
    """
    throughput = Throughput(train)
    writers = make_writers(writes_to, loader=train, num_epochs=recipe.epochs) if writes_to else []
    logs = Logs(writers, loader=train, throughput=throughput, gpus=GpuUsage(devices))
    hints = [NearChance(train, test, updates_per_step=accumulation_steps)] if writes_to else []
    if writes_to:
        log.info("watch: tensorboard --logdir %s", shlex.quote(str(writes_to / "tensorboard")))
    with contextlib.closing(logs):
        history = model.fit(
            train,
            validation_data=test,
            epochs=recipe.epochs,
            # Each sees what those before it add to the logs.
            callbacks=[throughput, *_of_recipe(recipe), logs, *hints, checkpoints, *watches],
            verbose=0,
        )
    metrics = {name: float(values[-1]) for name, values in history.history.items()}
    metrics.pop("images_per_second", None)  # the last epoch's; that of the run stands beside
    if spoilt := [name for name, each in metrics.items() if not math.isfinite(each)]:
        raise RunError(
            f"training diverged: {', '.join(f'{name}={metrics[name]}' for name in spoilt)} after "
            "the last epoch (metrics.csv in the workdir has all); lower the learning rate"
        )
    return Outcome(
        metrics=metrics,
        images_per_second=throughput.images_per_second or None,
        steps=train.position,
        seconds=logs.seconds,
        first_execution_seconds=throughput.first_execution_s,
    )


def _of_recipe(recipe: TrainConfig) -> list[keras.callbacks.Callback]:
    """Returns the callbacks that the recipe asks for."""
    callbacks = []
    if recipe.ema_momentum is not None:
        callbacks.append(EMA())
    if recipe.early_stopping_epochs is not None:
        callbacks.append(
            EarlyStopping(
                recipe.monitor,
                patience=recipe.early_stopping_epochs,
                mode="max" if largest_is_best(recipe.monitor) else "min",
                # Of averaged weights, those of the end: the best epoch's are not kept apart.
                restore_best_weights=recipe.ema_momentum is None,
                verbose=1,
            )
        )
    return callbacks
