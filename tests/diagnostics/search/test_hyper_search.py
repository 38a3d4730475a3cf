"""Whole searches, in which a program that writes a log stands for each training."""

import json
import os
import pathlib
import signal
import subprocess
import sys
import time

import pytest

from tfaccel.cli.flags import load
from tfaccel.common.errors import RunError, UserError
from tfaccel.config import default_config, parse

optuna = pytest.importorskip("optuna", reason="needs the extra optuna")

from tfaccel.diagnostics.search import run, space, trial  # noqa: E402

FAKE = (sys.executable, str(pathlib.Path(__file__).with_name("fake_train.py")))
EXPORTING = """
import pathlib, sys
folder = pathlib.Path(sys.argv[1].partition("=")[2])
if (folder / "refuses").exists():
    sys.exit("tfaccel: error: the disk is full")
(folder / "export" / "1").mkdir(parents=True)
"""
SPACE = """
import optuna

sampler = optuna.samplers.GridSampler({"rate": [0.25, 0.5, 0.75, 1.0]}, seed=0)
pruner = optuna.pruners.NopPruner()

def suggest(trial, config):
    config.train.learning_rate = trial.suggest_float("rate", 0.25, 1.0)
"""


@pytest.fixture(autouse=True)
def fake(monkeypatch):
    monkeypatch.setattr(trial, "TRAIN", FAKE)
    monkeypatch.setattr(trial, "POLL_S", 0.05)
    monkeypatch.setattr(trial, "EXPORT", (sys.executable, "-c", EXPORTING))


def searched(folder, *, text=SPACE, trials=4, visible="-1", jobs=None, **fields):
    """Searches in a folder; returns the result and the starts of each trial's process."""
    folder.mkdir(exist_ok=True)
    (folder / "space.py").write_text(text)
    base = default_config()
    base.train.epochs = 2
    base.train.monitor = "val_loss"
    for name, each in fields.items():
        base["log" if name in base.log else "runtime"][name] = each
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CUDA_VISIBLE_DEVICES", visible)
        how = {"workdir": folder, "trials": trials, "jobs": jobs}
        result = run.search(base, space.read(folder / "space.py"), **how)
    return result, starts_in(folder)


def starts_in(folder):
    return {
        each.parent.name: [json.loads(line) for line in each.read_text().splitlines()]
        for each in sorted(folder.glob("trials/*/starts.jsonl"))
    }


def test_the_best_trial_is_a_config_file(tmp_path):
    result, starts = searched(tmp_path / "a")
    assert result["value"] == 0.25 + 1 / 2  # the last epoch's
    assert result["parameters"] == {"rate": 0.25}
    assert result["trials"] == {"complete": 4, "pruned": 0, "fail": 0, "running": 0}
    assert parse(load(result["config"])).train.learning_rate == 0.25
    assert pathlib.Path(result["workdir"]).name in starts
    assert [len(each) for each in starts.values()] == [1, 1, 1, 1]
    again, starts = searched(tmp_path / "a")  # there is nothing left to do
    assert again == result
    assert [len(each) for each in starts.values()] == [1, 1, 1, 1]


def test_the_best_trial_alone_is_exported(tmp_path, caplog):
    result, starts = searched(tmp_path)
    (exported,) = tmp_path.glob("trials/*/export/1")
    assert result["export"] == str(exported)
    assert exported.parents[1] == pathlib.Path(result["workdir"])
    arguments = {each for start in starts.values() for each in start[0]["arguments"]}
    assert "--config.train.export=False" in arguments
    assert "export" not in (tmp_path / "best.py").read_text()
    again, _ = searched(tmp_path)  # which has nothing left to do
    assert again == result
    exported.rmdir()
    (exported.parents[1] / "refuses").touch()
    refused, _ = searched(tmp_path)
    assert refused == result | {"export": None}
    assert "the best trial cannot be exported: it ended with exit code 1: the disk is full" in (
        caplog.text
    )


def test_each_gpu_has_its_own_trials_at_the_same_time(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "go").touch()
    _, starts = searched(tmp_path / "a", visible="5,7")
    gpus = [each["gpu"] for (each,) in starts.values()]
    assert set(gpus[:2]) == {"5", "7"}
    assert len(gpus) == 4
    with pytest.raises(UserError, match=r"--jobs=3, but 2 GPUs can be seen.*--jobs=2 or less"):
        searched(tmp_path / "b", visible="5,7", jobs=3)


def test_the_pruner_ends_a_trial(tmp_path):
    text = SPACE.replace("NopPruner()", "ThresholdPruner(upper=1.3)")  # after the first epoch
    text += "    config.runtime.seed = 2 if config.train.learning_rate > 0.3 else 0\n"
    result, _ = searched(tmp_path / "a", text=text)  # those of the seed 2 never end by themselves
    assert result["trials"] == {"complete": 1, "pruned": 3, "fail": 0, "running": 0}
    assert result["parameters"] == {"rate": 0.25}


def test_failed_trials_are_left_out_unless_all_fail(tmp_path, caplog):
    text = SPACE + "    config.runtime.seed = int(config.train.learning_rate > 0.6)\n"
    result, _ = searched(tmp_path / "a", text=text)
    assert result["trials"]["fail"] == 2
    assert "failed: it ended with exit code 1: the loss is not finite (" in caplog.text
    text = SPACE + "    config.runtime.seed = 1\n"
    with pytest.raises(RunError, match=r"the first 3 trials failed.*the loss is not finite"):
        searched(tmp_path / "b", text=text)
    text = SPACE + "    config.train.epochs = 0\n"
    with pytest.raises(RunError, match=r"the first 3 trials failed.*epochs=0; expected"):
        searched(tmp_path / "c", text=text)


def test_a_mistake_in_the_function_begins_no_trial(tmp_path):
    with pytest.raises(UserError, match=r"space.py, line 9: NameError"):
        searched(tmp_path / "a", text=SPACE + "    nothing_such\n")
    assert not list(tmp_path.glob("a/trials/*/*"))


def test_mlflow_is_prepared_before_several_trials_begin_at_once(tmp_path, monkeypatch):
    prepared = []

    class Prepared:
        def __init__(self, *, project):
            prepared.append(project)

        def prepare(self):
            assert not list(tmp_path.glob("a/trials/*/starts.jsonl"))
            prepared.append("experiment")

    monkeypatch.setattr(run, "MLflow", Prepared)
    text = SPACE + "    config.log.trackers, config.log.project = None, None\n"
    searched(tmp_path / "a", text=text, trials=1, trackers="mlflow", project="flowers")
    assert prepared == ["flowers", "experiment"]


PROGRAM = """
import pathlib, sys
sys.path.insert(0, {here!r})
import test_hyper_search as tests
tests.trial.TRAIN, tests.trial.POLL_S = tests.FAKE, 0.05
tests.searched(pathlib.Path({folder!r}), visible="5,7", seed=2)
"""


def wait_until(is_so):
    ends = time.monotonic() + 300
    while not is_so():
        assert time.monotonic() < ends
        time.sleep(0.02)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_a_killed_search_continues_its_trials(tmp_path, number):
    folder = tmp_path / "a"
    program = PROGRAM.format(here=str(pathlib.Path(__file__).parent), folder=str(folder))
    process = subprocess.Popen([sys.executable, "-c", program], stderr=subprocess.DEVNULL)
    try:
        wait_until(lambda: len(list(folder.glob("trials/*/metrics.jsonl"))) == 2)
        process.send_signal(number)
        process.wait(timeout=300)
    finally:
        process.kill()
        process.wait()
    pids = [each["pid"] for (each,) in starts_in(folder).values()]
    wait_until(lambda: not any(os.path.exists(f"/proc/{each}") for each in pids))
    (folder / "go").touch()
    result, starts = searched(folder, visible="5,7", seed=2)
    assert result["trials"] == {"complete": 4, "pruned": 0, "fail": 0, "running": 0}
    assert [len(each) for each in starts.values()] == [2, 2, 1, 1]
    assert [each[-1]["epochs_before"] for each in starts.values()] == [1, 1, 0, 0]
    assert result["parameters"] == {"rate": 0.25}
