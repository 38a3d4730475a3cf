"""Where a run's numbers go: the settings and their mistakes."""

import pytest

from tfaccel.common.errors import UserError
from tfaccel.config import Config, LogConfig, deciding, default_config, parse


@pytest.mark.parametrize(
    ("given", "trackers"),
    [
        (None, None),
        ("", None),
        ((), None),
        ("mlflow", ("mlflow",)),
        ("mlflow, wandb", ("mlflow", "wandb")),
        (["wandb"], ("wandb",)),
    ],
)
def test_trackers_are_names(given, trackers):
    assert LogConfig(trackers=given).trackers == trackers
    config = default_config()
    config.log.trackers = given
    assert parse(config).log.trackers == trackers


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ("mlfow", "there is no tracker 'mlfow'; did you mean 'mlflow'"),
        ("comet", "there is no tracker 'comet'; expected one of: mlflow, wandb"),
        ("wandb,wandb", "names one twice"),
        (3, "trackers=3; expected names"),
        (("mlflow", 3), "expected names"),
    ],
)
def test_wrong_trackers_are_named(given, words):
    with pytest.raises(UserError, match=words):
        LogConfig(trackers=given)
    with pytest.raises(UserError, match="project=''; expected a name"):
        LogConfig(project="")


def test_a_resumed_run_may_have_other_trackers():
    assert not [each for each in deciding(Config()) if each.startswith("log.")]
