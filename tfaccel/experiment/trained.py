"""The trained model of a run, from a checkpoint in its workdir.

snapshot = snapshot_of(workdir, config, "best")
model = model_of(run, config, loader.data, snapshot)
"""

import dataclasses
import pathlib

import keras

from tfaccel.common.errors import UserError
from tfaccel.config import Config
from tfaccel.data.images import ImageData
from tfaccel.experiment import recipe, thaw
from tfaccel.experiment.train import build
from tfaccel.run import Run
from tfaccel.training.checkpoint import state as state_lib
from tfaccel.training.checkpoint.rotation import largest_is_best
from tfaccel.training.checkpoint.store import Snapshot, Store


def store_of(workdir: pathlib.Path, config: Config) -> Store:
    """Returns the checkpoints of a run.

    Raises:
      UserError: there is none.
    """
    store = Store(
        workdir / "checkpoints",
        keep_last=config.checkpoint.keep_last,
        keep_best=config.checkpoint.keep_best,
        largest_is_best=largest_is_best(config.train.monitor),
    )
    if not store.steps():
        raise UserError(
            f"{store.folder} has no checkpoint; use the workdir of a run that has saved one"
        )
    return store


def snapshot_of(workdir: pathlib.Path, config: Config, which: str) -> Snapshot:
    """Returns the state in a checkpoint of a run.

    Args:
      workdir: the run's workdir.
      config: its config.
      which: "newest", or "best" according to the run's monitor.

    Raises:
      UserError: there is no checkpoint, or none has a score.
      CheckpointError: all of them are damaged.
    """
    store = store_of(workdir, config)
    snapshot = store.best() if which == "best" else store.newest()
    if snapshot is None:
        raise UserError(
            f"{store.folder} has no checkpoint with a {config.train.monitor}; use "
            "--checkpoint=newest"
        )
    return snapshot


def model_of(run: Run, config: Config, data: ImageData, snapshot: Snapshot) -> keras.Model:
    """Returns the run's model, compiled as in the run, with the checkpoint's variables.

    Args:
      run: the process's run.
      config: the config of the run that saved the checkpoint.
      data: a loader's data with the classes of the training.
      snapshot: the checkpoint.

    Raises:
      UserError: the data do not suit the model, or the checkpoint is of another model.
    """
    # All weights come from the checkpoint, so the file that training started from may be gone.
    model, task = build(run, config, data, continues=True)
    if stage := thaw.stage_of(config, snapshot.state):
        thaw.enter(stage, model, config)
    schedule = recipe.make_schedule(
        config.train,
        global_batch_size=config.data.whole_batch(snapshot.state["num_replicas"]),
        num_steps=snapshot.state["num_steps"],
    )
    optimizer = recipe.make_optimizer(config.train, schedule)
    step = dataclasses.replace(config.step, shard_states=False)  # nothing is trained here
    run.compile(model, optimizer, task.loss, metrics=task.metrics, step=step)
    with run.scope():
        model.optimizer.build(model.trainable_variables)
    state_lib.put_variables(model, snapshot.arrays)
    return model
