"""Sharded optimizer states on two GPUs, by sums in XLA, and by its reduce-scatter and gather.

Each is compared with whole states, in float32 and in 8 bits.
"""

import json

import pytest
from conftest import new_process

pytestmark = pytest.mark.multi_gpu

PROGRAM = """
import json
import keras, numpy as np, tensorflow as tf
import tfaccel
from tfaccel.keras_internals import replica
from tfaccel.keras_internals.sharded_states import num_bytes_held
from tfaccel.keras_internals.variables import components
run = tfaccel.setup(gpu_ids=[0, 1], tf32=False, xla=True, compile_cache=False)
random = np.random.default_rng(0)
x = random.normal(size=(640, 64)).astype("float32")
y = x[:, :10].argmax(1)

def trained(shards, scatters, dtype="float32"):
    replica.SCATTERS_IN_XLA = scatters
    keras.utils.set_random_seed(0)
    with run.scope():
        wide = [keras.layers.Dense(4096, activation="tanh"), keras.layers.Dense(1023)]
        model = keras.Sequential([keras.Input((64,)), *wide, keras.layers.Dense(10)])
        start = [each.numpy() for each in model.trainable_variables]
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    step = tfaccel.StepConfig(shard_states=shards, state_dtype=dtype)
    adam = keras.optimizers.AdamW(1e-3, global_clipnorm=1.0)
    run.compile(model, adam, loss, step=step)
    model.fit(x, y, batch_size=64, shuffle=False, verbose=0, epochs=3)
    for each in model.trainable_variables:
        first, other = (own.numpy() for own in components(each))
        assert np.array_equal(first, other), each.path
    ends = [each.numpy() for each in model.trainable_variables]
    return start, ends, num_bytes_held(model.optimizer.variables)

found = {}
for dtype in ("float32", "8bit"):
    start, whole, num_bytes = trained(False, False, dtype)
    change = max(np.abs(a - b).max() for a, b in zip(whole, start))
    for scatters in (False, True):
        _, ends, held = trained(True, scatters, dtype)
        difference = max(np.abs(a - b).max() for a, b in zip(ends, whole)) / change
        found[f"{dtype} {scatters}"] = [float(difference), held / num_bytes]
print(json.dumps(found))
"""


def test_the_weights_are_those_of_whole_states():
    done = new_process(PROGRAM, timeout_s=400)
    assert done.returncode == 0, done.stderr[-5000:]
    found = json.loads(done.stdout.splitlines()[-1])
    print(found)
    assert len(found) == 4
    for name, (difference, share) in found.items():
        assert difference < (0.02 if "8bit" in name else 1e-3), name  # selftest's limits
        assert share == pytest.approx(0.5, abs=0.01), name
