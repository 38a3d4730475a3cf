"""`tfaccel lint`: reads an experiment's model, data and step from its config, and checks them.

table = run(parse(get_config()), script=None)
print(table, table.fix())
"""

import contextlib
import logging
import os
import pathlib
from collections.abc import Iterator

import keras

from tfaccel.config import Config
from tfaccel.diagnostics.lint.facts import Facts, Model, Step
from tfaccel.diagnostics.lint.lint import Lint, gpu_capability, judge, precision_of
from tfaccel.diagnostics.lint.read_data import read_data
from tfaccel.diagnostics.lint.read_model import read_model, with_pixels
from tfaccel.diagnostics.lint.script import in_script
from tfaccel.experiment import tasks
from tfaccel.experiment.open_data import open_loader
from tfaccel.experiment.train import make_model, make_optimizer
from tfaccel.run import Run
from tfaccel.runtime.cluster import check_one_process, find
from tfaccel.step import in_xla


def run(config: Config, *, script: pathlib.Path | None) -> Lint:
    """Returns the findings of an experiment.

    Builds the model and opens the data as a run would, but decodes, compiles and trains nothing.

    Args:
      config: the experiment.
      script: a Python file to check too; None for none.

    Raises:
      UserError: the data does not exist, or does not suit the config.
    """
    cluster = find(os.environ)
    check_one_process(cluster, "lint")
    source = [] if script is None else in_script(script)
    with _without_log():
        this_run = Run(config.runtime, cluster)
        # This loader decodes nothing in advance, unless bad_files="skip" has to find the bad files.
        # Batches and shapes are the same in all loaders.
        loader = open_loader(this_run, config, "train", loader="tf_data", stored_size=None)
    num_outputs = config.model.num_outputs
    if num_outputs is None:
        task = tasks.task_of(loader.data, config.model, config.step, config.train)
        tasks.check_monitor(config.train.monitor, task)
        num_outputs = task.num_outputs
    model = make_model(this_run, config, num_outputs=num_outputs)
    with _without_log():
        make_optimizer(config.train, loader, model)  # raises the errors of the recipe
    data, specs = read_data(loader)
    read = read_model(model, data_specs=specs, strategy=this_run.strategy)
    read = with_pixels(read, model, data)
    facts = Facts(read, data, _step(config, this_run, read, model))
    return judge(facts, model=model, strategy=this_run.strategy, also=source)


@contextlib.contextmanager
def _without_log() -> Iterator[None]:
    """Hides the log lines of a run within the context, because lint starts no run."""
    log = logging.getLogger("tfaccel")
    level = log.level
    log.setLevel(logging.WARNING)
    try:
        yield
    finally:
        log.setLevel(level)


def _step(config: Config, this_run: Run, read: Model, model: keras.Model) -> Step:
    replicas = this_run.strategy.num_replicas_in_sync
    synchronized = config.step.sync_batchnorm and replicas > 1
    batch_norm = any(each.kind == "BatchNormalization" for each in read.layers)
    not_for_xla = without_xla = in_xla.of_layers(model)
    if synchronized and batch_norm:
        without_xla = "step.sync_batchnorm needs an all-reduce inside the step"
    on_gpu = any(each.cuda_ordinal is not None for each in this_run.runtime.devices)
    return Step(
        precision=precision_of(read, model),
        tf32=config.runtime.tf32,
        xla=this_run.runtime.xla,
        without_xla=without_xla if this_run.runtime.xla else None,
        not_for_xla=not_for_xla,
        steps_per_execution=config.train.steps_per_execution,
        accumulation_steps=config.step.accumulation_steps,
        num_replicas=replicas,
        sync_batchnorm=synchronized,
        gpu=gpu_capability() if on_gpu else None,
        from_config=True,
        epochs=config.train.epochs,
    )
