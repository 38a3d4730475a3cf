"""A whole training run, in the order in which it happens. Read it from the top.

    result = run(parse(get_config()), workdir=pathlib.Path("runs/digits"))

The Python API (tfaccel/run.py) is the same steps without the config and the folder.
"""

import dataclasses
import logging
import pathlib

from tfaccel import models, runtime, step, tasks
from tfaccel import workdir as workdir_lib
from tfaccel.config import Config
from tfaccel.data.distribute import check_same_classes
from tfaccel.data.from_config import open_loader
from tfaccel.fit import fit
from tfaccel.run import Run

log = logging.getLogger("tfaccel")


def run(config: Config, *, workdir: pathlib.Path) -> dict:
    """Trains, measures and exports what `config` says.

    Args:
      config: what a file in configs/ says, checked; every field is in tfaccel/config.py.
      workdir: a new folder for what the run leaves; tfaccel/workdir.py lists it. With several
        workers the chief writes it.

    Returns:
      JSON-ready: metrics, images_per_second, steps, seconds, and, of the chief, export.

    Raises:
      UserError: a mistake that the user can mend, said in one sentence.
    """
    # ----- Process: GPUs, memory, precision and seed, before TensorFlow starts its devices.
    this_run = Run(config.runtime)

    # ----- Data: one stream of batches for each replica, on its device. Only training is shuffled.
    train = open_loader(this_run, config, "train")
    test = open_loader(this_run, config, "test", class_names=train.class_names)
    check_same_classes(train, test)

    # ----- Model: built in the strategy's scope, so that every replica has its variables.
    task = tasks.task_of(train.data, config.model)
    with this_run.scope():
        model = models.build(
            config.model.name,
            image_shape=(*config.data.image_size, config.data.channels),
            num_outputs=task.num_outputs,
        )
    tasks.check_model(model, task)
    log.info("model: %s, %d parameters", model.name, model.count_params())

    # ----- Step: loss on float32 outputs; one XLA function for a whole step.
    this_run.compile(
        model,
        step.make_optimizer(config.train.optimizer, learning_rate=config.train.learning_rate),
        task.loss,
        metrics=task.metrics,
        step=config.step,
    )

    # ----- Workdir: the chief's alone; a run that could not begin leaves nothing behind.
    is_chief = this_run.cluster.is_chief
    if is_chief:
        workdir = workdir_lib.create(workdir)
        workdir_lib.write_json(workdir / "config.json", dataclasses.asdict(config))
        workdir_lib.write_json(workdir / "environment.json", runtime.describe_environment())
        log.info("workdir: %s", workdir)

    # ----- Training: Keras's fit, with a measurement on the test images after each epoch.
    writes_to = workdir if is_chief else None
    outcome = fit(model, train, test, epochs=config.train.epochs, writes_to=writes_to)
    result = dataclasses.asdict(outcome)
    if not is_chief:
        return result

    # ----- Export: written, loaded back and compared on test images before it counts.
    test_images = next(iter(test))[0]
    first_replicas = this_run.strategy.experimental_local_results(test_images)[0]
    export = this_run.export(model, workdir / "export" / "1", images=first_replicas)

    result["export"] = str(export)
    workdir_lib.write_json(workdir / "result.json", result)
    return result
