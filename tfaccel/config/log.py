"""The settings of a run's log in other programs."""

import dataclasses
from collections.abc import Sequence

from tfaccel.common.checks import check_text
from tfaccel.common.errors import UserError, did_you_mean
from tfaccel.config.documented import documented

TRACKERS = ("mlflow", "wandb")


@documented
@dataclasses.dataclass(frozen=True)
class LogConfig:
    """Where a run's numbers go in addition to the files in its workdir."""

    trackers: Sequence[str] | None = None
    """Experiment trackers that get the config, each epoch's metrics and the export: "mlflow",
    "wandb" (Weights & Biases), or both, e.g. mlflow,wandb. Each needs the extra of its name. Their
    own environment variables apply, such as MLFLOW_TRACKING_URI and WANDB_MODE=offline. None sends
    nothing."""
    project: str | None = None
    """MLflow's experiment and the project of Weights & Biases. None takes the environment's
    (MLFLOW_EXPERIMENT_NAME, WANDB_PROJECT), or else the tracker's own default."""

    def __post_init__(self):
        """Checks every field."""
        object.__setattr__(self, "trackers", known_trackers(self.trackers))
        if self.project is not None:
            check_text("project", self.project, expected="a name")


def known_trackers(value) -> tuple[str, ...] | None:
    """Returns the names of trackers, in the order given; None for none.

    Args:
      value: a sequence of names, or, from the command line, text such as "mlflow,wandb".

    Raises:
      UserError: there is no such tracker, or one is named twice.
    """
    if value is None or value == "":
        return None
    names = [each.strip() for each in value.split(",")] if isinstance(value, str) else value
    if not isinstance(names, Sequence) or not all(isinstance(each, str) for each in names):
        raise UserError(f"trackers={value!r}; expected names, e.g. mlflow,wandb")
    for each in names:
        if each not in TRACKERS:
            raise UserError(f"there is no tracker {each!r}{did_you_mean(each, TRACKERS)}")
    if len(set(names)) < len(names):
        raise UserError(f"trackers={','.join(names)} names one twice; give each once")
    return tuple(names) or None
