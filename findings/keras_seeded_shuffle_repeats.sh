#!/usr/bin/env bash
# Keras on TensorFlow: with a seed set, fit(shuffle=True) shuffles arrays in the same order in every epoch.
#
# Versions: keras 3.15.1, tensorflow-cpu 2.21.0, Python 3.11 to 3.13.
#
# Behaviour: without `keras.utils.set_random_seed`, `model.fit(x, y, shuffle=True)` shuffles the examples in a new
# order in each epoch. After `set_random_seed(0)`, every epoch has the same order, and so does each later fit. The
# reason is that the shuffle takes its seed from the global seed at the start of each epoch. A program that sets a
# seed to be repeatable therefore trains without reshuffling, and no message says so.
#
# Output seen, the number of different orders in three epochs:
#   no seed: 3 different orders
#   seed 0:  1 different orders
#   seed 0, three fits of one epoch: 1 different orders
#
# The script exits with 1 if this behaviour changes.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
"${PYTHON:-python3}" -m venv "$work/env"
"$work/env/bin/pip" install --quiet keras==3.15.1 tensorflow-cpu==2.21.0

TF_CPP_MIN_LOG_LEVEL=3 "$work/env/bin/python" - <<'PY'
import sys

import keras
import numpy as np


def count_orders(seed, *, epochs, fits):
    """Trains on 32 examples in batches of 8; returns the number of different orders of all epochs."""
    if seed is not None:
        keras.utils.set_random_seed(seed)
    seen = []

    class Recorder(keras.Model):
        def train_step(self, data):
            seen.extend(int(row) for row in np.asarray(data[0])[:, 0])
            return {"loss": 0.0}

    inputs = keras.Input((1,))
    model = Recorder(inputs, keras.layers.Dense(1)(inputs))
    model.compile(optimizer="sgd", loss="mse", run_eagerly=True)
    rows = np.arange(32, dtype="float32")[:, None]
    for _ in range(fits):
        model.fit(rows, rows, batch_size=8, epochs=epochs, shuffle=True, verbose=0)
    return len({tuple(seen[start : start + 32]) for start in range(0, len(seen), 32)})


found = {
    "no seed": count_orders(None, epochs=3, fits=1),
    "seed 0": count_orders(0, epochs=3, fits=1),
    "seed 0, three fits of one epoch": count_orders(0, epochs=1, fits=3),
}
for name, number in found.items():
    print(f"{name}: {number} different orders")
sys.exit(0 if list(found.values()) == [3, 1, 1] else 1)
PY
