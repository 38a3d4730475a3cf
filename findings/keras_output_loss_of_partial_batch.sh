#!/usr/bin/env bash
# Keras: with several outputs, the logged loss of each output counts a small last batch as a full one, unless eager.
#
# Versions: keras 3.15.1 with tensorflow-cpu 2.21.0; Python 3.11 to 3.13.
#
# Behaviour: fit logs a loss for each output. It is meant as a mean over rows: each batch is weighted by its number of
# rows, which is read from the static shape of the prediction while the step is traced. fit's batches have an open size,
# so the number is None, and None counts as 1: a last batch of 3 rows weighs as much as one of 4, or of 256. The total
# "loss" is weighted by another way and is right, so the outputs' losses do not add up to it. With run_eagerly=True the
# sizes are known and all logs are right. No message tells it.
#
# Output seen, 7 rows in batches of 4, loss of output "a" after an epoch whose rows have the errors 1, 1, 1, 1, 3, 3, 3
# (learning rate 0; the mean of the squares is (4 * 1 + 3 * 9) / 7):
#   graph: a 5.0000, loss 4.4286   (1 + 9) / 2
#   eager: a 4.4286, loss 4.4286   (4 * 1 + 3 * 9) / 7
#
# The script exits with 1 if this behaviour changes.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
"${PYTHON:-python3}" -m venv "$work/env"
"$work/env/bin/pip" install --quiet keras==3.15.1 tensorflow-cpu==2.21.0

export CUDA_VISIBLE_DEVICES=-1 TF_CPP_MIN_LOG_LEVEL=3
cat > "$work/train.py" <<'PY'
import keras
import numpy as np

ERRORS = np.array([1, 1, 1, 1, 3, 3, 3], "float32")[:, None]


def logged(eager):
    """Returns the logged losses of one epoch, with batches of 4 and 3 rows."""
    inputs = keras.Input((1,))
    outputs = {name: keras.layers.Dense(1, name=name)(inputs) for name in ("a", "b")}
    model = keras.Model(inputs, outputs)
    model.compile(keras.optimizers.SGD(0.0), "mse", run_eagerly=eager, jit_compile=False)
    rows = np.zeros((7, 1), "float32")
    return model.fit(rows, {"a": ERRORS, "b": rows}, batch_size=4, shuffle=False, verbose=0).history


found = {}
for name, eager in (("graph", False), ("eager", True)):
    logs = logged(eager)
    found[name] = logs["a_loss"][0]
    print(f"{name}: a {logs['a_loss'][0]:.4f}, loss {logs['loss'][0]:.4f}")
right = (4 * 1 + 3 * 9) / 7
wrong = (1 + 9) / 2
assert abs(found["eager"] - right) < 1e-4, "eager logs have changed"
assert abs(found["graph"] - wrong) < 1e-4, "graph logs have changed"
PY
"$work/env/bin/python" "$work/train.py" 2> "$work/errors" || { cat "$work/errors" >&2; exit 1; }
