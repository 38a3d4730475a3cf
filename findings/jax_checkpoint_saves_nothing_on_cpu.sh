#!/usr/bin/env bash
# JAX: on a CPU, jax.checkpoint saves no memory. XLA joins what it computes again with what was computed before.
#
# Version: jax 0.9.0 with jaxlib 0.9.0, Python 3.11 to 3.13.
#
# Behaviour: jax.checkpoint puts an optimization barrier before what the backward pass computes again, so that XLA
# does not join it with the equal operations of the forward pass (prevent_cse=True, the default). The lowered program
# has the barriers and the operations. XLA's compiler for CPUs has a pass, "cse_barrier_expander", that takes the
# barriers away, and then joins equal operations. So the compiled program computes almost nothing again, keeps the
# activations, and needs even a little more memory. XLA's compiler for GPUs keeps the barriers until it has joined
# equal operations. Memory that was measured on a CPU says nothing about jax.checkpoint on a GPU.
#
# Output seen (16 layers tanh(x @ w) of 8,192 x 256 float32, in 4 calls of jax.checkpoint, gradient of the weights):
#   all kept: 16 tanh lowered, 16 compiled, 136 MiB; jax.checkpoint: 28 tanh lowered, 19 compiled, 160 MiB
#
# The script exits with 1 if the compiled program needs less memory with jax.checkpoint, or has all of its operations.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
"${PYTHON:-python3}" -m venv "$work/env"
"$work/env/bin/pip" install --quiet jax==0.9.0 jaxlib==0.9.0

JAX_PLATFORMS=cpu "$work/env/bin/python" - <<'PY'
import re
import sys

import jax
import jax.numpy as jnp

LAYERS, IN_A_CALL = 16, 4


def block(x, weights):
    for each in weights:
        x = jnp.tanh(x @ each)
    return x


def program(wrap):
    """Returns the tanh operations before and after XLA's compiler, and the memory it needs."""

    def loss(weights, x):
        for first in range(0, LAYERS, IN_A_CALL):
            x = wrap(block)(x, weights[first : first + IN_A_CALL])
        return x.sum()

    weights, x = [jnp.ones((256, 256))] * LAYERS, jnp.ones((8192, 256))
    lowered = jax.jit(jax.grad(loss)).lower(weights, x)
    compiled = lowered.compile()
    made = len(re.findall(r" tanh\(", compiled.as_text()))
    mib = compiled.memory_analysis().temp_size_in_bytes / 2**20
    return lowered.as_text().count("stablehlo.tanh"), made, round(mib)


kept, again = program(lambda function: function), program(jax.checkpoint)
for name, (lowered, compiled, mib) in (("all kept", kept), ("jax.checkpoint", again)):
    print(f"{name}: {lowered} tanh lowered, {compiled} compiled, {mib} MiB")
asks = again[0] > kept[0] + LAYERS // 2
sys.exit(0 if asks and again[1] < again[0] and again[2] >= kept[2] else 1)
PY
