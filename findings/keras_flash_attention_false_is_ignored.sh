#!/usr/bin/env bash
# Keras: `flash_attention=False` of an attention layer does not turn flash attention off.
#
# Versions: keras 3.15.1 with jax 0.7.2; Python 3.11 to 3.13.
#
# Behaviour: MultiHeadAttention and GroupQueryAttention keep `flash_attention or is_flash_attention_enabled()`, and the
# global setting is None by default. So False becomes None, with which JAX and PyTorch use flash attention wherever they
# can. Only keras.config.disable_flash_attention(), which is global, turns it off for a layer.
# `keras.ops.dot_product_attention(flash_attention=False)` does what it says.
#
# Output seen, what the attention function of the backend is given:
#   default:                  True gives True, None gives None, False gives None
#   disable_flash_attention:  True gives True, None gives False, False gives False
#   the function itself:      False gives False
#
# The script exits with 1 if this behaviour changes.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
"${PYTHON:-python3}" -m venv "$work/env"
"$work/env/bin/pip" install --quiet keras==3.15.1 jax==0.7.2

cat > "$work/given.py" <<'PY'
import keras
import numpy as np
from keras.src import backend

own, given = backend.nn.dot_product_attention, []


def noting(*args, flash_attention=None, **kwargs):
    given.append(flash_attention)
    return own(*args, **kwargs)


backend.nn.dot_product_attention = noting
x = np.ones((1, 3, 8), np.float32)
LAYERS = [
    lambda **settings: keras.layers.MultiHeadAttention(2, 4, **settings),
    lambda **settings: keras.layers.GroupQueryAttention(4, 2, 2, **settings),
]


def of_layers():
    given.clear()
    for make in LAYERS:
        for wanted in (True, None, False):
            make(flash_attention=wanted)(x, x)
    assert given[:3] == given[3:]
    return given[:3]


print("default:", *of_layers())
keras.config.disable_flash_attention()
print("disabled:", *of_layers())
keras.config.enable_flash_attention()
given.clear()
heads = np.ones((1, 3, 2, 4), np.float32)
keras.ops.dot_product_attention(heads, heads, heads, flash_attention=False)
print("function:", *given)
PY

KERAS_BACKEND=jax JAX_PLATFORMS=cpu "$work/env/bin/python" "$work/given.py" | tee "$work/out"
diff "$work/out" - <<'OUT'
default: True None None
disabled: True False False
function: False
OUT
