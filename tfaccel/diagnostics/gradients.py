"""`tfaccel underflow`: what half precision loses of an experiment's gradients.

Takes an experiment; returns reports. The model is that of the config, before its first step, and
the batch is the first one of training.

    for name, report in reports(config, num_replicas=8).items():
        show(report)
"""

import dataclasses
import os

from tfaccel.common.report import Report
from tfaccel.common.run_log import summary
from tfaccel.config import Config
from tfaccel.diagnostics.allreduce_error import allreduce_error
from tfaccel.diagnostics.underflow import gradient_underflow
from tfaccel.experiment.train import prepare
from tfaccel.keras_internals.layers import layers_of
from tfaccel.run import Run
from tfaccel.runtime.cluster import find

FEWEST = 2  # replicas that sum anything


def reports(config: Config, *, num_replicas: int | None = None) -> dict[str, Report]:
    """Returns "underflow", if the model computes in half precision, and "allreduce".

    The first is what becomes 0 in the pass, and the second is the error of the sum over replicas.

    Args:
      config: a checked config. Its label smoothing, mixup and cutmix are left out.
      num_replicas: the number of replicas that sum; by default those of this machine, but at least
        two.

    Raises:
      UserError: as for `tfaccel.experiment.train.prepare` and `allreduce_error`.
    """
    if config.step.mixes_labels:
        summary("underflow: without label smoothing, mixup and cutmix, which change the labels")
    plain = {"label_smoothing": 0.0, "mixup_alpha": 0.0, "cutmix_alpha": 0.0}
    config = dataclasses.replace(config, step=dataclasses.replace(config.step, **plain))
    this_run = Run(config.runtime, find(os.environ))
    train, _, model = prepare(this_run, config)
    batch = next(iter(train))
    num_replicas = num_replicas or max(FEWEST, this_run.strategy.num_replicas_in_sync)
    found = {}
    if any(each.compute_dtype != "float32" for each in layers_of(model)):
        found["underflow"] = gradient_underflow(model, batch)
    found["allreduce"] = allreduce_error(model, batch, num_replicas=num_replicas)
    return found
