"""`tfaccel launch` of ranks that really train: one fails or hangs, and what becomes of the job."""

import json
import os
import re
import subprocess
import sys
import time

import numpy as np
import psutil
import pytest
from conftest import in_new_process

# `fault` happens to the rank `at_fault` once, in the middle of the third epoch of five.
PROGRAM = """
import json, os, pathlib, signal, sys, time
import keras
import tfaccel
from tfaccel.training.checkpoint import folder as folder_lib
from tfaccel.config import CheckpointConfig
fault, at_fault, root, images = sys.argv[1:5]
root = pathlib.Path(root)
rank = json.loads(os.environ.get("TF_CONFIG", '{"task": {"index": 0}}'))["task"]["index"]
marker = root / "happened"
is_mine = rank == int(at_fault) and not marker.exists()
if fault == "never starts" and is_mine:
    marker.touch()
    time.sleep(1000)
run = tfaccel.setup(gpu_ids=(), xla=False, deterministic=True, peer_timeout_s=4)
loader = run.image_folder(images, image_size=(12, 10), channels=1, global_batch_size=12,
                          loader="tf_data", shuffle=True)

def happen():
    marker.write_text(str(time.time()))
    if fault == "SIGKILL":
        os.kill(os.getpid(), signal.SIGKILL)
    if fault == "SIGSTOP":
        os.kill(os.getpid(), signal.SIGSTOP)
    if fault == "raises":
        raise ValueError("row 7 is broken")
    if fault == "exits":
        sys.exit(3)
    if fault == "ends early":
        os._exit(0)
    if fault == "sleeps":
        time.sleep(1000)

class Fault(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        if is_mine and loader.position == 10 and fault != "saves slowly":
            happen()

fill = folder_lib.fill

def fill_slowly(*args):
    time.sleep(4)
    fill(*args)

if fault == "saves slowly":
    folder_lib.fill = fill_slowly
with run.scope():
    model = keras.Sequential([keras.Input((12, 10, 1)), keras.layers.Flatten()])
    model.add(keras.layers.Dense(8, activation="relu"))
    model.add(keras.layers.Dense(3))
run.compile(model, keras.optimizers.SGD(0.05, momentum=0.9),
            keras.losses.SparseCategoricalCrossentropy(from_logits=True))
checkpoints = run.checkpoints(root / f"checkpoints-{at_fault}", CheckpointConfig(every_steps=3),
                              monitor="loss")
model.fit(loader, epochs=5, callbacks=[Fault(), checkpoints], verbose=0)
print(json.dumps([each.tolist() for each in model.get_weights()]))
"""


@pytest.fixture
def weights_alone(folder, tmp_path):
    """What one process on the CPU comes to, without a fault: not this one, which may have GPUs."""
    arguments = ["", "none", "9", str(tmp_path), str(folder)]
    out = in_new_process(f"import sys\nsys.argv = {arguments}\n{PROGRAM}")
    return json.loads(out.splitlines()[-1])


def launched(tmp_path, folder, fault, at_fault, *flags):
    """Runs the job; returns its exit code, what it printed, and the seconds after the fault."""
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    command = [sys.executable, "-m", "tfaccel", "launch", "--nproc-per-node=2", "--grace=3"]
    arguments = [str(program), fault, str(at_fault), str(tmp_path), str(folder)]
    logs = f"--log-dir={tmp_path / 'logs'}"
    done = subprocess.run(
        [*command, logs, *flags, *arguments],
        capture_output=True,
        text=True,
        timeout=200,
        env={**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3"},
    )
    marker = tmp_path / "happened"
    took_s = time.time() - marker.stat().st_mtime if marker.exists() else None
    for each in psutil.process_iter(["cmdline"]):
        assert str(program) not in (each.info["cmdline"] or ()), "an orphan is left"
    return done.returncode, done.stdout, done.stderr, took_s


def check_weights(out, expected, *, tolerance=1e-6):
    printed = re.findall(r"^\[rank (\d)\] (\[.*)", out, re.M)
    assert sorted(rank for rank, _ in printed) == ["0", "1"]
    for _, weights in printed:
        for received, wanted in zip(json.loads(weights), expected, strict=True):
            # Float32, of which the sums over two workers are in another order.
            np.testing.assert_allclose(received, wanted, rtol=0, atol=tolerance)


@pytest.mark.slow  # restarts: test_node.py; what goes on: tests/training/test_resume_workers.py
@pytest.mark.parametrize("rank", [0, 1])
def test_p6_a_killed_rank_ends_the_job_which_goes_on_from_its_checkpoint(
    tmp_path, folder, weights_alone, rank
):
    code, out, err, _ = launched(tmp_path, folder, "SIGKILL", rank, "--max-restarts=1")
    assert code == 0, err
    assert f"rank {rank} was ended by SIGKILL, exit code 137" in err
    assert "restart 1 of 1 from the last checkpoint in 1 s" in err
    assert re.search(r"resumed from step [3-9]\b", err)
    check_weights(out, weights_alone)


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize(
    ("fault", "code", "words", "within_s", "flags"),
    [
        ("raises", 1, "ended with exit code 1", 10, []),
        ("exits", 3, "ended with exit code 3", 10, []),
        ("ends early", 1, "ended with exit code 0", 15, []),
        # The other loses it after peer_timeout_s, here 4 s, and some seconds to be sure.
        ("SIGSTOP", 1, "runs, but does not answer", 25, []),
        # Alive and stuck in Python, it answers: only its progress tells.
        ("sleeps", 1, "made no progress in training for", 15, ["--step-timeout=5"]),
        ("never starts", 1, "made no progress before its first step", 30, ["--start-timeout=20"]),
    ],
)
def test_p6_p7_a_fault_ends_all_within_its_limit(
    tmp_path, folder, rank, fault, code, words, within_s, flags
):
    received, _, err, took_s = launched(tmp_path, folder, fault, rank, *flags)
    assert received == code, err
    assert f"[launch] launch: rank {rank} {words}" in err
    assert took_s < within_s
    if fault == "raises":
        assert "its first error: ValueError: row 7 is broken" in err
    if fault == "sleeps":
        assert f"; the stacks of rank {rank} are in its log in " in err
        assert re.search(rf"^\[rank {rank}\]   File .* in on_\w+$", err, re.M)


@pytest.mark.slow
def test_p7_a_chief_that_saves_for_long_is_no_false_alarm(tmp_path, folder, weights_alone):
    code, out, err, _ = launched(tmp_path, folder, "saves slowly", 0, "--step-timeout=3")
    assert code == 0, err
    check_weights(out, weights_alone)
