"""Two workers, as processes, whose data differ: both say so, and neither waits for ever."""

import json
import shutil
import types

import numpy as np
import pytest
from conftest import in_workers

from tfaccel.runtime import agreement

PROGRAM = """
import pathlib
import keras
import numpy as np
import tfaccel
from tfaccel import sources
run = tfaccel.setup(gpu_ids=())
index = run.cluster.worker_index
files = {{"image_size": (12, 10), "channels": 1, "global_batch_size": 12, "loader": "tf_data"}}

with run.scope():
    model = keras.Sequential([keras.layers.Flatten(), keras.layers.Dense(1)])
run.compile(model, "sgd", "mse")

def outcome(make):
    try:
        return len(model.predict(make(), verbose=0))
    except tfaccel.UserError as error:
        return str(error)

def folder(name):
    return lambda: run.image_folder(pathlib.Path({root!r}) / name, **files)

arrays = sources.arrays(np.zeros((20 + index, 12, 10, 1), np.uint8), np.zeros(20 + index, np.int32))
print(json.dumps([
    outcome(folder(["all", "copy"][index])),
    outcome(folder(["all", "fewer"][index])),
    outcome(folder(["all", "renamed"][index])),
    outcome(lambda: run.image_folder(pathlib.Path({root!r}) / "all", shuffle=index > 0, **files)),
    outcome(lambda: run.image_folder(pathlib.Path({root!r}) / "all", mean=0.1 * index, **files)),
    outcome(lambda: run.loader(arrays, **files | {{"loader": "auto"}})),
    outcome(lambda: run.examples(np.zeros((20, 3 + index)), global_batch_size=4)),
    outcome(lambda: run.examples(np.zeros((20, 3)), global_batch_size=4) if index
            else folder("all")()),
    outcome(folder("all")),
]))
"""


@pytest.fixture
def root(folder, tmp_path):
    """The same images in four folders; one lacks a file, and of one a file has another name."""
    for name in ("all", "copy", "fewer", "renamed"):
        shutil.copytree(folder, tmp_path / name)
    (tmp_path / "fewer/a/00.png").unlink()
    (tmp_path / "renamed/a/00.png").rename(tmp_path / "renamed/a/01.png")
    return tmp_path


@pytest.mark.slow
def test_workers_whose_data_differ_say_in_what(root):
    outcomes = [json.loads(each) for each in in_workers(PROGRAM.format(root=str(root)), 2)]
    for number, (same, *wrong, again) in zip((37, 36), outcomes, strict=True):
        assert same == again == 37
        wanted = [
            f"number of examples of their data: here it is {number};",
            "files of their data: here it is ['",
            "plan of their data: here it is Plan(num_examples=37",
            "images of their data: here it is ((12, 10), 1, (",
            "number of examples of their data",
            "shapes of their data",
            "kind of their data: here it is ('number of examples', ",
        ]
        for said, each in zip(wrong, wanted, strict=True):
            assert said.startswith(f"workers differ in the {each}"), said


SEVERAL = types.SimpleNamespace(
    extended=types.SimpleNamespace(worker_devices=("a",)), num_replicas_in_sync=2
)


@pytest.mark.parametrize(("before_s", "then_s", "most_s"), [(0.5, 0.5, 0.5), (0.001, 0.1, 5.1)])
def test_a_signal_is_heard_soon_where_steps_become_slower(monkeypatch, before_s, then_s, most_s):
    now = 0.0
    monkeypatch.setattr(agreement.time, "monotonic", lambda: now)
    monkeypatch.setattr(agreement, "of_workers", lambda own, strategy: np.stack([own, own]))
    any_worker = agreement.AnyWorker(SEVERAL)
    for _ in range(1000):
        now += before_s
        any_worker.says(False)
    asked_at = now
    while True:
        now += then_s
        if any_worker.says(True) == (True,):
            break
    assert now - asked_at <= most_s


def test_at_an_epochs_end_workers_ask_each_other_in_any_case(monkeypatch):
    monkeypatch.setattr(agreement.time, "monotonic", lambda: 0.0)  # steps take no time
    monkeypatch.setattr(agreement, "of_workers", lambda own, strategy: np.stack([own, own]))
    any_worker = agreement.AnyWorker(SEVERAL)
    any_worker.says(False)
    assert any_worker.says(True) == (False,)
    assert any_worker.says(True, False, now=True) == (True, False)


@pytest.mark.parametrize("vector", [np.ones(1, bool), np.arange(3), np.linspace(0, 1, 17)])
def test_vectors_of_any_length_and_kind_are_sent_in_a_few_lengths(monkeypatch, vector):
    sent = []

    def gather(value):
        sent.append(value)
        return np.concatenate([value, value])

    monkeypatch.setattr(agreement, "_gather", lambda strategy: lambda value: _Numpy(gather(value)))
    found = agreement.of_workers(vector, SEVERAL)
    assert found.dtype == vector.dtype
    np.testing.assert_array_equal(found, [vector, vector])
    assert sent[0].shape[1] % agreement.LENGTH == 0
    assert sent[0].dtype != bool


class _Numpy:
    def __init__(self, array):
        self._array = np.asarray(array)

    def numpy(self):
        return self._array
