"""Variables of the environment that change what a run does.

check(os.environ, num_gpus=2, num_visible=1)
"""

import pathlib
from collections.abc import Callable, Mapping
from typing import NamedTuple

from tfaccel.common.errors import UserError
from tfaccel.diagnostics.doctor.table import Finding, Status, error, warning
from tfaccel.runtime.cluster import tf_config

NAME = "variables"


class Rule(NamedTuple):
    """What one variable does.

    Attributes:
      variable: its name.
      applies: whether this value of it, with so many GPUs, is worth a line.
      status: of that line.
      effect: what it does, in words.
      fix: what to do about it; empty where it may be meant.
    """

    variable: str
    applies: Callable[[str, int], bool]
    status: Status
    effect: str
    fix: str


def _is_on(value: str, num_gpus: int) -> bool:
    return value.lower() in ("1", "true", "yes") and num_gpus > 0


def _is_off(value: str, num_gpus: int) -> bool:
    return value.lower() in ("0", "false", "no") and num_gpus > 0


RULES = (
    Rule(
        "XLA_FLAGS",
        lambda value, _: "xla_dump_" in value,
        "warning",
        "XLA writes out all that it compiles, which is slow and fills disks",
        "unset XLA_FLAGS",
    ),
    Rule(
        "XLA_FLAGS",
        lambda value, _: "xla_dump_" not in value,
        "ok",
        "XLA compiles every run by it",
        "",
    ),
    Rule(
        "TF_XLA_FLAGS",
        lambda value, _: "auto_jit" in value,
        "warning",
        "auto_jit puts into XLA also what tfaccel keeps out of it, sums between GPUs among them",
        "unset TF_XLA_FLAGS; tfaccel compiles its steps by itself",
    ),
    Rule(
        "TF_GPU_ALLOCATOR",
        lambda _, num_gpus: num_gpus > 0,
        "warning",
        "replaces TensorFlow's allocator, to which memory growth and limits belong",
        "unset TF_GPU_ALLOCATOR",
    ),
    Rule(
        "TF_FORCE_GPU_ALLOW_GROWTH",
        _is_off,
        "warning",
        "overrides memory growth: TensorFlow takes all of a GPU, and DALI finds none left",
        "unset TF_FORCE_GPU_ALLOW_GROWTH",
    ),
    Rule(
        "TF_USE_LEGACY_KERAS",
        lambda value, _: value.lower() in ("1", "true"),
        "error",
        "makes tf.keras Keras 2, whose models tfaccel cannot train",
        "unset TF_USE_LEGACY_KERAS",
    ),
    Rule(
        "NVIDIA_TF32_OVERRIDE",
        _is_off,
        "warning",
        "turns TF32 off, whatever runtime.tf32 says",
        "unset NVIDIA_TF32_OVERRIDE",
    ),
    Rule(
        "CUDA_LAUNCH_BLOCKING",
        _is_on,
        "warning",
        "kernels are launched one after another, which is slow",
        "unset CUDA_LAUNCH_BLOCKING",
    ),
    Rule(
        "CUDA_CACHE_DISABLE",
        _is_on,
        "warning",
        "the driver compiles TensorFlow's kernels anew at every start",
        "unset CUDA_CACHE_DISABLE",
    ),
    *(
        Rule(
            name,
            lambda value, num_gpus: value != "0" and num_gpus > 1,
            "warning",
            effect,
            f"unset {name}",
        )
        for name, effect in (
            ("NCCL_P2P_DISABLE", "NCCL goes through the host's memory, not NVLink or PCIe"),
            ("NCCL_SHM_DISABLE", "NCCL goes through the network between processes of one host"),
        )
    ),
)


def check(environment: Mapping[str, str], num_gpus: int, *, num_visible: int) -> list[Finding]:
    """Returns a line for each that matters here.

    Args:
      environment: of this process.
      num_gpus: that the driver has, visible or not.
      num_visible: of them, that CUDA_VISIBLE_DEVICES leaves.
    """
    found = []
    for rule in RULES:
        value = environment.get(rule.variable, "")
        if value and rule.applies(value, num_gpus):
            said = f"{rule.variable}={value}: {rule.effect}"
            found.append(Finding(NAME, rule.status, said, rule.fix))
    visible = _visible_devices(environment.get("CUDA_VISIBLE_DEVICES"), num_gpus, num_visible)
    library_path = _library_path(environment.get("LD_LIBRARY_PATH", ""), num_gpus)
    return [*found, *filter(None, (visible, library_path, _cluster(environment)))]


def _cluster(environment: Mapping[str, str]) -> Finding | None:
    """Returns the line for a TF_CONFIG by which no run would start."""
    try:
        tf_config.claim(environment)
    except UserError as mistake:
        return error(NAME, str(mistake), "mend TF_CONFIG, or unset it")
    return None


def _visible_devices(value: str | None, num_gpus: int, num_visible: int) -> Finding | None:
    if value is None or not num_gpus:
        return None
    said = f"CUDA_VISIBLE_DEVICES={value}"
    chosen = [each.strip() for each in value.split(",")]
    missing = [each for each in chosen if each.isdigit() and int(each) >= num_gpus]
    if missing:
        return error(
            NAME,
            f"{said}, but there is no GPU {missing[0]}: CUDA sees those before it alone",
            f"name GPUs of 0 to {num_gpus - 1}",
        )
    if not num_visible:
        hidden = f"{said} hides all {num_gpus} GPUs: training will run on the CPU"
        return warning(NAME, hidden, "unset CUDA_VISIBLE_DEVICES, unless that is meant")
    return None


def _library_path(value: str, num_gpus: int) -> Finding | None:
    """Returns the line for another CUDA that the loader would find before the wheels' own."""
    if not num_gpus:
        return None
    for folder in filter(None, value.split(":")):
        is_wheel = "/nvidia/" in folder
        there = [
            each
            for name in ("libcudart", "libcudnn", "libcublas", "libnccl")
            for each in sorted(pathlib.Path(folder).glob(f"{name}.so*"))
        ]
        if there and not is_wheel:
            return warning(
                NAME,
                f"LD_LIBRARY_PATH names {folder}, which has {there[0].name}: it may be loaded in "
                "the place of the wheels' own",
                "unset LD_LIBRARY_PATH; tfaccel finds the wheels without it",
            )
    return None
