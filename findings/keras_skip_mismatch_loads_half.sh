#!/usr/bin/env bash
# Keras: load_weights(skip_mismatch=True) loads some weights of a layer that does not match, and does not name them.
#
# Version: keras 3.15.1 (with tensorflow-cpu 2.21.0), Python 3.11 to 3.13.
#
# Behaviour: the documentation says that a layer with mismatching weights is skipped. But Keras assigns the weights
# of a layer one after the other, and stops at the first weight that does not match. The weights before it stay
# loaded. A GRU with reset_after=False thus has the kernels of the file and its own bias, and only the shapes in the
# warning hint at that. Also, Keras finds a layer by its number among the layers of its class, such as "dense_1",
# and ignores the name in the file. In a network with one layer less, the layer "third" gets the weights of
# "second", without a warning.
#
# Output seen:
#   GRU: kernel of the file, recurrent kernel of the file, bias its own
#   layer third has the weights of second
#
# The script exits with 1 if this behaviour changes.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
"${PYTHON:-python3}" -m venv "$work/env"
"$work/env/bin/pip" install --quiet keras==3.15.1 tensorflow-cpu==2.21.0

TF_CPP_MIN_LOG_LEVEL=3 WORK="$work" "$work/env/bin/python" - <<'PY'
import os
import sys
import warnings

import keras
import numpy as np
from keras import layers

FILE = os.path.join(os.environ["WORK"], "a.weights.h5")


def gru(reset_after):
    return keras.Sequential([keras.Input((None, 4)), layers.GRU(3, reset_after=reset_after)])


def dense(*names):
    return keras.Sequential([keras.Input((4,)), *(layers.Dense(4, name=each) for each in names)])


def origin(mine, saved):
    return "of the file" if mine.shape == saved.shape and np.array_equal(mine, saved) else "its own"


saved, model = gru(True), gru(False)
saved.set_weights([np.full_like(each, 7) for each in saved.get_weights()])
saved.save_weights(FILE)
with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # the warning says that the layer could not be loaded
    model.load_weights(FILE, skip_mismatch=True)
parts = [origin(*pair) for pair in zip(model.get_weights(), saved.get_weights())]
found = ["GRU: kernel {}, recurrent kernel {}, bias {}".format(*parts)]

saved, model = dense("first", "second", "third"), dense("first", "third")
saved.save_weights(FILE)
with warnings.catch_warnings():
    warnings.simplefilter("error")
    model.load_weights(FILE, skip_mismatch=True)
third = model.get_layer("third").kernel.numpy()
same = [each.name for each in saved.layers if np.array_equal(each.kernel.numpy(), third)]
found.append(f"layer third has the weights of {', '.join(same)}")

print("\n".join(found))
expected = [
    "GRU: kernel of the file, recurrent kernel of the file, bias its own",
    "layer third has the weights of second",
]
sys.exit(0 if found == expected else 1)
PY
