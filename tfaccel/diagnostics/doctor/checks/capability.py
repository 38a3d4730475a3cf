"""Checks whether TensorFlow has code for a GPU, and says what happens on a newer one.

check(gpu, packages.build)    # None if the GPU is supported

A kernel that is compiled for compute capability 8.0 also runs on 8.6 and 8.9, but not on 9.0. PTX
of 9.0 is text, which the driver compiles for any newer GPU:
https://docs.nvidia.com/cuda/cuda-c-programming-guide/#application-compatibility
"""

import re
from collections.abc import Sequence

from tfaccel.diagnostics.doctor.facts.gpus import Gpu
from tfaccel.diagnostics.doctor.facts.packages import Build
from tfaccel.diagnostics.doctor.table import Finding, error, warning

Capability = tuple[int, int]

# The first CUDA whose compiler knows the GPUs of a major compute capability.
FIRST_CUDA = {10: "12.8", 11: "13.0", 12: "12.8"}
# TensorFlow says so when it starts: "which could take 30 minutes or longer".
LONGEST = "30 minutes or more"
OTHER_GPU = "choose another GPU with CUDA_VISIBLE_DEVICES"


def check(gpu: Gpu, build: Build | None) -> Finding | None:
    """Returns a fault if TensorFlow has no compiled kernels for the GPU."""
    compiled, texts = _of(build)
    own = gpu.capability
    if not compiled or any(each[0] == own[0] and each[1] <= own[1] for each in compiled):
        return None
    has = f"GPU {gpu.index}, {gpu.name}, has compute capability {dotted(own)}"
    if own < min(compiled):
        requires = f"{has}; TensorFlow requires {dotted(min(compiled))} or more"
        return error("GPUs", requires, "exclude it with CUDA_VISIBLE_DEVICES")
    newest = dotted(max(each for each in compiled if each < own))
    fix = f"{OTHER_GPU}, or {_build_it(own)}"
    if not any(each <= own for each in texts):
        return error("GPUs", f"{has}; TensorFlow has no kernels that run on it", fix)
    # tensorflow issues 99592 and 101746: 2.19 and 2.20 on compute capability 12.0.
    return warning(
        "GPUs",
        f"{has}, but the kernels of this TensorFlow are for GPUs up to {newest}; the driver "
        f"compiles them again when a run first uses them, which takes {LONGEST}, and some kernels "
        "may fail with CUDA_ERROR_INVALID_PTX",
        f"{fix}; to keep what the driver compiled, export CUDA_CACHE_MAXSIZE=4294967296",
    )


def dotted(capability: Capability) -> str:
    """Returns a compute capability as people write it: 9.0."""
    return ".".join(map(str, capability))


def _of(build: Build | None) -> tuple[Sequence[Capability], Sequence[Capability]]:
    """Returns the compute capabilities of the compiled kernels, and those of the PTX."""
    compiled, texts = [], []
    for name in build.capabilities if build else ():
        if match := re.fullmatch(r"(sm|compute)_(\d+)(\d)", name):
            capability = int(match[2]), int(match[3])
            compiled.append(capability)  # "compute_90" stands for both
            if match[1] == "compute":
                texts.append(capability)
    return compiled, texts


def _build_it(capability: Capability) -> str:
    cuda = FIRST_CUDA.get(capability[0])
    toolkit = f"CUDA {cuda} or newer" if cuda else "a CUDA that knows this GPU"
    name = f"sm_{capability[0]}{capability[1]}"
    return f"build TensorFlow with {toolkit} and HERMETIC_CUDA_COMPUTE_CAPABILITIES={name}"
