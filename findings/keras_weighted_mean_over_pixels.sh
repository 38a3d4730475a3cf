#!/usr/bin/env bash
# Keras: a loss with reduction="mean_with_sample_weight" is no mean if a weight covers more than one value.
#
# Versions: keras 3.15.1 with jax 0.7.2; Python 3.11 to 3.13.
#
# Behaviour: this reduction divides the sum of the weighted values by the sum of the weights, as they were given. A
# weight of an image, in an array [images, 1, 1], multiplies all pixels of the image, but it is added to the divisor
# once. So the loss of pixels is larger by the number of pixels. With weights of 1, images of 8x8 pixels have 64 times
# the loss of the default reduction, and so do the gradients. Only an array with a weight for each pixel gives the
# mean. An array [images] is aligned with the last axis of the pixels. That is an error, unless there are as many
# images as columns; then its weights are those of columns. With the default reduction, weights of 1 change nothing.
#
# Output seen, the squared error of pixels that are all wrong by 1, weights of 1:
#   no weights                 default 1.0   mean_with_sample_weight 1.0
#   weights [8, 1, 1]          default 1.0   mean_with_sample_weight 64.0
#   weights [8]                default 1.0   mean_with_sample_weight 64.0
#   weights [8, 8, 8]          default 1.0   mean_with_sample_weight 1.0
#
# The script exits with 1 if this behaviour changes.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
"${PYTHON:-python3}" -m venv "$work/env"
"$work/env/bin/pip" install --quiet keras==3.15.1 jax==0.7.2

cat > "$work/loss.py" <<'PY'
import keras
import numpy as np

wrong, right = np.ones((8, 8, 8, 1), np.float32), np.zeros((8, 8, 8, 1), np.float32)
for shape in (None, (8, 1, 1), (8,), (8, 8, 8)):
    weights = None if shape is None else np.ones(shape, np.float32)
    losses = [
        float(keras.losses.MeanSquaredError(reduction=each)(right, wrong, weights))
        for each in ("sum_over_batch_size", "mean_with_sample_weight")
    ]
    print(shape, *losses)
PY

KERAS_BACKEND=jax "$work/env/bin/python" "$work/loss.py" 2> "$work/log" | tee "$work/out"
diff "$work/out" - <<'OUT'
None 1.0 1.0
(8, 1, 1) 1.0 64.0
(8,) 1.0 64.0
(8, 8, 8) 1.0 1.0
OUT
