"""How far a process has come, in the file that its launcher reads."""

import logging
import os
import subprocess
import sys
import time

import keras
import numpy as np
import pytest

from tfaccel import progress
from tfaccel.progress import Progress


@pytest.fixture
def heartbeat(tmp_path, monkeypatch):
    """The file of this process."""
    path = tmp_path / "heartbeat"
    progress.write(path, Progress(since=time.monotonic()))
    monkeypatch.setattr(progress, "_own", progress._Reporter(str(path)))
    return path


def test_what_is_said_is_read(heartbeat):
    assert progress.read(heartbeat).phase == "start"
    progress.beat("train", step=57)
    with progress.within("save"):
        inside = progress.read(heartbeat)
    after = progress.read(heartbeat)
    assert (inside.beats, inside.phase, inside.step) == (1, "save", 57)
    assert (after.beats, after.phase, after.step) == (1, "train", 57)
    assert time.monotonic() - after.since < 1
    assert (after.lost, after.asked) == (None, False)
    progress.lost()
    assert progress.read(heartbeat).lost == -1
    progress.lost(3)
    progress.asked()
    assert (progress.read(heartbeat).lost, progress.read(heartbeat).asked) == (3, True)


def test_another_process_reads_the_same_clock_and_counts_on(heartbeat):
    progress.beat("start")
    environment = {**os.environ, progress.VARIABLE: str(heartbeat)}
    program = "from tfaccel import progress; progress.beat('train', step=4)"
    subprocess.run([sys.executable, "-c", program], env=environment, check=True)
    child = progress.read(heartbeat)
    assert (child.beats, child.phase, child.step) == (2, "train", 4)
    assert 0 <= time.monotonic() - child.since < 20


def test_without_a_launcher_nothing_is_said():
    progress.beat("train", step=1)
    with progress.within("save"):
        pass


def test_a_beat_costs_less_than_20_us(heartbeat):
    begun = time.perf_counter()
    for step in range(10000):
        progress.beat("train", step=step)
    us = (time.perf_counter() - begun) / 10000 * 1e6
    logging.getLogger("tfaccel").info("a beat takes %.1f us", us)
    assert us < 20


def test_fit_and_predict_beat_at_each_batch_and_what_compiles_belongs_to_the_start(
    heartbeat, setup, monkeypatch
):
    said = []
    change = progress._own.change
    monkeypatch.setattr(
        progress._own, "change", lambda **changes: (said.append(changes), change(**changes))
    )
    run = setup(xla=False)
    assert [each["phase"] for each in said] == ["start", "start"]
    with run.scope():
        model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    run.compile(model, "sgd", "mse")
    x = np.ones((12, 2), np.float32)
    said.clear()
    model.fit(x, x[:, :1], batch_size=4, epochs=2, validation_data=(x, x[:, :1]), verbose=0)
    assert [(each["phase"], each.get("step")) for each in said] == [
        ("start", None),
        ("start", 1),
        ("train", 2),
        ("train", 3),
        ("start", None),  # validation compiles too
        *[("evaluation", None)] * 2,
        ("train", None),
        ("train", 4),
        ("train", 5),
        ("train", 6),
        *[("evaluation", None)] * 3,
        ("train", None),
    ]
    said.clear()
    model.predict(x, batch_size=6, verbose=0)
    assert [each["phase"] for each in said] == ["start", "evaluation", "train"]
