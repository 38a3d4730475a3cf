"""Shows the kernels that XLA makes of a training step on an H100, on a machine without a GPU.

The program traces the step of a network of tools/bench_arms/networks.py with tfaccel's layers, and
has it compiled for an H100 by the CUDA plugin of JAX, which needs no GPU for that. It prints the
bytes that the kernels move, and the largest kernels. So you can see within a minute what a change
does to layouts and fusions. It needs an environment with JAX, which is not one of tfaccel's:

    uv venv /tmp/jax && uv pip install --python /tmp/jax/bin/python "jax[cuda12]==0.9.0"
    uv run python tools/gpu_program.py vit_b16 --jax-python=/tmp/jax/bin/python --blocks=2

XLA there is not that of TensorFlow, and it chooses without measuring: matrix products are Triton's
here, and often cuBLAS's on a GPU. What was compared was alike: a ViT-B/16 had the same layouts and
the same kernels beside its products in a dump from an H200 (TensorFlow 2.21, 2026-11-28).

The step is on one replica, without loss scale and clipping, in mixed_bfloat16. Its attention is the
flash kernels' unless --no-flash is given. Exit codes: 0 done; 1 JAX failed; 2 a mistake in the
call.
"""

import argparse
import collections
import dataclasses
import math
import os
import pathlib
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence

from bench_arms import networks

BYTES = {"f64": 8, "s64": 8, "u64": 8, "f32": 4, "s32": 4, "u32": 4, "bf16": 2, "f16": 2}
BYTES |= {"pred": 1, "s8": 1, "u8": 1, "s16": 2, "u16": 2}
SHAPE = re.compile(rf"\b({'|'.join(BYTES)})\[([\d,]*)\]")
INSTRUCTION = re.compile(r"\s+(?:ROOT )?%?([\w.\-]+) = (\(.*?\)|\S+) ([\w\-]+)\((.*)$")
NO_KERNELS = {"parameter", "constant", "tuple", "get-tuple-element", "bitcast", "while"}
NO_KERNELS |= {"conditional", "call", "after-all", "copy-done"}
# What is known of the GPU without one: XLA's GpuTargetConfig of an H100 SXM.
H100 = """gpu_device_info {
  threads_per_block_limit: 1024 threads_per_warp: 32 shared_memory_per_block: 49152
  shared_memory_per_core: 233472 threads_per_core_limit: 2048 core_count: 132 fpus_per_core: 128
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  memory_bandwidth: 3352320000000 l2_cache_size: 52428800 clock_rate_ghz: 1.98
  device_memory_size: 84942979072 shared_memory_per_block_optin: 232448
  cuda_compute_capability { major: 9 minor: 0 feature_extension: ACCELERATED_FEATURES }
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
}
platform_name: "CUDA" dnn_version_info { major: 9 minor: 8 patch: 0 }
runtime_version { major: 12 minor: 9 } device_description_str: "NVIDIA H100 80GB HBM3"
"""
# Runs in JAX's environment: the serialized HLO, and the target.
COMPILE = """
import pathlib, sys
import jax_plugins.xla_cuda12 as plugin
from jax._src.interpreters import mlir
from jax._src.lib import xla_client
from jax._src.lib.mlir import ir
from jaxlib import _jax

(library,) = pathlib.Path(plugin.__path__[0]).glob("*.so")
api = xla_client.load_pjrt_plugin_dynamically("cuda", str(library))
xla_client.initialize_pjrt_plugin("cuda")
target = pathlib.Path(sys.argv[2]).read_text()
topology = xla_client.make_c_api_device_topology(
    api, "h100", target_config=target, topology="1x1x1"
)
devices = tuple(topology._make_compile_only_devices())
text = _jax.mlir.hlo_to_stablehlo(pathlib.Path(sys.argv[1]).read_bytes())
with mlir.make_ir_context():
    module = ir.Module.parse(text)
options = xla_client.CompileOptions()
options.num_replicas = options.num_partitions = 1
devices[0].client.compile(module, _jax.DeviceList(devices), options)
"""


def main(arguments: Sequence[str]) -> int:
    """Prints the tables; returns the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("network", choices=networks.NETWORKS)
    parser.add_argument("--jax-python", required=True, help="the Python interpreter that has JAX")
    parser.add_argument("--blocks", type=int, help="instead of the network's")
    parser.add_argument("--batch", type=int, help="instead of the network's")
    parser.add_argument("--no-flash", action="store_true", help="the attention is Keras's")
    parser.add_argument("--remat", help="as StepConfig.remat: blocks, names of layers, or MiB")
    parser.add_argument("--kernels", type=int, default=30, help="kernels to list (default: 30)")
    parser.add_argument("--keep", type=pathlib.Path, help="a file for the optimized HLO")
    options = parser.parse_args(arguments)
    changes = {"blocks": options.blocks, "batch": options.batch}
    changes = {name: value for name, value in changes.items() if value is not None}
    network = dataclasses.replace(networks.find(options.network, tiny=False), **changes)
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        forecast, program = traced(network, options)
        (folder / "step.pb").write_bytes(program)
        made = compiled(folder, options.jax_python)
    if made is None:
        return 1
    text, report = made
    if options.keep is not None:
        options.keep.write_text(text)
    print(memory(report))
    print(f"tfaccel's forecast of the latter: {forecast / 2**20:,.0f} MiB")
    for line in table(text, options.kernels):
        print(line)
    return 0


def forecast(name: str, remat: str | None = None) -> int:
    """Returns tfaccel's forecast of a network's activations and gradients, in bytes."""
    options = argparse.Namespace(no_flash=False, remat=remat)
    step, inputs = made_step(networks.find(name, tiny=False), options)
    return forecast_of(step.get_concrete_function(*inputs).graph)


def forecast_of(graph) -> int:
    """Returns the same for a traced step."""
    from tfaccel.step.memory.buffers import peak_bytes

    return peak_bytes(graph, graph.outputs, xla=True, on_gpu=True)


def traced(network: networks.Network, options: argparse.Namespace) -> tuple[int, bytes]:
    """Returns the forecast of a step, and its HLO, serialized, as TensorFlow gives it to XLA."""
    from tensorflow.compiler.xla.service import hlo_pb2

    step, inputs = made_step(network, options)
    estimate = forecast_of(step.get_concrete_function(*inputs).graph)
    made = step.experimental_get_compiler_ir(*inputs)(stage="hlo_serialized", platform_name="CPU")
    module = hlo_pb2.HloModuleProto.FromString(made)
    for computation in module.computations:
        for each in computation.instructions:
            if each.opcode == "copy":  # StableHLO has none; in the same shape it does nothing
                each.opcode = "reshape"
    return estimate, module.SerializeToString()


def made_step(network: networks.Network, options: argparse.Namespace) -> tuple:
    """Returns a step as a `tf.function`, and the specs of its batch."""
    import keras
    import tensorflow as tf
    from bench_arms import keras_networks, ours_networks
    from tensorflow.compiler.tf2xla.python import xla

    from tfaccel.config import StepConfig
    from tfaccel.keras_internals.joined_kernels import joined_updates
    from tfaccel.keras_internals.layer_paths import layer_paths
    from tfaccel.step.attention.choose import Attentions
    from tfaccel.step.depthwise.choose import Depthwises
    from tfaccel.step.gelu.choose import Gelus
    from tfaccel.step.layer_norm.choose import LayerNorms
    from tfaccel.step.remat.choose import Remat

    call_module = xla.call_module  # of modules for CUDA, which are traced on the CPU here
    xla.call_module = lambda *a, **k: call_module(*a, **{**k, "disabled_checks": ["platform"]})
    keras.mixed_precision.set_global_policy("mixed_bfloat16")
    model = keras_networks.build(network)
    optimizer, loss = ours_networks.optimizer(network), ours_networks.loss(network)
    optimizer.build(model.trainable_variables)
    attention = None if options.no_flash else Attentions()
    remat = Remat(model, StepConfig(remat=options.remat).remat)

    @tf.function(jit_compile=True, autograph=False)
    def step(x, y):
        quick = layer_paths(
            xla=True,
            all_reduce=None,
            attention=attention,
            gelu=Gelus(),
            depthwise=Depthwises(),
            norm_kernels=LayerNorms(),
            on_gpu=True,
        )
        with quick, remat.in_step(xla=True), tf.GradientTape() as tape:
            if x.dtype == tf.uint8:
                x = tf.cast(x, tf.float32) / 128 - 1
            value = loss(y, model(x, training=True))
            gradients = tape.gradient(value, model.trainable_variables)
            optimizer.apply(joined_updates(gradients), model.trainable_variables)
        return value

    return step, specs(network, tf)


def specs(network: networks.Network, tf) -> tuple:
    """Returns the shapes and dtypes of a batch."""
    batch, size = network.batch, network.size
    if network.kind in ("image", "mask"):
        images = tf.TensorSpec((batch, size, size, 3), tf.uint8)
        mask = tf.TensorSpec((batch, size, size, 1), tf.uint8)
        return images, mask if network.kind == "mask" else tf.TensorSpec((batch,), tf.int32)
    if network.kind == "weights":
        return (tf.TensorSpec((1, 1), tf.float32),) * 2
    tokens = tf.TensorSpec((batch, size), tf.int32)
    return tokens, tokens if network.kind == "next" else tf.TensorSpec((batch,), tf.int32)


def compiled(folder: pathlib.Path, python: str) -> tuple[str, str] | None:
    """Compiles `step.pb` in a folder for an H100.

    Returns:
      The optimized HLO and XLA's report of the memory; None if JAX failed, after its error.
    """
    (folder / "h100.txtpb").write_text(H100)
    (folder / "compile.py").write_text(COMPILE)
    flags = f"--xla_gpu_autotune_level=0 --xla_dump_hlo_as_text --xla_dump_to={folder / 'dump'}"
    own = {"XLA_FLAGS": f"{flags} {os.environ.get('XLA_FLAGS', '')}", "JAX_PLATFORMS": "cpu"}
    command = [python, *(str(folder / each) for each in ("compile.py", "step.pb", "h100.txtpb"))]
    done = subprocess.run(command, env=os.environ | own, capture_output=True, text=True)
    made = [*(folder / "dump").glob("*gpu_after_optimizations.txt")]
    if done.returncode or not made:
        print(f"gpu_program: error: JAX failed:\n{done.stderr[-3000:]}", file=sys.stderr)
        return None
    largest = max(made, key=lambda path: path.stat().st_size)
    report = largest.with_name(f"{largest.stem}-memory-usage-report.txt")
    return largest.read_text(), report.read_text()


def memory(report: str) -> str:
    """Returns a line with the memory that a program needs."""
    total = int(re.search(r"Total bytes used: (\d+)", report)[1]) / 2**20
    number, unit = re.search(r"size ([\d.]+)([KMG])iB, preallocated-temp", report).groups()
    own = float(number) * {"K": 2**-10, "M": 1, "G": 2**10}[unit]
    return f"{total:,.0f} MiB of memory, {own:,.0f} of them for activations and gradients"


def table(text: str, num_kernels: int) -> Iterator[str]:
    """Yields the lines of the tables."""
    sums, groups = collections.Counter(), {}
    for name, shape, opcode, source, operands in kernels(text):
        size = size_of(shape) + sum(map(size_of, operands))
        kind = "products" if "gemm" in name or "dot" in opcode else "other kernels"
        kind = "calls (cuDNN, cuBLAS)" if opcode == "custom-call" else kind
        sums[kind] += size
        sums[f"number of {kind}"] += 1
        plain = re.sub(r"\{[^}]*\}", "", " ".join(operands))
        group = groups.setdefault((source, shape), [0, 0, name, plain])
        group[0] += size
        group[1] += 1
    for kind in [each for each in sums if not each.startswith("number")]:
        yield f"{sums[kind] / 1e9:8.2f} GB in {sums[f'number of {kind}']:5d} {kind}"
    yield "the most bytes: GB, kernels, a kernel's name, TensorFlow's operation, result, operands"
    largest = sorted(groups.items(), key=lambda each: -each[1][0])[:num_kernels]
    for (source, shape), (size, number, name, operands) in largest:
        result = re.sub(r"\{[^}]*\}", "", shape)
        line = f"{size / 1e9:8.2f} {number:4d} {name:32s} {source[-50:]} {result} <- {operands}"
        yield line[:300]


def kernels(text: str) -> Iterator[tuple[str, str, str, str, list[str]]]:
    """Yields name, result, opcode, source and operands of each kernel of the step's computation.

    The step's computation is the one that calls the most kernels. Of an operand that a kernel only
    gathers from, the shape is what it gathers.
    """
    computations = re.split(r"^(?=(?:ENTRY )?%?[\w.\-]+ .*\{$)", text, flags=re.MULTILINE)
    names = [re.match(r"(?:ENTRY )?%?([\w.\-]+) ", each) for each in computations]
    fused = {name[1]: text for name, text in zip(names, computations, strict=True) if name}
    step = max(computations, key=lambda each: len(re.findall(r" (?:fusion|custom-call)\(", each)))
    found = [match.groups() for line in step.splitlines() if (match := INSTRUCTION.match(line))]
    shapes = {name: shape for name, shape, _, _ in found}
    for name, shape, opcode, rest in found:
        if opcode in NO_KERNELS:
            continue
        given = operands_of(rest)
        calls = re.search(r"calls=%?([\w.\-]+)", rest)
        read = gathered(fused.get(calls[1], "")) if calls else {}
        source = re.search(r'op_name="([^"]*)"', rest)
        plain = re.sub(r"[\d.]+", "#", source[1]) if source else ""  # all layers are one
        sizes = [read.get(at, shapes.get(each)) for at, each in enumerate(given)]
        yield name, shape, opcode, plain, [each for each in sizes if each is not None]


def operands_of(rest: str) -> list[str]:
    """Returns the names of an instruction's operands; `rest` is what follows its "("."""
    return re.findall(r"%([\w.\-]+)", rest.split("), ")[0])


def gathered(computation: str) -> dict[int, str]:
    """Returns the shapes that a fused computation gathers from its parameters, by their numbers.

    A parameter that is also used otherwise is not among them.
    """
    found = [
        match.groups() for line in computation.splitlines() if (match := INSTRUCTION.match(line))
    ]
    users = collections.defaultdict(list)
    for name, shape, opcode, rest in found:
        for at, each in enumerate(operands_of(rest)):
            users[each].append((name, shape, opcode, at))
    shapes = {}
    for name, shape, opcode, rest in found:
        if opcode != "parameter":
            continue
        uses, ends = [*users[name]], []
        while uses:
            user, *end = uses.pop()
            if end[1] in ("convert", "bitcast"):
                uses += users[user]
            else:
                ends.append(end)
        if ends and all(end[1:] == ["gather", 0] for end in ends):
            dtype = shape.partition("[")[0]
            shapes[int(rest.partition(")")[0])] = " ".join(
                f"{dtype}[{end[0].partition('[')[2]}" for end in ends
            )
    return shapes


def size_of(shape: str) -> int:
    """Returns the bytes of a shape in HLO's text, of all parts of a tuple."""
    parts = SHAPE.findall(shape)
    return sum(BYTES[d] * math.prod(int(n) for n in axes.split(",") if n) for d, axes in parts)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
