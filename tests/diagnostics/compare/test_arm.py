"""A variant's process: what it is asked, what it answers, and how it ends."""

import json
import os
import pathlib
import time

import psutil
import pytest

from tfaccel.config import Config
from tfaccel.diagnostics.compare import arm as room
from tfaccel.diagnostics.compare.arm import ArmError, ArmProcess, OutOfTimeError, write
from tfaccel.diagnostics.compare.pace import Settings

SETTINGS = Settings(steps=50, lead_in=5, warm_up=10, repeats=5)


# Children that stand for child.py. (This file imports nothing of TensorFlow, which takes seconds.)


def _answering(config, settings, folder, log):
    folder = pathlib.Path(folder)
    write(folder / "pid", str(os.getpid()))
    ready = {"first_step_s": 1.5, "losses": [3.0], "peak_mib": []}
    ready["pace"] = {"start_s": 1.5, "step_s": 0.1, "epoch_steps": 100, "execution_steps": 1}
    write(folder / "ready.json", json.dumps(ready))
    for number in range(2):
        while not (folder / f"go-{number}").exists():
            time.sleep(0.01)
        answer = {"images_per_second": 7.0, "waited": 0.25, "losses": [2.0, 1.0], "peak_mib": [9]}
        write(folder / f"result-{number}.json", json.dumps(answer))
    pathlib.Path(log).write_text("OOM when allocating tensor with shape[1] and type float")
    os._exit(3)


def _raising(config, settings, folder, log):
    raise ValueError("first line\nsecond line")


def _silent(config, settings, folder, log):
    write(pathlib.Path(folder) / "pid", str(os.getpid()))
    time.sleep(600)


def started(monkeypatch, tmp_path, child, *, seconds=60.0, is_all=False):
    monkeypatch.setattr(room, "_in_child", child)
    limit = lambda: (seconds, is_all)  # noqa: E731
    return ArmProcess(Config(), SETTINGS, log=tmp_path / "1.log", limit=limit)


def test_it_answers_until_it_dies_of_full_memory(monkeypatch, tmp_path):
    arm = started(monkeypatch, tmp_path, _answering)
    assert (arm.first_step_s, arm.losses, arm.peak_mib) == (1.5, [3.0], ())
    assert [arm.stretch(), arm.stretch()] == [7.0, 7.0]
    assert (arm.losses, arm.peak_mib, arm.waited) == ([3.0, 2.0, 1.0, 2.0, 1.0], (9,), 0.25)
    with pytest.raises(ArmError, match="out of memory: its process ended with exit code 3") as one:
        arm.stretch()
    assert one.value.out_of_memory
    arm.close()


def test_what_it_raises_is_one_sentence(monkeypatch, tmp_path):
    with pytest.raises(ArmError, match=r"^ValueError: first line$") as one:
        started(monkeypatch, tmp_path, _raising)
    assert not one.value.out_of_memory


def _slow(config, settings, folder, log):
    pace = {"start_s": 95.0, "step_s": 2.5, "epoch_steps": 100, "execution_steps": 1}
    write(pathlib.Path(folder) / "pace.json", json.dumps(pace))
    pathlib.Path(log).with_name("said").touch()
    _silent(config, settings, folder, log)


def test_one_that_is_ended_says_how_far_it_had_come(monkeypatch, tmp_path):
    def none_once_it_has_said_it():
        while not (tmp_path / "said").exists():
            time.sleep(0.01)
        return 0.0, True

    monkeypatch.setattr(room, "_in_child", _slow)
    log, limit = tmp_path / "1.log", none_once_it_has_said_it
    with pytest.raises(OutOfTimeError) as one:
        ArmProcess(Config(), SETTINGS, log=log, limit=limit)
    assert str(one.value) == (
        "the time was over: its first step ended after 95 s, and one more takes 2.5 s"
    )
    assert (one.value.start_s, one.value.pace.step_s) == (95.0, 2.5)


@pytest.mark.parametrize(("is_all", "kind"), [(True, OutOfTimeError), (False, ArmError)])
def test_a_silent_one_is_ended(monkeypatch, tmp_path, is_all, kind):
    """Its process would sleep for ten minutes."""
    begun = tmp_path / "begun"

    def silent(config, settings, folder, log):
        begun.write_text(str(os.getpid()))
        _silent(config, settings, folder, log)

    with pytest.raises(ArmError) as one:
        started(monkeypatch, tmp_path, silent, seconds=0.3, is_all=is_all)
    assert type(one.value) is kind
    assert not psutil.pid_exists(int(begun.read_text()))
