"""A whole training run, in the order in which it happens. Read it from the top.

    result = run(parse(get_config()), workdir=pathlib.Path("runs/digits"))

The Python API (tfaccel/run.py) has the same steps without the config and the folder.
"""

import contextlib
import dataclasses
import functools
import logging
import pathlib
from collections.abc import Sequence

import keras
import numpy as np

from tfaccel.common import run_log
from tfaccel.common.errors import RunError, UserError
from tfaccel.common.run_log import summary
from tfaccel.common.tables import counted
from tfaccel.config import Config, ExportConfig, TrainConfig, deciding
from tfaccel.config.weights_pixels import of_file
from tfaccel.data.distribute import Loader, check_same_classes
from tfaccel.data.images import ImageData
from tfaccel.experiment import models, recipe, run_page, tasks, thaw
from tfaccel.experiment.fit import fit
from tfaccel.experiment.models.frozen import backbone_of, freeze
from tfaccel.experiment.models.weights import begin_from, drawn_anew
from tfaccel.experiment.open_data import open_loader, open_sources
from tfaccel.export.at_start import check_at_start
from tfaccel.export.rehearsal import Rehearsal
from tfaccel.keras_internals.float32_layers import with_float32_layers
from tfaccel.keras_internals.optimizers import scale_rate
from tfaccel.run import Run
from tfaccel.runtime import devices as runtime
from tfaccel.runtime.agreement import of_workers, together
from tfaccel.runtime.cluster import Cluster
from tfaccel.runtime.devices import Device
from tfaccel.training import workdir as workdir_lib
from tfaccel.training.own_scaling import misfit
from tfaccel.training.trackers import check_installed
from tfaccel.training.trackers.hparams import HParams
from tfaccel.training.trackers.tracked import Tracked, make_trackers

log = logging.getLogger("tfaccel")


STEPS_IN_EXECUTION = 10  # on a GPU, if the config does not set steps_per_execution


def run(
    config: Config,
    *,
    workdir: pathlib.Path,
    cluster: Cluster | None = None,
    resume: str = "auto",
    accept_changes: bool = False,
) -> dict:
    """Trains, evaluates and exports an experiment, or continues an interrupted run.

    Args:
      config: a checked config; tfaccel/config/ documents every field.
      workdir: a folder for the run's files; tfaccel/training/workdir.py lists them. With several
        workers the chief writes it, and all workers must see it.
      cluster: the workers and this process's index; None reads them from the environment.
      resume: "auto", "required" or "never": see `tfaccel.training.workdir.check_usable`.
      accept_changes: whether to continue from a checkpoint of another config or other data.

    Returns:
      A JSON-ready dict: metrics, images_per_second, steps, seconds, and for the chief, export,
      unless the config asks for none.

    Raises:
      UserError: a mistake that you can fix; the message says how.
      SystemExit: a signal asked the run to stop, and its state was saved.
    """
    with contextlib.ExitStack() as stack:
        log_of_run = stack.enter_context(run_log.kept())

        check_installed(config.log.trackers or ())

        # ----- Process: GPUs, memory, precision and seed, before TensorFlow starts its devices.
        this_run = Run(config.runtime, cluster)
        if result := _finished(this_run, workdir, config):
            summary("workdir: this run has already ended in %s; nothing to do", workdir)
            return result

        # ----- Data, model and step: see `prepare`.
        continues = workdir_lib.has_checkpoints(workdir)
        train, test, model = prepare(this_run, config, continues=continues)

        # ----- Workdir: for the chief alone; a run that cannot begin leaves nothing behind.
        is_chief = this_run.cluster.is_chief
        watches, paused_s = [], float
        with together(this_run.strategy, "could not take the workdir"):
            if is_chief:
                workdir = stack.enter_context(workdir_lib.held(workdir))
                log_of_run.write_to(workdir / run_log.FILE)
                summary(
                    "workdir: %s; every choice and its reason is in %s there", workdir, run_log.FILE
                )
                # Find out at the start whether the export at the end would be refused.
                how = {
                    "workdir": workdir,
                    # Other workers would wait for this process's second step.
                    "beside_training": this_run.cluster.num_workers == 1,
                }
                # Entered first, so that the trackers are told how the run ended last.
                tracked = stack.enter_context(_tracked(config, workdir))
                if config.train.export:
                    rehearsal = stack.enter_context(
                        rehearse(this_run, config, model, train, test, **how)
                    )
                    watches, paused_s = [rehearsal.callback()], lambda: rehearsal.seconds

        # ----- Training: Keras's fit, from the newest checkpoint, with a test after each epoch.
        # A config that thaws layers has several stages, and each begins from a checkpoint.
        stages, begun = thaw.stages_of(config), False
        for stage in stages[_first_stage(this_run, workdir, stages) :]:
            checkpoints = this_run.checkpoints(
                workdir / "checkpoints",
                config.checkpoint,
                monitor=config.train.monitor,
                # If the checkpoints that replace model.weights are gone by now, it must not go on.
                resume="required" if begun or (continues and resume == "auto") else resume,
                accept_changes=accept_changes,
                facts=deciding(config),
            )
            if stage.begins:
                enter_stage(this_run, config, model, train, stage)
                checkpoints.begin_anew_at(stage.begins)
            if not begun:
                # A run that is refused here must not overwrite the description of the run before.
                checkpoints.when_begun = functools.partial(
                    _describe, workdir, config, tracked if is_chief else None, continues
                )
            outcome = fit(
                model,
                train,
                test,
                config.train,
                checkpoints=checkpoints,
                writes_to=workdir if is_chief else None,
                devices=this_run.runtime.devices,
                accumulation_steps=config.step.accumulation_steps,
                until=stage.ends,
                trackers=[tracked] if is_chief else [],
                # The rehearsal runs beside the first steps. It ends training if the export fails.
                watches=[] if begun else watches,
                paused_s=paused_s,
            )
            begun = True
            if checkpoints.has_stopped:
                break
        result = dataclasses.asdict(outcome)
        if not is_chief:
            return result

        # ----- Export: written, and compared in a fresh process before it gets its name. The run's
        # page is drawn meanwhile.
        with run_page.drawn(this_run, model, test, outcome, workdir=workdir):
            if config.train.export:
                export = this_run.export(
                    model,
                    workdir_lib.next_version(workdir / "export"),
                    loader=test,
                    **dataclasses.asdict(export_of(config)),
                )
                tracked.export(export)
                result["export"] = str(export)
        workdir_lib.write_json(workdir / "result.json", result)
        return result


def _finished(this_run: Run, workdir: pathlib.Path, config: Config) -> dict | None:
    """Returns the result if this very run has already ended in the workdir.

    Raises:
      RunError: some workers see that it ended and others do not, and these would wait forever.
    """
    result = workdir_lib.finished(workdir, dataclasses.asdict(config))
    with this_run.watchdog.guard():  # of another worker that ended at its start
        seen = of_workers(np.array([result is not None]), this_run.strategy)
    if seen.any() and not seen.all():
        raise RunError(
            f"some workers see the end of this run in {workdir}, and others do not; give all of "
            "them one shared folder, or wait until its file system shows the end to all"
        )
    return result


def _first_stage(this_run: Run, workdir: pathlib.Path, stages: Sequence[thaw.Stage]) -> int:
    """Returns the index of the stage in which the run begins or continues."""
    if len(stages) == 1:
        return 0
    with together(this_run.strategy, "could not read the checkpoints"):
        saved = this_run.checkpoints(workdir / "checkpoints").store.newest()
    epoch = 0 if saved is None else saved.state["epoch"]
    seen = of_workers(np.array([epoch]), this_run.strategy)
    return thaw.stage_at(stages, int(seen[0, 0]))


def rehearse(
    this_run: Run,
    config: Config,
    model: keras.Model,
    train: Loader,
    test: Loader,
    *,
    workdir: pathlib.Path,
    beside_training: bool = False,
) -> Rehearsal:
    """Returns the rehearsal of the export; with `beside_training` its callback begins it."""
    return check_at_start(
        model,
        workdir_lib.next_version(workdir / "export"),
        runtime=this_run.runtime,
        config=export_of(config),
        loader=test,
        train=train,
        beside_training=beside_training,
    )


def export_of(config: Config) -> ExportConfig:
    """Returns the settings of the export at the end of a run."""
    # By then Keras has replaced the weights by their averages; the export's card must say so.
    return ExportConfig(weights="average" if config.train.ema_momentum is not None else "trained")


def _tracked(config: Config, workdir: pathlib.Path) -> Tracked:
    """Returns the run in TensorBoard's page of settings and in the config's trackers."""
    names = config.log.trackers or ()
    trackers = make_trackers(names, project=config.log.project)
    return Tracked([HParams(workdir / "tensorboard"), *trackers], workdir, name=workdir.name)


def _describe(workdir: pathlib.Path, config: Config, tracked: Tracked, continues: bool) -> None:
    workdir_lib.check_no_other(workdir, dataclasses.asdict(config))
    # First, because a run that a tracker refuses leaves no config behind.
    tracked.begin(dataclasses.asdict(config), continues=continues)
    workdir_lib.write_config(workdir, dataclasses.asdict(config))
    workdir_lib.write_json(workdir / "environment.json", runtime.describe_environment())


def prepare(
    this_run: Run, config: Config, *, continues: bool = False
) -> tuple[Loader, Loader, keras.Model]:
    """Returns the loaders for training and test, and the compiled model.

    With `continues`, a checkpoint will replace all weights, so the config's are not loaded.

    Raises:
      UserError: the data cannot be used, or do not suit the model or the recipe.
    """
    # ----- Names: a wrong one raises before all images are decoded.
    models.find(config.model.name)
    recipe.optimizer.find(config.train.optimizer)

    # ----- Data: one stream of batches for each replica, on its device. Only training is shuffled.
    train, test = (
        open_loader(this_run, config, split, source=source)
        for split, source in zip(("train", "test"), open_sources(config.data), strict=True)
    )
    check_same_classes(train.class_names, test.class_names)
    tasks.check_names(train.data, config.model)
    tasks.tell_moved(train.data)

    # ----- Model: with the outputs that the data need.
    model, task = build(this_run, config, train.data, continues=continues)
    tasks.check_monitor(config.train.monitor, task)
    summary("%s", _in_words(model, train, test))

    # ----- Step: the loss of float32 outputs; one XLA function for a whole step.
    _compile(this_run, config, model, task, train)
    return train, test, model


def _compile(
    this_run: Run,
    config: Config,
    model: keras.Model,
    task: tasks.Task,
    train: Loader,
    *,
    first_epoch: int = 0,
) -> None:
    """Compiles the model for the weights that are trainable, from an epoch on."""
    first_step = first_epoch * train.num_batches
    this_run.compile(
        model,
        make_optimizer(config.train, train, model, first_step=first_step),
        task.loss,
        metrics=task.metrics,
        steps_per_execution=steps_in_execution(
            config.train, this_run.runtime.devices[0], num_steps=train.num_batches
        ),
        step=config.step,
    )


def enter_stage(
    this_run: Run, config: Config, model: keras.Model, train: Loader, stage: thaw.Stage
) -> None:
    """Lets the model train what the stage trains, with an optimizer of its own."""
    thaw.enter(stage, model, config)
    task = tasks.task_of(train.data, config.model, config.step, config.train)
    _compile(this_run, config, model, task, train, first_epoch=stage.begins)


def _in_words(model: keras.Model, train: Loader, test: Loader) -> str:
    """Returns one line on the model and the data; the log has more on each."""
    loaders = " and ".join(dict.fromkeys((train.data.loader, test.data.loader)))
    return (
        f"model: {models.described(model)}; trained on {train.num_examples:,} examples in "
        f"{counted(train.num_batches, 'step')} of {train.global_batch_size:,} an epoch, tested on "
        f"{test.num_examples:,}; loader {loaders}"
    )


def make_optimizer(
    config: TrainConfig, loader: Loader, model: keras.Model, *, first_step: int = 0
) -> keras.optimizers.Optimizer:
    """Returns the recipe's optimizer, with a schedule for the loader's epochs, and logs it.

    Its first update is that of `first_step`, counted from the start of training.

    Raises:
      UserError: Keras has no such optimizer, or the recipe does not fit it.
    """
    batch = min(loader.global_batch_size, loader.num_examples)  # the most examples in a step
    epoch = {"global_batch_size": batch, "num_steps": loader.num_batches}
    schedule = recipe.make_schedule(config, **epoch)
    summary("%s", recipe.describe(config, schedule, **epoch))
    optimizer = recipe.make_optimizer(config, schedule.begun_at(first_step))
    weights = [each for layer in backbone_of(model) for each in layer.trainable_weights]
    if config.backbone_factor != 1 and weights:
        scale_rate(optimizer, weights, config.backbone_factor)
        summary(
            "learning rate: %g times as large for %s of the backbone",
            *(config.backbone_factor, counted(len(weights), "weight")),
        )
    return optimizer


def build(
    this_run: Run, config: Config, data: ImageData, *, continues: bool = False
) -> tuple[keras.Model, tasks.Task]:
    """Returns the model for a loader's data, made in the strategy's scope, and its task.

    Raises:
      UserError: the data do not suit the model.
    """
    task = tasks.task_of(data, config.model, config.step, config.train)
    outputs = {"num_outputs": task.num_outputs, "class_names": data.class_names}
    model = make_model(this_run, config, **outputs, continues=continues)
    tasks.check_model(model, task)
    if fault := misfit(model, data.pixel_range):
        raise UserError(f"{fault} (--config.data.mean=0 --config.data.std={1 / 255:.16g})")
    return model, task


def make_model(
    this_run: Run,
    config: Config,
    *,
    num_outputs: int,
    class_names: Sequence[str] = (),
    continues: bool = False,
) -> keras.Model:
    """Returns the config's model with `num_outputs` classes or channels, in the strategy's scope.

    `class_names` are compared with those of the config's weights, if both are known. With
    `continues`, a checkpoint will replace all weights, so the config's are not loaded.

    Raises:
      UserError: the model does not suit the images, or the config's weights or layers do not suit
        the model.
    """
    weights = None if continues else config.model.weights
    with this_run.scope():
        with drawn_anew(weights) if weights else contextlib.nullcontext():
            model = models.build(
                config.model.name,
                image_shape=(*config.data.image_size, config.data.channels),
                num_outputs=num_outputs,
                vit=config.vit,
            )
        if config.model.weights is not None and continues:
            summary("model: the checkpoint's weights count, so model.weights is not read again")
        elif config.model.weights is not None:
            begin_from(
                config.model.weights,
                model,
                order=config.model.weights_order,
                new_layers=config.model.new_layers or (),
                class_names=class_names,
            )
            _compare_pixels(config)
        if config.model.float32_layers:
            model = with_float32_layers(model, config.model.float32_layers)
        if config.model.freeze:
            freeze(model, config.model.freeze)
            thaw.check_thaws(model, config)
            body = [each for layer in backbone_of(model) for each in layer.trainable_weights]
            if config.train.backbone_factor != 1 and not body and not config.model.thaws:
                raise UserError(
                    f"train.backbone_factor={config.train.backbone_factor}, but {model.name} "
                    "trains no layer of its backbone; remove it, or freeze fewer layers"
                )
            if config.model.weights is None:
                log.warning("model: frozen layers stay random, because there are no weights")
    return model


def _compare_pixels(config: Config) -> None:
    """Logs whether the loader's pixels are those of the weights' training, if these are known."""
    known = of_file(config.model.weights, config.model.name)
    if known is None and config.model.weights.endswith(".safetensors"):
        log.warning(
            "data: nothing says which pixels %s was trained on: there is no config.json of timm "
            "beside it; most of timm's Vision Transformers take --config.data.mean=0.5 "
            "--config.data.std=0.5, and torchvision's --config.data.mean=0.485,0.456,0.406 "
            "--config.data.std=0.229,0.224,0.225",
            config.model.weights,
        )
    if known is None or config.data.channels != 3:
        return
    pixels, given = known.pixels, config.data.mean + config.data.std
    as_trained = np.allclose(given, pixels.mean + pixels.std, rtol=0.02, atol=0.002)
    if as_trained and config.model.weights_order == pixels.order:
        summary("data: %s, as for the weights (from %s)", pixels.settings, known.source)
        return
    log.warning(
        "model: %s%s was trained on other pixels (from %s); use %s",
        "" if known.is_sure else f"if these are the published weights of {config.model.name}, ",
        config.model.weights,
        known.source,
        pixels.flags,
    )


def steps_in_execution(train: TrainConfig, device: Device, *, num_steps: int) -> int:
    """Returns the config's `steps_per_execution`, or a fast value for the device, which is logged.

    `num_steps` is the number of steps in an epoch.
    """
    if train.steps_per_execution is not None:
        return train.steps_per_execution
    if device.cuda_ordinal is None:
        return 1
    near = range(STEPS_IN_EXECUTION // 2, STEPS_IN_EXECUTION * 3 // 2 + 1)
    # A value that does not divide the epoch may cost a second compilation for the rest.
    dividing = [each for each in near if num_steps % each == 0] or [STEPS_IN_EXECUTION]
    chosen = min(num_steps, min(dividing, key=lambda each: abs(each - STEPS_IN_EXECUTION)))
    log.info("step: %d steps in an execution, so that the GPU need not wait for the host", chosen)
    return chosen
