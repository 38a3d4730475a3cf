"""A whole run of `tfaccel train` in a tracker, which a signal stops and which goes on."""

import dataclasses
import os
import pathlib
import signal

import pytest
from small_network import as_mnist_cnn

from tfaccel.cli.flags import load
from tfaccel.common.errors import UserError
from tfaccel.config import parse
from tfaccel.experiment import train
from tfaccel.training.trackers import Tracker, tracked
from tfaccel.training.workdir import finished

DIGITS = f"{pathlib.Path(__file__).parents[2]}/configs/digits.py:smoke"


class Noted(Tracker):
    """Notes each call, and may ask the run to stop."""

    key = name = "mlflow"
    calls: list
    stops_after: int | None = None

    def __init__(self, *, project):
        self.calls.append(("project", project))

    def begin(self, before, *, name, config, folder):
        self.calls.append(("begin", before, name, config["train"]["epochs"]))
        return before or "7"

    def log(self, record):
        self.calls.append(("log", record["epoch"]))
        if record["epoch"] == self.stops_after:
            os.kill(os.getpid(), signal.SIGTERM)

    def export(self, path):
        self.calls.append(("export", path.name))

    def end(self, outcome):
        self.calls.append(("end", outcome))


@pytest.fixture
def config(monkeypatch):
    monkeypatch.setattr(Noted, "calls", [], raising=False)
    monkeypatch.setitem(tracked.KINDS, "mlflow", Noted)
    monkeypatch.setattr(train, "check_installed", lambda names: None)
    config = load(DIGITS)
    config.train.epochs, config.log.trackers, config.log.project = 2, "mlflow", "p"
    with as_mnist_cnn():
        yield config


def test_a_stopped_run_goes_on_in_the_same_run_of_the_tracker(
    config, tmp_path, monkeypatch, export_not_saved
):
    workdir = tmp_path / "a"
    monkeypatch.setattr(Noted, "stops_after", 1)
    with pytest.raises(SystemExit):
        train.run(parse(config), workdir=workdir)
    first = Noted.calls[:]
    assert first[:3] == [("project", "p"), ("begin", None, "a", 2), ("log", 1)]
    assert first[-1] == ("end", "stopped")
    Noted.calls.clear()
    monkeypatch.setattr(Noted, "stops_after", None)
    train.run(parse(config), workdir=workdir)
    logged = [each[1] for each in first + Noted.calls if each[0] == "log"]
    assert logged == [1, 2]
    assert Noted.calls[1] == ("begin", "7", "a", 2)
    assert Noted.calls[-2:] == [("export", "1"), ("end", "finished")]
    assert list((workdir / "tensorboard").glob("*hparams"))
    config.log.trackers = None  # it is the same run, so it has ended
    assert finished(workdir, dataclasses.asdict(parse(config)))


def test_a_run_that_fails_is_told_so(config, tmp_path, monkeypatch):
    monkeypatch.setattr(Noted, "log", lambda self, record: None)
    config.train.learning_rate = 1e30
    with pytest.raises(RuntimeError):
        train.run(parse(config), workdir=tmp_path / "a")
    assert Noted.calls[-1] == ("end", "failed")


def test_a_missing_library_ends_the_run_before_it_begins(tmp_path):
    config = load(DIGITS)
    config.log.trackers = "mlflow,wandb"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("importlib.util.find_spec", lambda name: None)
        with pytest.raises(UserError, match=r"mlflow is not installed.*'tfaccel\[mlflow\]'"):
            train.run(parse(config), workdir=tmp_path / "a")
    assert not (tmp_path / "a").exists()
