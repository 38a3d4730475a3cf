"""MLflow's own server code keeps what is sent: a file of SQLite in place of a server."""

import json
import os
import signal
import socket
import subprocess
import sys

import pytest

from tfaccel.common.errors import RunError
from tfaccel.training.callbacks.checkpoints import Stopped
from tfaccel.training.trackers.mlflow import FIRST_CALL, MLflow
from tfaccel.training.trackers.tracked import Tracked

mlflow = pytest.importorskip("mlflow", reason="needs the extra mlflow")


@pytest.fixture(scope="module", autouse=True)
def server(tmp_path_factory):
    """A tracking store, which takes seconds to make: its tests have an experiment each."""
    folder = tmp_path_factory.mktemp("mlflow")
    mlflow.set_tracking_uri(f"sqlite:///{folder}/mlflow.db")
    client = mlflow.MlflowClient()
    for name in ("stopped", "failed", "theirs", "killed"):
        client.create_experiment(name, artifact_location=str(folder / name))
    yield client
    mlflow.set_tracking_uri(None)


def tracked_in(folder, experiment):
    return Tracked([MLflow(project=experiment)], folder, name="a")


def record(step, loss):
    return {"step": step, "epoch": step // 10, "loss": loss, "loss_scale": 2.0, "eta_s": 3.0}


def track_an_epoch(folder, experiment, config, *, error):
    with tracked_in(folder, experiment) as tracked:
        tracked.begin(config, continues=False)
        tracked.epoch(record(10, 0.5))
        raise error


def run_of(client, experiment):
    (run,) = client.search_runs(client.get_experiment_by_name(experiment).experiment_id)
    return run


def test_a_run_is_stopped_and_goes_on(tmp_path, server):
    export = tmp_path / "export" / "1"
    export.mkdir(parents=True)
    (export / "model.keras").write_bytes(b"weights")
    config = {"train": {f"field{index}": index for index in range(120)}, "seed": 1}
    with pytest.raises(Stopped):
        track_an_epoch(tmp_path, "stopped", config, error=Stopped(143))
    run = run_of(server, "stopped")
    assert (run.info.status, run.info.run_name) == ("KILLED", "a")
    assert run.data.params == {f"train.field{index}": str(index) for index in range(120)} | {
        "seed": "1"
    }
    assert run.data.tags["tfaccel.workdir"] == str(tmp_path)
    with tracked_in(tmp_path, "stopped") as tracked:
        tracked.begin(config | {"seed": 2}, continues=True)
        run = run_of(server, "stopped")
        assert run.info.status == "RUNNING"
        for step in (10, 20):
            tracked.epoch(record(step, 0.25))
        tracked.export(export)
    run = run_of(server, "stopped")
    assert run.info.status == "FINISHED"
    assert run.data.params["seed"] == "1"
    assert run.data.tags["changed.seed"] == "2"
    assert run.data.metrics.keys() == {"epoch", "loss", "loss_scale"}
    history = server.get_metric_history(run.info.run_id, "loss")
    assert [(each.step, each.value) for each in history] == [(10, 0.5), (20, 0.25)]
    (file,) = server.list_artifacts(run.info.run_id, "export/1")
    assert (file.path, file.file_size) == ("export/1/model.keras", 7)


def test_a_failed_run_is_marked_so_and_a_lost_one_is_named(tmp_path, server):
    with pytest.raises(ZeroDivisionError):
        track_an_epoch(tmp_path, "failed", {}, error=ZeroDivisionError())
    run = run_of(server, "failed")
    assert run.info.status == "FAILED"
    server.delete_run(run.info.run_id)
    words = rf"MLflow cannot go on with its run {run.info.run_id} \(.*remove .*trackers.json"
    with pytest.raises(RunError, match=words), tracked_in(tmp_path, "failed") as tracked:
        tracked.begin({}, continues=True)


def test_the_experiment_is_made_once_for_all(server, monkeypatch):
    MLflow(project="prepared").prepare()
    MLflow(project="prepared").prepare()
    monkeypatch.setenv("MLFLOW_EXPERIMENT_NAME", "of the environment")
    MLflow(project=None).prepare()
    monkeypatch.delenv("MLFLOW_EXPERIMENT_NAME")
    MLflow(project=None).prepare()
    names = {each.name for each in server.search_experiments()}
    assert {"prepared", "of the environment"} <= names


@pytest.fixture
def at(server):
    """Sets another address for a test."""
    before = mlflow.get_tracking_uri()
    yield mlflow.set_tracking_uri
    mlflow.set_tracking_uri(before)


@pytest.mark.parametrize("call", ["begin", "prepare"])
def test_a_server_that_cannot_be_reached_ends_the_run_soon(tmp_path, at, monkeypatch, call):
    monkeypatch.setitem(FIRST_CALL, "MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", "1")  # the user's own, which stays
    calls = {
        "begin": lambda: tracked_in(tmp_path, "away").begin({}, continues=False),
        "prepare": MLflow(project="away").prepare,
    }
    with socket.create_server(("127.0.0.1", 0)) as silent:
        at(f"http://me:secret@127.0.0.1:{silent.getsockname()[1]}")
        before = dict(os.environ)
        with pytest.raises(RunError, match=r"cannot be reached .*timed out") as raised:
            calls[call]()
    assert "secret" not in str(raised.value)
    assert "your login" not in str(raised.value)
    assert dict(os.environ) == before


def test_the_whole_sentence_of_mlflow_is_shown(tmp_path, at):
    at(f"file:{tmp_path}/runs")
    words = r"MLFLOW_ALLOW_FILE_STORE=true.* is MLFLOW_TRACKING_URI"
    with pytest.raises(RunError, match=words) as raised:
        tracked_in(tmp_path, "local").begin({}, continues=False)
    assert "login" not in str(raised.value)


def test_a_run_that_the_script_began_stays_open(tmp_path, server):
    with mlflow.start_run() as theirs:
        with tracked_in(tmp_path, "theirs") as tracked:
            tracked.begin({"seed": 1}, continues=False)
            tracked.epoch(record(10, 0.5))
        assert mlflow.active_run().info.run_id == theirs.info.run_id
    run = server.get_run(theirs.info.run_id)
    assert run.info.status == "FINISHED"
    assert (run.data.params, run.data.metrics["loss"]) == ({"seed": "1"}, 0.5)


def test_the_next_run_marks_one_that_was_killed(tmp_path, server):
    uri = mlflow.get_tracking_uri()
    program = f"""
import mlflow, os, pathlib, signal
from tfaccel.training.trackers.mlflow import FIRST_CALL, MLflow
mlflow.set_tracking_uri({uri!r})
folder = pathlib.Path({str(tmp_path)!r})
print(MLflow(project="killed").begin(None, name="a", config={{}}, folder=folder), flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    killed = done.stdout.split()[-1]
    assert done.returncode == -signal.SIGKILL, done.stderr
    elsewhere = server.create_run(server.get_run(killed).info.experiment_id)
    server.set_tag(elsewhere.info.run_id, "tfaccel.process", "other-machine 7 1 100.00")
    theirs = server.create_run(server.get_run(killed).info.experiment_id)  # not by tfaccel
    beside = MLflow(project=None)  # this process's own, which goes on
    assert server.get_run(killed).info.status == "RUNNING"
    with tracked_in(tmp_path / "b", "killed") as tracked:
        tracked.begin({}, continues=False)
        ours = server.get_run(
            json.loads((tmp_path / "b/trackers.json").read_text())["mlflow"]["run"]
        )
        beside._client, beside._id = server, "another"
        beside._end_what_was_killed(ours.info.experiment_id)
        status = {
            each: server.get_run(each.info.run_id).info.status for each in (elsewhere, theirs)
        }
        assert {*status.values()} == {"RUNNING"}
        assert server.get_run(ours.info.run_id).info.status == "RUNNING"
        assert server.get_run(killed).info.status == "FAILED"
