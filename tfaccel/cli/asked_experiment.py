"""What a command's config names, looked at before TensorFlow starts, which takes seconds.

Takes a checked config; raises the sentence that the run itself would raise later.

    look_at(parse(get_config()))
"""

from tfaccel.common.errors import UserError, did_you_mean
from tfaccel.config import Config
from tfaccel.config.names import check_model, check_optimizer, weights_file
from tfaccel.data.there import check_there

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
    for split in ("train", "test"):
        check_there(config.data, split)


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
