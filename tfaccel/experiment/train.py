"""A whole training run, in the order in which it happens. Read it from the top.

    result = run(parse(get_config()), workdir=pathlib.Path("runs/digits"))

The Python API (tfaccel/run.py) is the same steps without the config and the folder.
"""

import contextlib
import dataclasses
import functools
import logging
import pathlib

import keras
import numpy as np

from tfaccel.common import run_log
from tfaccel.common.errors import RunError, UserError
from tfaccel.common.run_log import summary
from tfaccel.common.tables import counted
from tfaccel.config import Config, ExportConfig, TrainConfig, deciding
from tfaccel.data.distribute import Loader, check_same_classes
from tfaccel.data.images import ImageData
from tfaccel.experiment import models, recipe, tasks
from tfaccel.experiment.fit import fit
from tfaccel.experiment.models.weights import begin_from
from tfaccel.experiment.open_data import open_loader
from tfaccel.export.at_start import check_at_start
from tfaccel.export.rehearsal import Rehearsal
from tfaccel.keras_internals.float32_layers import with_float32_layers
from tfaccel.run import Run
from tfaccel.runtime import devices as runtime
from tfaccel.runtime.agreement import of_workers, together
from tfaccel.runtime.cluster import Cluster
from tfaccel.runtime.devices import Device
from tfaccel.training import workdir as workdir_lib
from tfaccel.training.keras_pixels import trained_on
from tfaccel.training.own_scaling import misfit

log = logging.getLogger("tfaccel")


STEPS_IN_EXECUTION = 10  # on a GPU, where the config leaves it open


def run(
    config: Config,
    *,
    workdir: pathlib.Path,
    cluster: Cluster | None = None,
    resume: str = "auto",
    accept_changes: bool = False,
) -> dict:
    """Trains, measures and exports what `config` says, or goes on with what was begun.

    Args:
      config: what a file in configs/ says, checked; every field is in tfaccel/config/.
      workdir: a folder for what the run leaves; tfaccel/training/workdir.py lists it. With several
        workers the chief writes it, and all see it.
      cluster: which worker of the job this process is; None for what the environment says.
      resume: "auto", "required" or "never": see `tfaccel.training.workdir.check_usable`.
      accept_changes: whether to go on with a checkpoint of another config or other data.

    Returns:
      JSON-ready: metrics, images_per_second, steps, seconds, and, of the chief, export.

    Raises:
      UserError: a mistake that the user can mend, said in one sentence.
      SystemExit: a signal asked to stop, and the state is saved.
    """
    with run_log.kept() as log_of_run:
        return _run(
            config,
            workdir=workdir,
            cluster=cluster,
            resume=resume,
            accept_changes=accept_changes,
            log_of_run=log_of_run,
        )


def _run(
    config: Config,
    *,
    workdir: pathlib.Path,
    cluster: Cluster | None,
    resume: str,
    accept_changes: bool,
    log_of_run: run_log.Kept,
) -> dict:
    # ----- Process: GPUs, memory, precision and seed, before TensorFlow starts its devices.
    this_run = Run(config.runtime, cluster)
    if result := _finished(this_run, workdir, config):
        summary("workdir: %s holds the end of this run; nothing to do", workdir)
        return result

    # ----- Data, model and step: see below.
    train, test, model = prepare(this_run, config)

    # ----- Workdir: the chief's alone; a run that could not begin leaves nothing behind.
    is_chief = this_run.cluster.is_chief
    with contextlib.ExitStack() as stack:
        with together(this_run.strategy, "could not take the workdir"):
            if is_chief:
                workdir = stack.enter_context(workdir_lib.held(workdir))
                log_of_run.write_to(workdir / run_log.FILE)
                summary(
                    "workdir: %s; every choice and its reason is in %s there", workdir, run_log.FILE
                )
                # What the export would refuse at the end is known before the first step.
                rehearsal = stack.enter_context(
                    rehearse(this_run, config, model, train, test, workdir=workdir)
                )

        # ----- Training: Keras's fit, from the newest checkpoint on, with a test after each epoch.
        checkpoints = this_run.checkpoints(
            workdir / "checkpoints",
            config.checkpoint,
            monitor=config.train.monitor,
            resume=resume,
            accept_changes=accept_changes,
            facts=deciding(config),
        )
        # A run that is refused there leaves what the one before said of itself.
        checkpoints.when_begun = functools.partial(_describe, workdir, config)
        outcome = fit(
            model,
            train,
            test,
            config.train,
            checkpoints=checkpoints,
            writes_to=workdir if is_chief else None,
            devices=this_run.runtime.devices,
            accumulation_steps=config.step.accumulation_steps,
            # The export, tried beside the first steps, ends training once it is sure to fail.
            watches=[rehearsal.callback()] if is_chief else [],
        )
        result = dataclasses.asdict(outcome)
        if not is_chief:
            return result

        # ----- Export: written, and compared on test images in a fresh process before it counts.
        export = this_run.export(
            model,
            workdir_lib.next_version(workdir / "export"),
            loader=test,
            **dataclasses.asdict(export_of(config)),
        )
        result["export"] = str(export)
        workdir_lib.write_json(workdir / "result.json", result)
        return result


def _finished(this_run: Run, workdir: pathlib.Path, config: Config) -> dict | None:
    """Returns the result of this very run, if it has ended in the workdir before.

    Raises:
      RunError: some workers see its end there and others do not, and would wait for them.
    """
    result = workdir_lib.finished(workdir, dataclasses.asdict(config))
    seen = of_workers(np.array([result is not None]), this_run.strategy)
    if seen.any() and not seen.all():
        raise RunError(
            f"some workers see the end of this run in {workdir}, and others do not; give all one "
            "that they share, or wait until its file system shows it to all"
        )
    return result


def rehearse(
    this_run: Run,
    config: Config,
    model: keras.Model,
    train: Loader,
    test: Loader,
    *,
    workdir: pathlib.Path,
) -> Rehearsal:
    """Returns the rehearsal of the export, which is checked by now but for its own process."""
    return check_at_start(
        model,
        workdir_lib.next_version(workdir / "export"),
        runtime=this_run.runtime,
        config=export_of(config),
        loader=test,
        train=train,
    )


def export_of(config: Config) -> ExportConfig:
    """Returns how a run is exported at its end."""
    # Keras has put the averages in the weights' place by then; the card shall say so.
    return ExportConfig(weights="average" if config.train.ema_momentum is not None else "trained")


def _describe(workdir: pathlib.Path, config: Config) -> None:
    workdir_lib.write_config(workdir, dataclasses.asdict(config))
    workdir_lib.write_json(workdir / "environment.json", runtime.describe_environment())


def prepare(this_run: Run, config: Config) -> tuple[Loader, Loader, keras.Model]:
    """Returns the loaders for training and test, and the compiled model.

    Args:
      this_run: the process, prepared.
      config: what data, which model, which recipe.

    Raises:
      UserError: the data cannot be used, or do not suit the model or the recipe.
    """
    # ----- Names: those that are wrong are told before all images are decoded.
    models.find(config.model.name)
    recipe.optimizer.find(config.train.optimizer)

    # ----- Data: one stream of batches for each replica, on its device. Only training is shuffled.
    train = open_loader(this_run, config, "train")
    test = open_loader(this_run, config, "test", class_names=train.class_names)
    check_same_classes(train.class_names, test.class_names)

    # ----- Model: what the data ask for.
    model, task = build(this_run, config, train.data)
    tasks.check_monitor(config.train.monitor, task)
    summary("%s", _in_words(model, train, test))

    # ----- Step: loss on float32 outputs; one XLA function for a whole step.
    this_run.compile(
        model,
        make_optimizer(config.train, train),
        task.loss,
        metrics=task.metrics,
        steps_per_execution=steps_in_execution(
            config.train, this_run.runtime.devices[0], num_steps=train.num_batches
        ),
        step=config.step,
    )
    return train, test, model


def _in_words(model: keras.Model, train: Loader, test: Loader) -> str:
    """Returns what is trained on what, in a line; the log has more of each."""
    loaders = " and ".join(dict.fromkeys((train.data.loader, test.data.loader)))
    return (
        f"model: {models.described(model)}; trained on {train.num_examples:,} examples in "
        f"{counted(train.num_batches, 'step')} of {train.global_batch_size:,} an epoch, tested on "
        f"{test.num_examples:,}; loader {loaders}"
    )


def make_optimizer(config: TrainConfig, loader: Loader) -> keras.optimizers.Optimizer:
    """Returns the recipe's optimizer, its schedule made for what the loader has, and logs it.

    Raises:
      UserError: Keras has no such optimizer, or the recipe does not fit it.
    """
    batch = min(loader.global_batch_size, loader.num_examples)  # what a step has at most
    epoch = {"global_batch_size": batch, "num_steps": loader.num_batches}
    schedule = recipe.make_schedule(config, **epoch)
    summary("%s", recipe.describe(config, schedule, **epoch))
    return recipe.make_optimizer(config, schedule)


def build(this_run: Run, config: Config, data: ImageData) -> tuple[keras.Model, tasks.Task]:
    """Returns the model, in the strategy's scope, so that every replica has it, and its task.

    Args:
      this_run: the process, prepared.
      config: which model.
      data: what it is for: a loader's.

    Raises:
      UserError: the data do not suit the model.
    """
    task = tasks.task_of(data, config.model, config.step)
    model = make_model(this_run, config, num_outputs=task.num_outputs)
    tasks.check_model(model, task)
    if wrong := misfit(model, data.pixel_range):
        raise UserError(f"{wrong} (--config.data.mean=0 --config.data.std={1 / 255:.16g})")
    return model, task


def make_model(this_run: Run, config: Config, *, num_outputs: int) -> keras.Model:
    """Returns the config's model, of that many classes or channels, in the strategy's scope.

    Raises:
      UserError: it does not suit the images, or the config's weights or layers do not suit it.
    """
    with this_run.scope():
        model = models.build(
            config.model.name,
            image_shape=(*config.data.image_size, config.data.channels),
            num_outputs=num_outputs,
        )
        if config.model.weights is not None:
            begin_from(config.model.weights, model, order=config.model.weights_order)
            _say_pixels(config)
        if config.model.float32_layers:
            model = with_float32_layers(model, config.model.float32_layers)
    return model


def _say_pixels(config: Config) -> None:
    """Warns of a loader that does not give what Keras's weights of the model were trained on."""
    pixels = trained_on(config.model.name)
    if pixels is None or config.data.channels != 3:
        return
    given = config.data.mean + config.data.std
    as_trained = np.allclose(given, pixels.mean + pixels.std, rtol=0.02, atol=0.002)
    if not as_trained or config.model.weights_order != pixels.order:
        log.warning(
            "model: if %s is one of Keras's own files for %s, it was trained on other pixels; "
            "then give %s",
            config.model.weights,
            config.model.name,
            pixels.flags,
        )


def steps_in_execution(train: TrainConfig, device: Device, *, num_steps: int) -> int:
    """Returns the config's `steps_per_execution`, or what is quick on the device, and says why.

    Args:
      train: the recipe.
      device: of a replica.
      num_steps: of an epoch.
    """
    if train.steps_per_execution is not None:
        return train.steps_per_execution
    if device.cuda_ordinal is None:
        return 1
    near = range(STEPS_IN_EXECUTION // 2, STEPS_IN_EXECUTION * 3 // 2 + 1)
    # Where they are one launch, what does not divide the epoch is compiled once more.
    dividing = [each for each in near if num_steps % each == 0] or [STEPS_IN_EXECUTION]
    chosen = min(num_steps, min(dividing, key=lambda each: abs(each - STEPS_IN_EXECUTION)))
    log.info("step: %d in an execution, so that the GPU does not wait for the host's look", chosen)
    return chosen
