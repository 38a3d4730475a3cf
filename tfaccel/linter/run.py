"""`tfaccel lint`: an experiment's model, data and step, read from its config and judged.

all_well = run(parse(get_config()), script=None, fix=False)
"""

import logging
import os
import pathlib

import keras

from tfaccel import models, tasks
from tfaccel.cluster import find
from tfaccel.config import Config
from tfaccel.data.distribute import Loader
from tfaccel.data.from_config import open_loader
from tfaccel.errors import UserError
from tfaccel.linter.facts import Facts, Model, Step
from tfaccel.linter.lint import gpu_capability, judge, precision_of
from tfaccel.linter.read_data import read_data
from tfaccel.linter.read_model import read_model
from tfaccel.linter.script import read_script
from tfaccel.run import Run


def run(config: Config, *, script: pathlib.Path | None, fix: bool) -> bool:
    """Prints what is to be mended in an experiment, and returns whether none of it is an error.

    Builds the model and opens the data, as a run would, but decodes, compiles and trains nothing.

    Args:
      config: the experiment.
      script: a Python file to look through too; None for none.
      fix: whether to pad heads and measure that, which compiles two steps.

    Raises:
      UserError: the data are not there, or do not suit the config.
    """
    cluster = find(os.environ)
    if cluster.num_workers > 1:
        raise UserError(
            f"lint is of one process and all its GPUs, not of {cluster.num_workers} workers "
            f"({cluster.source}); start it once, without TF_CONFIG"
        )
    source = [] if script is None else read_script(_text(script), script.name)
    this_run = Run(config.runtime, cluster)
    loader = _open(this_run, config)
    num_outputs = config.model.num_outputs
    if num_outputs is None:
        num_outputs = tasks.task_of(loader.data, config.model, config.step).num_outputs
    with this_run.scope():
        model = models.build(
            config.model.name,
            image_shape=(*config.data.image_size, config.data.channels),
            num_outputs=num_outputs,
        )
    data, specs = read_data(loader)
    read = read_model(model, data_specs=specs, strategy=this_run.strategy)
    facts = Facts(read, data, _step(config, this_run, read, model))
    table = judge(facts, model=model, strategy=this_run.strategy, also=source)
    print(table)
    flags = [each.change for each in table if each.change]
    if fix:
        print(f"\n{table.fix()}")
        if flags:
            print("\nflags of `tfaccel train` for the rest; nothing was written:")
            print("\n".join(f"  {each}" for each in dict.fromkeys(flags)))
    return table.ok


def _open(this_run: Run, config: Config) -> Loader:
    """Returns the training loader of the kind that decodes nothing beforehand.

    Batches and shapes are those of all kinds; what it logs of itself would be of no run.
    """
    log = logging.getLogger("tfaccel")
    level = log.level
    log.setLevel(logging.WARNING)
    try:
        return open_loader(
            this_run, config, "train", loader="tf_data", stored_size=None, bad_files="error"
        )
    finally:
        log.setLevel(level)


def _text(script: pathlib.Path) -> str:
    try:
        return script.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"script {script} cannot be read ({error}); give a Python file") from error


def _step(config: Config, this_run: Run, read: Model, model: keras.Model) -> Step:
    replicas = this_run.strategy.num_replicas_in_sync
    synchronized = config.step.sync_batchnorm and replicas > 1
    batch_norm = any(each.kind == "BatchNormalization" for each in read.layers)
    on_gpu = any(each.cuda_ordinal is not None for each in this_run.runtime.devices)
    return Step(
        precision=precision_of(read, model),
        tf32=config.runtime.tf32,
        xla=config.runtime.xla,
        without_xla="step.sync_batchnorm sums inside it"
        if synchronized and batch_norm and config.runtime.xla
        else None,
        steps_per_execution=config.train.steps_per_execution,
        accumulation_steps=config.step.accumulation_steps,
        num_replicas=replicas,
        sync_batchnorm=synchronized,
        gpu=gpu_capability() if on_gpu else None,
        from_config=True,
    )
