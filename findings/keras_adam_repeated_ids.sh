#!/usr/bin/env bash
# Keras: Adam trains an Embedding differently on TensorFlow than on JAX as soon as a batch has an id twice.
#
# Versions: keras 3.15.1 with tensorflow-cpu 2.21.0 and with jax 0.7.2; Python 3.11 to 3.13.
#
# Behaviour: on TensorFlow the gradient of an Embedding is a tf.IndexedSlices with one slice for each id of the
# batch. Keras's Adam squares each slice by itself and adds the squares: v += (1 - b2) * sum(g^2). On JAX the gradient
# is dense, so the slices of an id are added before: v += (1 - b2) * sum(g)^2, as for any other layer. With the same
# weights, data and learning rate, the two backends take steps of different lengths. A Dense layer on one-hot rows,
# which computes the same function, trains like JAX on both backends. (The optimizers of TensorFlow 2's own Keras
# added the slices of an id first.) With SGD, or if no id comes twice, the backends agree.
#
# Output seen, the weight of the repeated id after 5 steps with Adam(0.1), 4 times the same id in each batch:
#   tensorflow: Embedding 0.3933, Dense on one-hot rows 1.0129
#   jax:        Embedding 1.0129, Dense on one-hot rows 1.0129
#
# The script exits with 1 if this behaviour changes.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
"${PYTHON:-python3}" -m venv "$work/env"
"$work/env/bin/pip" install --quiet keras==3.15.1 tensorflow-cpu==2.21.0 jax==0.7.2

cat > "$work/train.py" <<'PY'
import keras
import numpy as np

IDS = np.array([[1, 1, 1, 1], [1, 1, 1, 1]])
LABELS = np.full((2, 1), 3.0, np.float32)


def weight(layer, x):
    """Trains the sum of one layer's outputs for 5 steps; returns the weight of id 1."""
    inputs = keras.Input(x.shape[1:])
    outputs = keras.ops.sum(layer(inputs), axis=1)
    model = keras.Model(inputs, outputs)
    layer.set_weights([np.array([[1.0], [1.5], [1.0]], np.float32)])
    model.compile(keras.optimizers.Adam(0.1), "mse", jit_compile=False)
    model.fit(x, LABELS, batch_size=2, epochs=5, verbose=0)
    return float(layer.get_weights()[0][1, 0])


embedding = weight(keras.layers.Embedding(3, 1), IDS)
dense = weight(keras.layers.Dense(1, use_bias=False), np.eye(3, dtype=np.float32)[IDS])
print(f"{embedding:.4f} {dense:.4f}")
PY

export CUDA_VISIBLE_DEVICES=-1 TF_CPP_MIN_LOG_LEVEL=3
tensorflow=$(KERAS_BACKEND=tensorflow "$work/env/bin/python" "$work/train.py" 2> "$work/log" | tail -1)
jax=$(KERAS_BACKEND=jax "$work/env/bin/python" "$work/train.py" 2>> "$work/log" | tail -1)
echo "tensorflow: Embedding and Dense $tensorflow"
echo "jax:        Embedding and Dense $jax"
read -r on_tensorflow dense <<< "$tensorflow"
read -r on_jax dense_on_jax <<< "$jax"
[ "$on_jax" = "$dense" ] && [ "$dense_on_jax" = "$dense" ] && [ "$on_tensorflow" != "$dense" ]
