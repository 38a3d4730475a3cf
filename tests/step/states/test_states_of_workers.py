"""Optimizer states of fewer bytes in several processes: made there, equal, and as on one replica.

TensorFlow's collectives of processes take neither bfloat16 nor uint8.
"""

import json

import numpy as np
import pytest
from conftest import in_workers

WORKER = """
import keras, numpy as np, tfaccel
from tfaccel.keras_internals.optimizer_states import states_of
from tfaccel.training.replica_checksums import Audit

run = tfaccel.setup(gpu_ids=())
draw = np.random.default_rng(0)
x = draw.normal(size=(64, 16)).astype("float32")
y = (x @ draw.normal(size=(16, 4))).argmax(axis=1)
found = {}
for dtype in ("float32", "bfloat16", "8bit"):
    keras.utils.set_random_seed(7)
    with run.scope():
        model = keras.Sequential(
            [keras.Input((16,)), keras.layers.Dense(300, "relu"), keras.layers.Dense(20)])
    step = tfaccel.StepConfig(state_dtype=dtype, audit_steps=3)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    run.compile(model, keras.optimizers.AdamW(1e-2), loss, step=step)
    history = model.fit(x, y, batch_size=16, epochs=5, shuffle=False, verbose=0).history
    Audit(model).check(when="at the end")
    kinds = [each.codec and each.codec.name for each in states_of(model)]
    found[dtype] = history["loss"], kinds, [float(np.sum(each)) for each in model.get_weights()]
print(json.dumps(found))
"""


@pytest.mark.slow
def test_two_processes_train_as_with_float32():
    first, second = map(json.loads, in_workers(WORKER, 2))
    assert first == second
    wanted = first["float32"][0]
    assert wanted[-1] < 0.3 * wanted[0]
    for dtype in ("bfloat16", "8bit"):
        losses, kinds, _ = first[dtype]
        np.testing.assert_allclose(losses, wanted, rtol=0.03)
        assert losses != wanted
        assert kinds == [dtype, None, dtype, None] * 2
