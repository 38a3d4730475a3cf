"""What a command's config names, looked at before TensorFlow starts, which takes seconds.

Takes a checked config; raises the sentence that the run itself would raise later.

    look_at(parse(get_config()))
"""

import dataclasses
import pathlib

import ml_collections

from tfaccel.common.errors import UserError, did_you_mean
from tfaccel.config import Config, parse
from tfaccel.config.names import check_model, check_optimizer, weights_file
from tfaccel.training.workdir import check_no_other, finished

# What an epoch's metrics can be; which of them there are is known once the classes are counted.
METRICS = {
    "labels": ("loss", "accuracy", "top5"),
    "mask": ("loss", "accuracy"),
    "pairs": ("loss", "psnr"),
}


def look_at(config: Config) -> None:
    """Checks the names and paths in an experiment: model, optimizer, monitor, weights, data.

    Raises:
      UserError: one is not there. What is in files is looked at later.
    """
    check_model(config.model.name)
    check_optimizer(config.train.optimizer)
    _check_monitor(config)
    if config.model.weights is not None:
        weights_file(config.model.weights)
    from tfaccel.data.there import check_there  # it imports NumPy, which help and flags do without

    for split in ("train", "test"):
        check_there(config.data, split)


def checked(config: ml_collections.ConfigDict) -> Config:
    """Returns what the config flags say, checked as far as it can be without TensorFlow."""
    experiment = parse(config)
    look_at(experiment)
    return experiment


def look_at_run(config: Config, workdir: pathlib.Path) -> None:
    """Raises UserError for what is known to be wrong with a run before TensorFlow starts."""
    values = dataclasses.asdict(config)
    if finished(workdir, values) is None:  # one that has ended needs its data no more
        check_no_other(workdir, values)
        look_at(config)


def _check_monitor(config: Config) -> None:
    is_pairs = config.data.source == "pairs"
    kind = "mask" if config.data.targets == "mask" else "pairs" if is_pairs else "labels"
    if config.data.source == "arrays":  # whose files say whether they are labels or targets
        names = {*METRICS["labels"], *METRICS["pairs"]}
    else:
        names = METRICS[kind]
    known = [*names, *(f"val_{name}" for name in names)]
    if config.train.monitor not in known:
        cure = did_you_mean(config.train.monitor, known)
        raise UserError(
            f"train.monitor={config.train.monitor!r} is none of an epoch's metrics{cure}"
        )
