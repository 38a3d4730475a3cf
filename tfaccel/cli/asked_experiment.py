"""Checks the names and paths in a command's config before TensorFlow starts, which takes seconds.

The run itself would raise the same UserError later.

    check_experiment(parse(get_config()))
"""

import dataclasses
import pathlib

import ml_collections

from tfaccel.config import Config, parse
from tfaccel.config.names import check_model, check_monitor, check_optimizer, weights_file
from tfaccel.training.workdir import check_no_other, finished, has_checkpoints

TASKS = ("classes", "multilabel", "regression")  # of labels
# The metrics that an epoch can have. The number of classes decides whether there is a top5.
METRICS = {
    "classes": ("loss", "accuracy", "top5"),
    "multilabel": ("loss", "binary_accuracy", "f1_score", "auc", "mean_average_precision"),
    "regression": ("loss", "mean_absolute_error", "r2_score"),
    "mask": ("loss", "accuracy", "mean_iou"),
    "pairs": ("loss", "psnr"),
}


def check_experiment(config: Config, *, continues: bool = False) -> None:
    """Checks the names and paths in an experiment: model, optimizer, monitor, weights and data.

    A run that `continues` from a checkpoint needs no file of weights.

    Raises:
      UserError: one of them does not exist. The contents of files are checked later.
    """
    check_model(config.model.name)
    check_optimizer(config.train.optimizer)
    _check_monitor(config)
    if config.model.weights is not None and not continues:
        weights_file(config.model.weights)
    from tfaccel.data.there import check_there  # imports NumPy, which --help avoids

    for split in ("train", "test"):
        check_there(config.data, split)


def parse_checked(config: ml_collections.ConfigDict) -> Config:
    """Returns the parsed config, after all checks that need no TensorFlow."""
    experiment = parse(config)
    check_experiment(experiment)
    return experiment


def check_run(config: Config, workdir: pathlib.Path) -> None:
    """Raises UserError for mistakes in a run that can be found before TensorFlow starts."""
    values = dataclasses.asdict(config)
    if finished(workdir, values) is None:  # a finished run does not need its data
        check_no_other(workdir, values)
        check_experiment(config, continues=has_checkpoints(workdir))


def _check_monitor(config: Config) -> None:
    source, task = config.data.source, config.data.task
    if source == "arrays":  # labels or targets: the files decide
        kinds = ("classes", "pairs")
    elif source == "pairs":
        kinds = ("mask" if config.data.targets == "mask" else "pairs",)
    elif source == "csv" and task == "auto":  # the file decides
        kinds = TASKS
    else:
        kinds = ("classes" if task == "auto" else task,)
    check_monitor(config.train.monitor, {name for each in kinds for name in METRICS[each]})
