"""A script's `fit` in a tracker, and the callbacks that MLflow and W&B bring themselves."""

import contextlib
import types

import keras
import numpy as np
import pytest
from conftest import compiled

from tfaccel.common.errors import UserError
from tfaccel.runtime.cluster import Cluster
from tfaccel.training.callbacks.ahead import can_be_ahead
from tfaccel.training.callbacks.keras_writers import of_this_worker
from tfaccel.training.trackers import Tracker, tracked

X = np.random.default_rng(0).normal(size=(12, 3)).astype(np.float32)


def make():
    return keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])


class Noted(Tracker):
    """Notes each call."""

    key = name = "mlflow"
    calls: list

    def __init__(self, *, project):
        self.calls.append(("project", project))

    def begin(self, before, *, name, config, folder):
        self.calls.append(("begin", before, name, config))
        return before or "7"

    def log(self, record):
        self.calls.append(("log", record))

    def export(self, path):
        self.calls.append(("export", path.name))

    def end(self, outcome):
        self.calls.append(("end", outcome))


@pytest.fixture
def run(setup, monkeypatch):
    """A run, with the calls of its tracker."""
    monkeypatch.setattr(Noted, "calls", [], raising=False)
    monkeypatch.setitem(tracked.KINDS, "mlflow", Noted)
    monkeypatch.setattr("tfaccel.run.check_installed", lambda names: None)
    return setup()


def fit(model, callbacks, **settings):
    return model.fit(X, X[:, :1], batch_size=2, verbose=0, callbacks=callbacks, **settings)


def test_each_epoch_is_sent_with_its_steps_and_the_rate(run, tmp_path):
    model = compiled(make, 1, optimizer=keras.optimizers.SGD(0.25), loss="mse", xla=False)
    with run.track("mlflow", tmp_path / "a", config={"b": 2, "token": "x"}, project="p") as track:
        history = fit(model, [track], epochs=2, validation_data=(X, X[:, :1])).history
        track.log_export(tmp_path)
    *before, end = Noted.calls
    assert before[:2] == [("project", "p"), ("begin", None, "a", {"b": 2, "token": "***"})]
    sent = [each[1] for each in before if each[0] == "log"]
    assert [(each["step"], each["epoch"]) for each in sent] == [(6, 1), (12, 2)]
    for name in ("loss", "val_loss"):
        assert [each[name] for each in sent] == history[name]
    assert {each["learning_rate"] for each in sent} == {0.25}
    assert (before[-1], end) == (("export", tmp_path.name), ("end", "finished"))


def test_a_later_fit_goes_on_only_if_it_resumes(run, tmp_path):
    model = compiled(make, 1, optimizer="sgd", loss="mse", xla=False)
    for settings in ({"epochs": 1}, {"initial_epoch": 1, "epochs": 2}, {"epochs": 1}):
        with run.track("mlflow", tmp_path) as track:
            fit(model, [track], **settings)
    assert [each[1] for each in Noted.calls if each[0] == "begin"] == [None, "7", None]


def test_an_error_is_told(run, tmp_path):
    def fail():
        with run.track("mlflow", tmp_path) as track:
            track.log_export(tmp_path)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert Noted.calls[-1] == ("end", "failed")


def test_the_end_must_be_told(run, tmp_path):
    model = compiled(make, 1, optimizer="sgd", loss="mse", xla=False)
    track = run.track("mlflow", tmp_path)
    with pytest.raises(UserError, match=r"within `with run.track\(...\) as tracking:`"):
        fit(model, [track])
    with pytest.raises(UserError, match="there is no tracker 'mlfow'"):
        run.track("mlfow", tmp_path)


def test_fit_need_not_wait_for_the_results_of_a_batch(run, tmp_path):
    model = compiled(make, 1, optimizer="sgd", loss="mse", xla=False)
    assert can_be_ahead(model, [run.track("mlflow", tmp_path)])


# Callbacks of the libraries themselves: names, modules and attributes as theirs.


def stands_for(name, module, **attributes):
    def on_train_batch_end(self, batch, logs=None):
        """Sees each batch."""

    members = {"__module__": module, "on_train_batch_end": on_train_batch_end, **attributes}
    return type(name, (keras.callbacks.Callback,), members)


MLFLOW, WANDB = "mlflow.keras.callback", "wandb.integration.keras.callbacks.metrics_logger"


@pytest.mark.parametrize(
    ("callback", "is_ahead"),
    [
        (stands_for("MlflowCallback", MLFLOW, log_every_n_steps=None), True),
        (stands_for("MlflowCallback", MLFLOW, log_every_n_steps=5), False),
        (stands_for("WandbMetricsLogger", WANDB, logging_batch_wise=False), True),
        (stands_for("WandbMetricsLogger", WANDB, logging_batch_wise=True), False),
        (stands_for("WandbModelCheckpoint", WANDB), False),
        (stands_for("MlflowCallback", "__main__", log_every_n_steps=None), False),
    ],
)
def test_a_librarys_callback_of_epochs_is_not_waited_for(callback, is_ahead):
    model = compiled(make, 1, optimizer="sgd", loss="mse", xla=False)
    assert can_be_ahead(model, [callback()]) == is_ahead
    chief, other = (Cluster(("a:1", "b:1"), index) for index in (0, 1))
    given = [callback()]
    assert of_this_worker(given, chief) == given
    is_theirs = callback.__module__ != "__main__"
    assert of_this_worker(given, other) == ([] if is_theirs else given)


def test_the_libraries_have_these_names(tmp_path, monkeypatch):
    mlflow = pytest.importorskip("mlflow", reason="needs the extra mlflow")
    wandb = pytest.importorskip("wandb", reason="needs the extra wandb")
    from wandb.integration.keras import WandbMetricsLogger

    noted = types.SimpleNamespace(feature=types.SimpleNamespace())
    monkeypatch.setattr(wandb, "run", types.SimpleNamespace())
    monkeypatch.setattr(wandb, "define_metric", lambda *_, **__: None)
    monkeypatch.setattr(
        "wandb.sdk.lib.telemetry.context", lambda **_: contextlib.nullcontext(noted)
    )
    model = compiled(make, 1, optimizer="sgd", loss="mse", xla=False)
    for epochs, batches in (
        (mlflow.keras.MlflowCallback(), mlflow.keras.MlflowCallback(False, 5)),
        (WandbMetricsLogger(), WandbMetricsLogger(5)),
    ):
        assert can_be_ahead(model, [epochs])
        assert not can_be_ahead(model, [batches])
