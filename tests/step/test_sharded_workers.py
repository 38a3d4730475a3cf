"""Two processes of one replica each: sharded states train, are saved and resumed as whole ones."""

import json

import pytest
from conftest import in_workers

from tfaccel.diagnostics.selftest import SMALL

PROGRAM = """
import os, pathlib
import keras
import numpy as np
import tfaccel
import tfaccel.run
from tfaccel.keras_internals.sharded_states import is_sharded
tfaccel.run.warn_at_start = lambda *_: None  # a look at the export, which is not shown here
run = tfaccel.setup(gpu_ids=(), xla=False, deterministic=True)
x = np.random.default_rng(0).normal(size=(60, 5)).astype("float32")

class Examples:
    def __len__(self):
        return 60

    def __getitem__(self, index):
        return x[index], np.int64(abs(int(x[index].sum() * 10)) % 3)

def train(folder, epochs, **config):
    keras.utils.set_random_seed(0)
    with run.scope():
        model = keras.Sequential(
            [keras.Input((5,)), keras.layers.Dense(7, "tanh"), keras.layers.Dense(3)])
    start = [each.numpy() for each in model.trainable_variables]
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    optimizer = keras.optimizers.AdamW(
        0.02, weight_decay=0.1, clipnorm=0.3, use_ema=True, ema_overwrite_frequency=7)
    run.compile(model, optimizer, loss, step=tfaccel.StepConfig(audit_steps=4, **config))
    checkpoints = run.checkpoints(pathlib.Path({root!r}) / folder, monitor="loss")
    loader = run.examples(Examples(), global_batch_size=12, shuffle=False)
    model.fit(loader, epochs=epochs, callbacks=[checkpoints], verbose=0)
    ends = [each.numpy() for each in model.trainable_variables]
    return model, max(np.abs(a - b).max() for a, b in zip(ends, start)), ends

def difference(one, other):
    return float(max(np.abs(a - b).max() for a, b in zip(one[2], other[2])) / one[1])

train("plain", 2)
train("sharded", 2, shard_states=True)
whole = train("plain_alone", 4)
found = {{
    "alone": difference(whole, train("sharded_alone", 4, shard_states=True)),
    "from plain": difference(whole, train("plain", 4, shard_states=True)),
    "from sharded": difference(whole, train("sharded", 4)),
}}
model = train("last", 1, shard_states=True)[0]
slots = [each for each in model.optimizer.variables if is_sharded(each)]
found["slots"] = [each._value.values[0].shape.num_elements() for each in slots[:2]]
try:
    model.save(pathlib.Path({root!r}) / "unused.keras")
except tfaccel.UserError as error:
    found["refused"] = str(error)
run.compile(model, model.optimizer, "mse")
found["again"] = model.optimizer.variables[2].numpy().shape
print(json.dumps(found))
"""


@pytest.mark.slow
def test_two_workers_train_and_resume_with_sharded_states_and_without(tmp_path):
    first, second = map(json.loads, in_workers(PROGRAM.format(root=str(tmp_path)), 2))
    assert first == second
    for name in ("alone", "from plain", "from sharded"):
        assert first[name] < SMALL["float32"], name
    assert first["slots"] == [18, 4]  # of the 35 and 7 values of the first layer
    assert "one worker cannot read it alone" in first["refused"]
    assert first["again"] == [5, 7]
