#!/usr/bin/env bash
# Keras: in a model with a mixed policy, a ReversibleEmbedding's head computes in float32, not in the compute dtype.
#
# Versions: keras 3.15.1 with jax 0.7.2; the same with tensorflow-cpu 2.21.0 (BACKEND=tensorflow); Python 3.11 to 3.13.
#
# Behaviour: the documentation says of `reverse_dtype`: "Defaults to the `compute_dtype` of the layer." But with None,
# the layer casts nothing. An Embedding has autocast=False, so within a model its weights stay float32, and bfloat16
# inputs times float32 weights give float32: the product, its gradients and the logits. In a model with a large
# vocabulary these are the largest tensors. The model says that its outputs are bfloat16. The same layer called outside
# a model gives bfloat16: Keras then casts the weights of a layer in spite of autocast=False. No message tells of
# this. With reverse_dtype="bfloat16" the head is bfloat16 in a model, too.
#
# Output seen, the dtype of the logits:
#   mixed_bfloat16: layer alone bfloat16; model says bfloat16, gives float32; with reverse_dtype bfloat16
#   mixed_float16: layer alone float16; model says float16, gives float32; with reverse_dtype float16
#
# The script exits with 1 if this behaviour changes.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
backend=${BACKEND:-jax}
case $backend in
    jax) package=jax==0.7.2 ;;
    tensorflow) package=tensorflow-cpu==2.21.0 ;;
    *) echo "BACKEND=$backend; expected jax or tensorflow" >&2; exit 2 ;;
esac
"${PYTHON:-python3}" -m venv "$work/env"
"$work/env/bin/pip" install --quiet keras==3.15.1 "$package"

cat > "$work/head.py" <<'PY'
import keras
import numpy as np

CLAIM = "Defaults to the `compute_dtype` of the layer."
assert CLAIM in " ".join(keras.layers.ReversibleEmbedding.__doc__.split()), "the claim has changed"


IDS = np.array([[1, 2]], "int32")


def dtype_of(x):
    return keras.backend.standardize_dtype(x.dtype)


def decoder(tokens):
    """Returns a model that embeds tokens and gives their logits."""
    ids = keras.Input((2,), dtype="int32")
    return keras.Model(ids, tokens(tokens(ids), reverse=True))


for policy in ("mixed_bfloat16", "mixed_float16"):
    keras.config.set_dtype_policy(policy)
    tokens = keras.layers.ReversibleEmbedding(5, 3)
    model = decoder(tokens)
    given = decoder(keras.layers.ReversibleEmbedding(5, 3, reverse_dtype=tokens.compute_dtype))
    print(f"{policy}: layer alone {dtype_of(tokens(tokens(IDS), reverse=True))};", end=" ")
    print(f"model says {dtype_of(model.output)}, gives {dtype_of(model(IDS))};", end=" ")
    print(f"with reverse_dtype {dtype_of(given(IDS))}")
PY
export KERAS_BACKEND=$backend JAX_PLATFORMS=cpu CUDA_VISIBLE_DEVICES=-1 TF_CPP_MIN_LOG_LEVEL=3
"$work/env/bin/python" "$work/head.py" 2> "$work/errors" > "$work/out" || { cat "$work/errors" >&2; exit 1; }
cat "$work/out"
diff "$work/out" - <<'OUT'
mixed_bfloat16: layer alone bfloat16; model says bfloat16, gives float32; with reverse_dtype bfloat16
mixed_float16: layer alone float16; model says float16, gives float32; with reverse_dtype float16
OUT
