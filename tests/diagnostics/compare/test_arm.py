"""A variant's process: what it is asked, what it answers, and how it ends."""

import os
import pathlib
import time

import psutil
import pytest

from tfaccel.config import Config
from tfaccel.diagnostics.compare import arm as room
from tfaccel.diagnostics.compare.arm import ArmError, ArmProcess, OutOfTimeError
from tfaccel.diagnostics.compare.pace import Settings
from tfaccel.diagnostics.compare.protocol import write

SETTINGS = Settings(steps=50, lead_in=5, warm_up=10, repeats=5)


# Children that stand for child.py. (This file imports nothing of TensorFlow, which takes seconds.)


def _answering(config, settings, folder):
    folder = pathlib.Path(folder)
    ready = {"first_step_s": 1.5, "losses": [3.0], "peak_mib": []}
    ready["pace"] = {"start_s": 1.5, "step_s": 0.1, "epoch_steps": 100, "execution_steps": 1}
    write(folder / "ready.json", ready)
    for number in range(2):
        while not (folder / f"go-{number}").exists():
            time.sleep(0.01)
        answer = {"images_per_second": 7.0, "waited": 0.25, "losses": [2.0, 1.0], "peak_mib": [9]}
        write(folder / f"result-{number}.json", answer)
    print("OOM when allocating tensor with shape[1] and type float")
    os._exit(3)


def _raising(config, settings, folder):
    raise ValueError("first line\nsecond line")


def started(monkeypatch, tmp_path, child, *, says=None, is_all=False):
    """Starts one, whose time is over as soon as it has printed what it `says`; None for never."""
    log = tmp_path / "1.log"

    def limit():
        while says and says not in log.read_text():
            time.sleep(0.01)
        return (0.0 if says else 60.0), is_all

    monkeypatch.setattr(room, "_in_child", child)
    return ArmProcess(Config(), SETTINGS, log=log, limit=limit)


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


def _slow(config, settings, folder):
    pace = {"start_s": 95.0, "step_s": 2.5, "epoch_steps": 100, "execution_steps": 1}
    write(pathlib.Path(folder) / "first.json", {"first_step_s": 95.0})
    write(pathlib.Path(folder) / "pace.json", pace)
    print("said")
    time.sleep(600)


def test_one_that_is_ended_says_how_far_it_had_come(monkeypatch, tmp_path):
    with pytest.raises(OutOfTimeError) as one:
        started(monkeypatch, tmp_path, _slow, says="said", is_all=True)
    assert str(one.value) == (
        "the time was over: its first step ended after 95 s, and each further step takes 2.5 s"
    )
    assert (one.value.start_s, one.value.pace.step_s) == (95.0, 2.5)


@pytest.mark.parametrize(("is_all", "kind"), [(True, OutOfTimeError), (False, ArmError)])
def test_a_silent_one_is_ended(monkeypatch, tmp_path, is_all, kind):
    def silent(config, settings, folder):
        print("process", os.getpid(), "sleeps for ten minutes")
        time.sleep(600)

    with pytest.raises(ArmError) as one:
        started(monkeypatch, tmp_path, silent, says="minutes", is_all=is_all)
    assert type(one.value) is kind
    assert not psutil.pid_exists(int((tmp_path / "1.log").read_text().split()[1]))
