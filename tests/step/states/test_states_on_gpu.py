"""Optimizer states of fewer bytes on a GPU: what training comes to, and the bytes they take."""

import json

import pytest
from conftest import new_process

pytestmark = pytest.mark.gpu

PROGRAM = """
import json
import keras, numpy as np, tensorflow as tf
import tfaccel
run = tfaccel.setup(gpu_ids=[0], tf32=False, xla=XLA, compile_cache=False)
random = np.random.default_rng(0)
x = random.normal(size=(640, 64)).astype("float32")
y = x[:, :10].argmax(1)

found = {}
for dtype in ("float32", "bfloat16", "8bit"):
    keras.utils.set_random_seed(0)
    with run.scope():
        wide = [keras.layers.Dense(4096, activation="tanh"), keras.layers.Dense(4096)]
        model = keras.Sequential([keras.Input((64,)), *wide, keras.layers.Dense(10)])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    adam = keras.optimizers.AdamW(1e-4)
    run.compile(model, adam, loss, step=tfaccel.StepConfig(state_dtype=dtype))
    settings = {"batch_size": 64, "shuffle": False, "verbose": 0}
    losses = model.fit(x, y, epochs=4, **settings).history["loss"]
    num_bytes = sum(
        int(np.prod(each.shape)) * tf.as_dtype(each.dtype).size for each in adam.variables
    )
    found[dtype] = [losses[0], losses[-1], num_bytes]
print(json.dumps(found))
"""


@pytest.mark.parametrize("xla", [True, False])
def test_training_comes_to_the_same_loss(xla):
    done = new_process(PROGRAM.replace("XLA", repr(xla)), timeout_s=300)
    assert done.returncode == 0, done.stderr[-5000:]
    found = json.loads(done.stdout.splitlines()[-1])
    print(found)
    first, last, whole = found.pop("float32")
    assert last < 0.7 * first
    for dtype, share in {"bfloat16": 0.5, "8bit": 0.26}.items():
        _, other, num_bytes = found[dtype]
        assert other == pytest.approx(last, rel=0.1)
        assert num_bytes / whole == pytest.approx(share, abs=0.02)
