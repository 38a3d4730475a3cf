#!/usr/bin/env bash
# XLA for NVIDIA GPUs: a matrix product that is added to a residual copies the residual first, if it has three axes.
#
# Versions: jax and jaxlib 0.9.0 with jax-cuda12-plugin 0.9.0; Python 3.11 to 3.13. No GPU is needed: the program is
# compiled for an H100 on a CPU, with all products given to cuBLAS.
#
# Behaviour: a block of a transformer computes y = x + h W and later reads x again. XLA lets cuBLAS add the product to a
# matrix that it overwrites. If x has two axes, XLA sees that x has another reader, and adds in a kernel of its own. If x
# has three axes, [batch, rows, columns], XLA makes a matrix of it, which has one reader, the product. So it lets the
# product overwrite this matrix, and then has to copy x before, because the memory is the same. The sum is right, but x
# is read and written once more. In a ViT-B/16 there are 24 such copies a step.
#
# Output seen:
#   3 axes: 1 copies, 1 products that overwrite their residual
#   2 axes: 0 copies, 0 products that overwrite their residual
#
# The script exits with 1 if this behaviour changes.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
"${PYTHON:-python3}" -m venv "$work/env"
"$work/env/bin/pip" install --quiet jax==0.9.0 jaxlib==0.9.0
"$work/env/bin/pip" install --quiet --no-deps jax-cuda12-plugin==0.9.0 jax-cuda12-pjrt==0.9.0

cat > "$work/copies.py" <<'PY'
import os
import pathlib
import re
import sys

os.environ["XLA_FLAGS"] = "--xla_gpu_enable_triton_gemm=false"
os.environ["JAX_PLATFORMS"] = "cpu"

import jax
import jax.numpy as jnp
import jax_plugins.xla_cuda12 as plugin
from jax._src.lib import xla_client
from jax.sharding import SingleDeviceSharding

H100 = """gpu_device_info {
  threads_per_block_limit: 1024 threads_per_warp: 32 shared_memory_per_block: 49152
  shared_memory_per_core: 233472 threads_per_core_limit: 2048 core_count: 132 fpus_per_core: 128
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  memory_bandwidth: 3352320000000 l2_cache_size: 52428800 clock_rate_ghz: 1.98
  device_memory_size: 84942979072 shared_memory_per_block_optin: 232448
  cuda_compute_capability { major: 9 minor: 0 } registers_per_core_limit: 65536 registers_per_block_limit: 65536
}
platform_name: "CUDA" dnn_version_info { major: 9 minor: 8 patch: 0 } runtime_version { major: 12 minor: 9 }
device_description_str: "NVIDIA H100 80GB HBM3"
"""

(library,) = pathlib.Path(plugin.__path__[0]).glob("*.so")
api = xla_client.load_pjrt_plugin_dynamically("cuda", str(library))
xla_client.initialize_pjrt_plugin("cuda")
topology = xla_client.make_c_api_device_topology(api, "h100", target_config=H100, topology="1x1x1")
h100 = SingleDeviceSharding(topology._make_compile_only_devices()[0])


def block(h, w):
    x = jnp.sin(h)
    y = x + jnp.matmul(jnp.tanh(h), w)
    return y, x * jnp.cos(y)  # x is the residual, and read again, as a gradient reads it


def counts(shape):
    array = jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=h100)
    weight = jax.ShapeDtypeStruct((256, 256), jnp.bfloat16, sharding=h100)
    text = jax.jit(block).lower(array, weight).compile().as_text()
    copies = len(re.findall(r" copy\(", text))
    overwriting = len(re.findall(r"cublas\$gemm.*output_to_operand_aliasing", text))
    print(f"{len(shape)} axes: {copies} copies, {overwriting} products that overwrite their residual")
    return copies, overwriting


three, two = counts((8, 128, 256)), counts((1024, 256))
sys.exit(not (three[0] >= 1 and three[1] >= 1 and two == (0, 0)))
PY
"$work/env/bin/python" "$work/copies.py" 2> "$work/log" || { tail -5 "$work/log" >&2; exit 1; }
