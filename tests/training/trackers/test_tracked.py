"""What all trackers share: whose run it is, what is sent, and how it ends."""

import contextlib
import importlib.util
import json
import os
import signal
import threading
import time

import pytest
from fake_tracker import FakeTracker

from tfaccel.common.errors import RunError, UserError
from tfaccel.process import leave
from tfaccel.process.signals import StopSignals
from tfaccel.training.callbacks.checkpoints import Stopped
from tfaccel.training.trackers import check_installed, flat
from tfaccel.training.trackers.tracked import FILE, Tracked, outcome_of


@pytest.fixture(autouse=True)
def no_runs(monkeypatch):
    monkeypatch.setattr(FakeTracker, "runs", [], raising=False)


def record(step, loss=0.5):
    return {"step": step, "epoch": step // 10, "loss": loss, "eta_s": 3.0}


def train(folder, steps, *, continues, error=None, tracker=None):
    """Tracks epochs that end at these steps; returns the steps of each run so far."""
    tracker = tracker or FakeTracker()
    ends = pytest.raises(type(error)) if error else contextlib.nullcontext()
    with ends, Tracked([tracker], folder, name="a") as tracked:
        tracked.begin({"train": {"epochs": 3}}, continues=continues)
        for each in steps:
            tracked.epoch(record(each))
        if error:
            raise error
    return [[each["step"] for each in run["records"]] for run in FakeTracker.runs]


def test_a_resumed_run_goes_on_in_the_same_run_and_sends_no_step_twice(tmp_path):
    assert train(tmp_path, [10, 20], continues=False, error=Stopped(143)) == [[10, 20]]
    assert FakeTracker.runs[0]["outcome"] == "stopped"
    assert json.loads((tmp_path / FILE).read_text()) == {"mlflow": {"run": "0", "step": 20}}
    assert train(tmp_path, [20, 30], continues=True) == [[10, 20, 30]]
    assert FakeTracker.runs[0]["outcome"] == "finished"


def test_training_anew_is_a_new_run_unless_nothing_was_sent(tmp_path):
    assert train(tmp_path, [], continues=False, error=ValueError()) == [[]]
    assert train(tmp_path, [10], continues=False) == [[10]]
    assert train(tmp_path, [10], continues=False) == [[10], [10]]


@pytest.mark.parametrize("text", ["", "[]", '{"mlflow": 1}', "{"])
def test_a_damaged_file_of_ids_is_as_none(tmp_path, text):
    (tmp_path / FILE).write_text(text)
    assert train(tmp_path, [10], continues=True) == [[10]]


@pytest.mark.parametrize(
    ("error", "outcome"),
    [
        (None, "finished"),
        (SystemExit(), "finished"),
        (SystemExit(0), "finished"),
        (SystemExit(1), "failed"),
        (Stopped(0), "stopped"),
        (KeyboardInterrupt(), "stopped"),
        (UserError("wrong"), "failed"),
        (MemoryError(), "failed"),
    ],
)
def test_how_a_run_ended(error, outcome):
    assert outcome_of(error) == outcome


def test_what_is_not_taken_is_sent_again_in_order_after_one_warning(tmp_path, caplog):
    tracker = FakeTracker()
    tracker.faults = [ConnectionError("no route"), ValueError("a second fault")]
    with Tracked([tracker], tmp_path, name="a") as tracked:
        tracked.begin({}, continues=False)
        for each in (10, 20, 30):
            tracked.epoch(record(each))
            tracked._posts[0]._thread.submit(int).result()  # it has tried
    assert [each["step"] for each in FakeTracker.runs[0]["records"]] == [10, 20, 30]
    (said,) = [each.message for each in caplog.records if each.levelname == "WARNING"]
    assert "Fake did not take a record (ValueError: a second fault)" in said


def test_what_never_reaches_the_tracker_is_counted(tmp_path, caplog):
    tracker = FakeTracker()
    tracker.faults = [OSError()] * 9
    assert train(tmp_path, [10, 20], continues=False, tracker=tracker) == [[]]
    assert "2 records did not reach Fake; metrics.csv in the workdir has them" in caplog.text
    assert FakeTracker.runs[0]["outcome"] == "finished"


def test_training_does_not_wait_for_a_slow_tracker(tmp_path):
    may_go, tracker = threading.Event(), FakeTracker()

    def slow(sent, log=tracker.log):
        assert may_go.wait(timeout=300)
        log(sent)

    tracker.log = slow
    with Tracked([tracker], tmp_path, name="a") as tracked:
        tracked.begin({}, continues=False)
        tracked.epoch(record(10))  # or the test would never end
        assert FakeTracker.runs[0]["records"] == []
        may_go.set()
    assert [each["step"] for each in FakeTracker.runs[0]["records"]] == [10]


def test_a_tracker_that_cannot_begin_ends_the_run_with_the_cure(tmp_path):
    tracker = FakeTracker()
    tracker.begin = lambda *_, **__: 1 / 0
    words = r"Fake cannot begin a run \(ZeroDivisionError.*your login, or leave mlflow out"
    with pytest.raises(RunError, match=words), Tracked([tracker], tmp_path, name="a") as tracked:
        tracked.begin({}, continues=False)
    (tmp_path / FILE).write_text('{"mlflow": {"run": "7", "step": 10}}')
    words = r"Fake cannot go on with its run 7 .* remove .*trackers.json to begin a new one"
    with pytest.raises(RunError, match=words), Tracked([tracker], tmp_path, name="a") as tracked:
        tracked.begin({}, continues=True)


def test_a_signal_ends_the_wait_for_a_tracker(tmp_path):
    def begin(*_, **__):
        threading.Timer(0.05, os.kill, [os.getpid(), signal.SIGTERM]).start()
        time.sleep(300)

    tracker, ended = FakeTracker(), []
    tracker.begin, tracker.end = begin, ended.append
    stop = StopSignals(error=Stopped(143))
    with pytest.raises(Stopped), Tracked([tracker], tmp_path, name="a") as tracked, stop:
        tracked.begin({}, continues=False)
    assert ended == ["stopped"]


def test_a_failure_after_training_is_a_warning(tmp_path, caplog):
    tracker = FakeTracker()
    tracker.export = tracker.end = lambda _: 1 / 0
    with Tracked([tracker], tmp_path, name="a") as tracked:
        tracked.begin({}, continues=False)
        tracked.export(tmp_path)
    assert "giving the export to Fake failed (ZeroDivisionError" in caplog.text
    assert "ending the run of Fake failed (ZeroDivisionError" in caplog.text


def test_the_config_has_no_secrets(tmp_path):
    with Tracked([FakeTracker()], tmp_path, name="a") as tracked:
        tracked.begin({"data": {"root": "s3://me:pass@b", "api_key": "x"}}, continues=False)
    assert FakeTracker.runs[0]["config"] == {"data": {"root": "s3://***@b", "api_key": "***"}}


def test_a_worker_that_is_not_the_chief_writes_nothing(tmp_path):
    with Tracked([], tmp_path / "run", name="a") as tracked:
        tracked.begin({}, continues=False)
        tracked.epoch(record(10))
        tracked.export(tmp_path)
    assert not (tmp_path / "run").exists()


class Left(BaseException):
    """In place of the end of this process."""


@pytest.mark.parametrize(("code", "outcome"), [(1, "failed"), (143, "stopped")])
def test_a_process_that_ends_at_once_tells_it_first(tmp_path, monkeypatch, code, outcome):
    def leave_this(code):
        raise Left

    def track():
        with Tracked([FakeTracker()], tmp_path, name="a") as tracked:
            tracked.begin({}, continues=False)
            leave.now(code)

    told = []
    monkeypatch.setattr(FakeTracker, "end", lambda self, outcome: told.append(outcome))
    monkeypatch.setattr("os._exit", leave_this)
    monkeypatch.setattr("logging.shutdown", lambda: None)
    with pytest.raises(Left):
        track()
    assert told[0] == outcome
    with pytest.raises(Left):
        leave.now(code)  # after the run, there is nobody left to tell
    assert len(told) == 2


def test_settings_have_the_names_of_the_command_line():
    nested = {"train": {"epochs": 3, "loss": "auto"}, "seed": 1}
    assert flat(nested) == {"train.epochs": 3, "train.loss": "auto", "seed": 1}


def test_a_missing_library_is_a_sentence_with_the_extra(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name == "mlflow" or None)
    check_installed(("mlflow",))
    with pytest.raises(
        UserError, match=r"wandb is not installed, .*--extra wandb.*tfaccel\[wandb\]"
    ):
        check_installed(("mlflow", "wandb"))
