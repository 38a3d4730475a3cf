"""The job that every engine runs: handwritten digits on the CPU, 69 steps, 0.05 s each at least.

    tfaccel launch --nproc-per-node=2 tests/engines/digits.py --workdir=DIR

No dropout, whose draws differ from replica to replica, and no kinks, which make much of little: its
weights on two workers are those of one process but for the order of sums.
"""

import argparse
import pathlib
import time

import keras
import numpy as np

import tfaccel
from tfaccel.config import CheckpointConfig
from tfaccel.data.digits import load_digits

parser = argparse.ArgumentParser()
parser.add_argument("--workdir", type=pathlib.Path, required=True)
parser.add_argument("--step-s", type=float, default=0.05)
arguments = parser.parse_args()

run = tfaccel.setup(gpu_ids=(), xla=False, deterministic=True)
images, labels = load_digits()
train = run.loader(
    tfaccel.sources.arrays(images[:1437, ..., None], labels[:1437].astype(np.int64)),
    image_size=(8, 8),
    channels=1,
    std=16 / 255,
    global_batch_size=64,
    shuffle=True,
)
with run.scope():
    layers = [keras.layers.Flatten(), keras.layers.Dense(64, "tanh"), keras.layers.Dense(10)]
    model = keras.Sequential([keras.Input((8, 8, 1)), *layers])
losses = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
run.compile(model, keras.optimizers.SGD(0.02, momentum=0.9), losses, metrics=["accuracy"])
checkpoints = run.checkpoints(
    arguments.workdir / "checkpoints", CheckpointConfig(every_steps=4), monitor="loss"
)
slowly = keras.callbacks.LambdaCallback(
    on_train_batch_end=lambda batch, logs: time.sleep(arguments.step_s)
)
history = model.fit(train, epochs=3, callbacks=[checkpoints, slowly], verbose=0).history
print({name: values[-1] for name, values in history.items()})
