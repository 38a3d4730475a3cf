"""README's script, and what Keras's users add to it, as two workers: one of them writes."""

import json

import keras
import pytest
from conftest import in_workers

from tfaccel import UserError
from tfaccel.runtime.cluster import Cluster
from tfaccel.training.callbacks.keras_writers import of_this_worker

PROGRAM = """
import contextlib, io, os, pathlib
import keras, numpy as np
import tfaccel
from tfaccel.runtime.collectives import all_reduce, broadcast, rank, world_size
root = pathlib.Path({root!r})
run = tfaccel.setup(gpu_ids=(), xla=False)
loader = run.image_folder({images!r}, image_size=(12, 10), channels=1, global_batch_size=12,
                          shuffle=True)
with run.scope():
    model = keras.Sequential([keras.Input((12, 10, 1)), keras.layers.Flatten(),
                              keras.layers.Dense(3)])
run.compile(model, "sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
seen = []

class Mean(keras.callbacks.Callback):
    def on_epoch_end(self, epoch, logs=None):
        seen.append([rank(), world_size(), float(all_reduce(1.0 + run.cluster.worker_index))])

callbacks = [Mean(), keras.callbacks.CSVLogger(root / "log.csv"),
             keras.callbacks.TensorBoard(root / "tensorboard"),
             keras.callbacks.ModelCheckpoint(root / "{{epoch}}.keras")]
with contextlib.redirect_stdout(io.StringIO()) as printed:
    model.fit(loader, epochs=2, callbacks=callbacks)
    model.evaluate(loader)
    model.predict(loader)
path = run.export(model, root / "exported" / "1", loader=run.image_folder(
    {images!r}, image_size=(12, 10), channels=1, global_batch_size=12))
print(json.dumps({{"seen": seen, "path": str(path), "printed": printed.getvalue(),
                  "rank": int(broadcast(run.cluster.worker_index, root_rank=1))}}))
"""


@pytest.mark.slow
def test_the_chief_alone_writes_and_a_callback_asks_all(folder, tmp_path):
    program = PROGRAM.format(root=str(tmp_path), images=str(folder))
    chief, other = map(json.loads, in_workers(program, 2))
    assert chief["seen"] == [[0, 2, 3.0]] * 2
    assert other["seen"] == [[1, 2, 3.0]] * 2
    assert (chief["rank"], other["rank"]) == (1, 1)
    assert chief["path"] == other["path"] == str(tmp_path / "exported" / "1")
    assert (tmp_path / "exported" / "1" / "tfaccel.json").is_file()
    (_,) = (tmp_path / "tensorboard" / "train").glob("events*")
    assert len((tmp_path / "log.csv").read_text().splitlines()) == 3
    assert {each.name for each in tmp_path.glob("*.keras")} == {"1.keras", "2.keras"}
    assert other["printed"] == ""
    assert "Epoch 2/2" in chief["printed"]
    assert "\b" not in chief["printed"]  # no bar, which only a terminal shows as one


def test_writers_are_left_out_of_all_but_the_chief():
    two = ("127.0.0.1:20001", "127.0.0.1:20002")
    given = [keras.callbacks.CSVLogger("log.csv"), keras.callbacks.EarlyStopping()]
    assert of_this_worker(given, Cluster(two, 0)) == given
    assert of_this_worker(given, Cluster(two, 1)) == given[1:]
    assert of_this_worker(given, Cluster()) == given


def test_backups_of_several_workers_are_refused():
    backup = keras.callbacks.BackupAndRestore("backup")
    assert of_this_worker([backup], Cluster()) == [backup]
    with pytest.raises(
        UserError, match=r"each worker would resume from its own .*run\.checkpoints"
    ):
        of_this_worker([backup], Cluster(("127.0.0.1:20001", "127.0.0.1:20002"), 0))
