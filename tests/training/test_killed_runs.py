"""`tfaccel train` killed with SIGKILL, and started again by the same command."""

import json
import os
import random
import re
import signal
import subprocess
import sys
import time

import numpy as np
import PIL.Image
import pytest

from tfaccel.cli import main
from tfaccel.training.checkpoint.folder import parse
from tfaccel.training.checkpoint.store import Store

EVERY = [
    "--config=configs/digits.py",
    "--config.runtime.gpu_ids=",
    "--config.runtime.deterministic=True",
    "--config.runtime.xla=False",
    "--config.data.loader=tf_data",
    "--config.train.epochs=3",
    "--config.train.decay=cosine",
    "--config.train.warmup_epochs=1",
    "--config.train.early_stopping_epochs=2",
    "--config.checkpoint.every_steps=4",
]
LAST = 3 * 23  # 1,437 images in batches of 64


def start(workdir, *more, every=EVERY):
    command = [sys.executable, "-m", "tfaccel", "train", *every, f"--workdir={workdir}", *more]
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )


def finish(workdir, *more, every=EVERY):
    run = start(workdir, *more, every=every)
    out, err = run.communicate(timeout=300)
    assert run.returncode == 0, err
    return json.loads(out.splitlines()[-1]), err


def newest(workdir):
    return Store(workdir / "checkpoints", keep_last=1, keep_best=0, largest_is_best=True).newest()


def last_step(workdir):
    named = (parse(each) for each in workdir.glob("checkpoints/step-*"))
    return max((each.step for each in named if each and not each.unfinished), default=0)


def wait_until(condition, run):
    ends = time.monotonic() + 300
    while not condition():
        assert run.poll() is None, run.communicate()
        assert time.monotonic() < ends
        time.sleep(0.005)


def in_tables(workdir):
    """The steps that metrics.jsonl has, in order."""
    lines = (workdir / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line)["step"] for line in lines]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    workdir = tmp_path_factory.mktemp("whole") / "run"
    result, _ = finish(workdir)
    return newest(workdir), result


@pytest.mark.slow  # test_killed.py and test_resume.py see both halves
@pytest.mark.parametrize("kills", [1, 10])
def test_p1_p2_any_kill_leaves_a_run_that_ends_as_if_there_was_none(whole, kills, tmp_path):
    draw = random.Random(kills)
    workdir = tmp_path / "run"
    for number in range(kills):
        run = start(workdir)
        before = last_step(workdir)
        target = min(LAST - 5, before + draw.randrange(1, 12)) if number else 27
        wait_until(lambda: last_step(workdir) >= target, run)  # noqa: B023
        time.sleep(draw.random() * 0.1)
        os.killpg(run.pid, signal.SIGKILL)
        run.communicate()
        assert newest(workdir).step >= target
    for each in (workdir / "checkpoints").glob("step-*"):
        os.utime(each, (0, 2**31))  # a clock may jump
    result, err = finish(workdir)
    assert "resumed from step" in err
    reference, expected = whole
    found = newest(workdir)
    assert found.arrays.keys() == reference.arrays.keys()
    for name, array in reference.arrays.items():
        np.testing.assert_array_equal(found.arrays[name], array, err_msg=name)
    assert result["metrics"] == expected["metrics"]
    steps = in_tables(workdir)
    assert steps == sorted(steps)
    rows = (workdir / "metrics.csv").read_text().splitlines()
    assert len(rows) == 1 + 3  # a header, and each epoch once

    # The command once more has nothing to do, and says what came of it.
    again, err = finish(workdir)
    assert again == result
    assert "nothing to do" in err


@pytest.mark.slow  # tests/step/test_at_once.py sees the change itself
@pytest.mark.parametrize("at", ["has begun without XLA", "now it is used"])
def test_a_run_that_is_killed_while_xla_compiles_its_step_goes_on(whole, at, tmp_path):
    runtime = ("deterministic=False", "xla=True", "begin_without_xla=True")
    changed = [f"--config.runtime.{each}" for each in runtime]
    every = [*EVERY, *changed, "--config.checkpoint.every_steps=2", "--config.train.epochs=8"]
    workdir = tmp_path / "run"
    run = start(workdir, every=every)
    wait_until(lambda: last_step(workdir) >= 2 and at in (workdir / "log.txt").read_text(), run)
    os.killpg(run.pid, signal.SIGKILL)
    run.communicate()
    result, err = finish(workdir, every=every)
    assert "resumed from step" in err
    steps = in_tables(workdir)
    assert steps == sorted(steps)
    assert steps[-1] == 8 * 23
    assert result["metrics"]["val_accuracy"] > 0.9


HOLDS = """
import pathlib, sys
from tfaccel.training.workdir import held
with held(pathlib.Path(sys.argv[1])):
    print("held", flush=True)
    sys.stdin.read()
"""


def test_a_live_run_holds_its_workdir(tmp_path, setup, monkeypatch, capsys):
    command = [sys.executable, "-c", HOLDS, str(tmp_path)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(command, **pipes) as other:
        assert other.stdout.readline() == b"held\n"
        # In this process, which has TensorFlow; `setup` puts back what the command sets.
        flags = [*EVERY, "--config.runtime.deterministic=False", f"--workdir={tmp_path}"]
        monkeypatch.setattr(sys, "argv", ["tfaccel", "train", *flags])
        with pytest.raises(SystemExit) as ended:
            main.cli()
    assert ended.value.code == 1
    assert f"is used by a live run (process {other.pid} on " in capsys.readouterr().err


@pytest.mark.slow  # that a signal saves and stops, tests/training/test_resume.py sees too
def test_a_live_run_holds_its_workdir_and_a_signal_stops_it(tmp_path):
    long = ["--config.train.epochs=1000", "--config.train.early_stopping_epochs=None"]
    run = start(tmp_path, *long)
    wait_until(lambda: last_step(tmp_path) >= 4, run)
    second = start(tmp_path, *long)
    _, err = second.communicate(timeout=300)
    assert second.returncode == 1
    assert f"is used by a live run (process {run.pid} on " in err
    run.terminate()
    _, err = run.communicate(timeout=300)
    assert run.returncode == 143
    stopped = int(re.search(r"stopped by SIGTERM after step (\d+), which is saved", err)[1])
    assert last_step(tmp_path) == stopped


ON_THE_GPU = [
    "--config=configs/cifar10.py",
    "--config.data.loader=dali_gpu",
    "--config.data.global_batch_size=32",
    "--config.train.steps_per_execution=1",
    "--config.train.learning_rate=0.02",
    "--config.train.epochs=4",
    "--config.checkpoint.every_epochs=1",
    "--config.checkpoint.every_steps=3",
]


def losses(workdir):
    """Of training and of test, a row for each epoch."""
    header, *rows = [line.split(",") for line in (workdir / "metrics.csv").read_text().splitlines()]
    return [[float(row[header.index(name)]) for name in ("loss", "val_loss")] for row in rows]


@pytest.mark.gpu
def test_p2_a_float16_run_with_dali_on_the_gpu_goes_on_as_if_it_had_not_been_killed(tmp_path):
    # No bits are promised on a GPU: XLA times its kernels in each process, and may choose others.
    random = np.random.default_rng(0)
    for index in range(400):
        path = tmp_path / "data" / ("test" if index < 80 else "train") / "abcd"[index % 4]
        path.mkdir(parents=True, exist_ok=True)
        pixels = random.integers(0, 128, (32, 32, 3)) + 32 * np.eye(3)[index % 3] * (index % 4)
        PIL.Image.fromarray(pixels.astype(np.uint8)).save(path / f"{index}.jpg")
    every = [*ON_THE_GPU, f"--config.data.root={tmp_path / 'data'}"]
    result, _ = finish(tmp_path / "whole", every=every)
    log = (tmp_path / "whole" / "log.txt").read_text()
    assert "loader: dali_gpu" in log
    assert "loss scale: dynamic" in log
    run = start(tmp_path / "killed", every=every)
    wait_until(lambda: last_step(tmp_path / "killed") >= 13, run)  # of 10 in each epoch
    os.killpg(run.pid, signal.SIGKILL)
    run.communicate()
    resumed, err = finish(tmp_path / "killed", every=every)
    assert "resumed from step" in err
    assert resumed["steps"] == result["steps"] == 40
    np.testing.assert_allclose(
        losses(tmp_path / "killed"), losses(tmp_path / "whole"), rtol=0.02, err_msg=err
    )
