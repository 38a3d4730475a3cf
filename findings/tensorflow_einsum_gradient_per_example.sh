#!/usr/bin/env bash
# TensorFlow: the gradient of an einsum makes a weight's gradient for each example of the batch before it adds them.
#
# Versions: keras 3.15.1 with tensorflow-cpu 2.21.0; jax 0.7.2; Python 3.11 to 3.13.
#
# Behaviour: Keras's MultiHeadAttention projects its input with EinsumDense, "abc,cde->abde". TensorFlow computes the
# kernel's gradient as a batch of matrix products, [batch, c, d * e], and sums them over the batch afterwards, with XLA
# as well. So the memory and the time of this gradient grow with batch * c * d * e, and not with c * d * e: a batch of
# 128 in a ViT-B/16 takes 151 MB in bfloat16 for each of 48 kernels of 1.2 MB. A Dense layer on the same input, which
# computes the same product, has one matrix product over all rows. JAX has one for the einsum, too.
#
# Output seen, batch 64 of 8 rows, 256 in, 4 x 64 out: the largest tensor of the backward pass, in values
#   tensorflow, EinsumDense: 64 x 256 x 256 = 4,194,304; Dense: 64 x 8 x 256 = 131,072; kernel: 256 x 256 = 65,536
#   tensorflow, EinsumDense, after XLA's optimizations: 4,194,304
#   jax, einsum: 131,072
#
# The script exits with 1 if this behaviour changes.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
"${PYTHON:-python3}" -m venv "$work/env"
"$work/env/bin/pip" install --quiet keras==3.15.1 tensorflow-cpu==2.21.0 jax==0.7.2

cat > "$work/sizes.py" <<'PY'
import math
import re

import jax
import jax.numpy as jnp
import keras
import tensorflow as tf

X = (64, 8, 256)


def largest_of_graph(layer):
    """Returns the most values of a tensor in the graph of a layer's backward pass, and XLA's text."""
    layer.build(X)

    def backward(x):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(layer(x) ** 2)
        return tape.gradient(loss, layer.kernel.value)

    graph = tf.function(backward).get_concrete_function(tf.TensorSpec(X)).graph
    sizes = [each.shape.num_elements() or 0 for op in graph.get_operations() for each in op.outputs]
    compiled = tf.function(backward, jit_compile=True).experimental_get_compiler_ir(tf.zeros(X))
    return max(sizes), largest_of_text(compiled(stage="optimized_hlo"))


def largest_of_text(text):
    shapes = re.findall(r"f32\[([\d,]+)\]", text)
    return max(math.prod(map(int, each.split(","))) for each in shapes)


einsum, einsum_in_xla = largest_of_graph(keras.layers.EinsumDense("abc,cde->abde", (None, 4, 64)))
dense, _ = largest_of_graph(keras.layers.Dense(256))


def loss(kernel, x):
    return (jnp.einsum("abc,cde->abde", x, kernel) ** 2).sum()


lowered = jax.jit(jax.grad(loss)).lower(jnp.zeros((256, 4, 64)), jnp.zeros(X))
on_jax = largest_of_text(lowered.compile().as_text())
print(einsum, einsum_in_xla, dense, on_jax)
PY

export CUDA_VISIBLE_DEVICES=-1 TF_CPP_MIN_LOG_LEVEL=3 KERAS_BACKEND=tensorflow
read -r einsum in_xla dense on_jax <<< "$("$work/env/bin/python" "$work/sizes.py" 2> "$work/log" | tail -1)"
echo "tensorflow, EinsumDense: $einsum; after XLA: $in_xla; Dense: $dense; jax, einsum: $on_jax"
[ "$einsum" = 4194304 ] && [ "$in_xla" = 4194304 ] && [ "$dense" = 131072 ] && [ "$on_jax" = 131072 ]
