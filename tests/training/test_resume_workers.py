"""Two workers, as processes: one place to go on from, and one step to stop at."""

import json

import numpy as np
import pytest
from conftest import in_workers

from tfaccel.training.checkpoint.store import Snapshot, Store
from tfaccel.training.workdir import held

# Python's collector would take a third of the time of TensorFlow's import, and as much at the end.
PROGRAM = """
import gc, os, pathlib, signal
gc.disable()
import keras
import tfaccel
import tfaccel.run
gc.freeze()
gc.enable()
from tfaccel.config import CheckpointConfig
from tfaccel.training.checkpoint import folder as folder_lib
tfaccel.run.warn_at_start = lambda *_: None  # a look at the export, which is not shown here
run = tfaccel.setup(gpu_ids=(), xla=False, deterministic=True)
index = run.cluster.worker_index
fill = folder_lib.fill

def fill_disk(unfinished, write):
    if int(unfinished.name[5:13]) >= {full_at}:
        raise OSError(28, "No space left on device")
    fill(unfinished, write)

if {full_at}:
    folder_lib.fill = fill_disk

def train(name):
    loader = run.image_folder({folder!r}, image_size=(12, 10), channels=1, global_batch_size=12,
                              loader="dali_cpu", shuffle=True)
    seen = []

    class Signals(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            seen.append(loader.position)
            if loader.position == {signal_at} and index == 1:
                os.kill(os.getpid(), signal.SIGTERM)

    with run.scope():
        model = keras.Sequential([keras.Input((12, 10, 1)), keras.layers.Flatten()])
        model.add(keras.layers.Dropout(0.5))
        model.add(keras.layers.Dense(3))
    run.compile(model, "adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    folder = pathlib.Path({root!r}) / name
    checkpoints = run.checkpoints(folder, CheckpointConfig(every_steps=3), monitor="loss")
    try:
        model.fit(loader, epochs={epochs}, callbacks=[checkpoints, Signals()], verbose=0)
        outcome = 0
    except SystemExit as stopped:
        outcome = stopped.code
    except (ValueError, RuntimeError) as error:
        outcome = str(error)
    return outcome, seen, [each.tolist() for each in model.get_weights()]

print(json.dumps([train(each.format(index=index)) for each in {names}]))
"""


def trained(folder, root, names, *, epochs=40, signal_at=0, full_at=0):
    """Trains with each folder of checkpoints in turn; returns for each what the workers say."""
    settings = {"epochs": epochs, "signal_at": signal_at, "full_at": full_at}
    program = PROGRAM.format(folder=str(folder), root=str(root), names=names, **settings)
    return list(zip(*(json.loads(each) for each in in_workers(program, 2)), strict=True))


@pytest.fixture
def train(folder, tmp_path):
    def train(**settings):
        (workers,) = trained(folder, tmp_path, ["shared"], **settings)
        return workers

    return train


@pytest.fixture(scope="module")
def job(folder, tmp_path_factory):
    """Two workers: refused at first, then stopped by a signal. What they say, and the folder.

    To start them takes longer than all they do.
    """
    root = tmp_path_factory.mktemp("job")
    for index in range(2):  # a folder for each, as where a disk is not shared
        store = Store(root / f"of-{index}", keep_last=1, keep_best=0, largest_is_best=True)
        store.write(Snapshot({"weights": np.zeros(3)}, {"step": 8 * (1 + index)}))
    refused, stopped = trained(folder, root, ["of-{index}", "shared"], epochs=2000, signal_at=10)
    return refused, stopped, root


def test_p5_a_signal_to_one_worker_stops_both_at_one_step(job):
    _, ((first, seen, _), (second, others, _)), root = job
    assert first == second == 143
    assert seen == others
    newest = sorted((root / "shared").glob("step-*"))[-1]
    assert int(newest.name[5:]) == seen[-1] >= 10
    # An epoch has 4 steps: nobody trains on into the next one.
    assert seen[-1] <= 12


@pytest.mark.slow  # that workers go on from one, tests/launch/test_launched_training.py sees too
def test_p5_and_both_go_on_from_there(job, folder):
    _, ((_, seen, _), _), root = job
    epochs = seen[-1] // 4 + 2
    ((again, there),) = trained(folder, root, ["shared"], epochs=epochs)
    assert again[0] == there[0] == 0
    assert again[1] == there[1] == list(range(seen[-1] + 1, 4 * epochs + 1))
    assert again[2] == there[2]


def test_p10_a_worker_with_another_checkpoint_is_refused_by_all(job):
    for outcome, seen, _ in job[0]:
        assert outcome.startswith("workers differ in the step of checkpoint of their run"), outcome
        assert seen == []


@pytest.mark.slow
def test_p3_both_end_at_one_step_when_the_chief_cannot_write(train, tmp_path):
    (chief, seen, _), (other, others, _) = train(epochs=2000, full_at=9)
    assert "step-00000011 cannot be written (No space left on device)" in chief
    assert other == (
        "another worker could not save a checkpoint, so this one stops too; see its log"
    )
    assert seen == others
    assert 11 <= seen[-1] < 4 * 2000


@pytest.mark.slow
def test_p3_both_end_where_the_chief_may_not_begin(train, tmp_path):
    with held(tmp_path / "shared"):
        (chief, seen, _), (other, others, _) = train()
    assert f"{tmp_path / 'shared'} is used by a live run" in chief
    assert other.startswith("another worker could not take the checkpoints' folder")
    assert seen == others == []
