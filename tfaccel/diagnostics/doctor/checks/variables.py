"""Checks the environment variables that change what a run does.

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
    """The effect of one environment variable.

    Attributes:
      variable: its name.
      applies: takes a value and the number of GPUs; returns whether to report the variable.
      effect: what the variable does, in words.
      status: the status of the reported line.
      hint: text after the fix, which is to unset the variable.
    """

    variable: str
    applies: Callable[[str, int], bool]
    effect: str
    status: Status = "warning"
    hint: str = ""


def _is_on(value: str, num_gpus: int) -> bool:
    return value.lower() in ("1", "true", "yes") and num_gpus > 0


def _is_off(value: str, num_gpus: int) -> bool:
    return value.lower() in ("0", "false", "no") and num_gpus > 0


def _is_not_0(value: str, num_gpus: int) -> bool:
    return value != "0" and num_gpus > 1


RULES = (
    Rule(
        "XLA_FLAGS",
        lambda value, _: "xla_dump_" in value,
        "XLA writes every compiled program to files, which is slow and fills the disk",
    ),
    Rule(
        "XLA_FLAGS",
        lambda value, _: "xla_dump_" not in value,
        "XLA uses these options in every run",
        status="ok",
    ),
    Rule(
        "TF_XLA_FLAGS",
        lambda value, _: "auto_jit" in value,
        "auto_jit compiles everything with XLA, also the all-reduce, which tfaccel keeps out of it",
        hint="; tfaccel chooses what to compile",
    ),
    Rule(
        "TF_GPU_ALLOCATOR",
        lambda _, num_gpus: num_gpus > 0,
        "replaces TensorFlow's allocator, but memory growth and memory limits need that allocator",
    ),
    Rule(
        "TF_FORCE_GPU_ALLOW_GROWTH",
        _is_off,
        "turns memory growth off: TensorFlow takes the whole GPU and leaves no memory for DALI",
    ),
    Rule(
        "TF_USE_LEGACY_KERAS",
        lambda value, _: value.lower() in ("1", "true"),
        "makes tf.keras Keras 2, but tfaccel trains only models of Keras 3",
        status="error",
    ),
    Rule("NVIDIA_TF32_OVERRIDE", _is_off, "turns TF32 off, even if runtime.tf32 turns it on"),
    Rule("CUDA_LAUNCH_BLOCKING", _is_on, "the GPU runs one kernel after another, which is slow"),
    Rule(
        "CUDA_CACHE_DISABLE",
        _is_on,
        "the driver compiles TensorFlow's kernels again at every start",
    ),
    Rule("NCCL_P2P_DISABLE", _is_not_0, "NCCL uses the host's memory, not NVLink or PCIe"),
    Rule("NCCL_SHM_DISABLE", _is_not_0, "NCCL uses the network between processes of one host"),
)


def check(environment: Mapping[str, str], num_gpus: int, *, num_visible: int) -> list[Finding]:
    """Returns one line for each variable that has an effect on this machine.

    Args:
      environment: the environment variables of this process.
      num_gpus: the number of GPUs that the driver has, visible or not.
      num_visible: how many of these GPUs CUDA_VISIBLE_DEVICES leaves visible.
    """
    found = []
    for rule in RULES:
        value = environment.get(rule.variable, "")
        if value and rule.applies(value, num_gpus):
            said = f"{rule.variable}={value}: {rule.effect}"
            fix = "" if rule.status == "ok" else f"unset {rule.variable}{rule.hint}"
            found.append(Finding(NAME, rule.status, said, fix))
    visible = _visible_devices(environment.get("CUDA_VISIBLE_DEVICES"), num_gpus, num_visible)
    library_path = _library_path(environment.get("LD_LIBRARY_PATH", ""), num_gpus)
    return [*found, *filter(None, (visible, library_path, _cluster(environment)))]


def _cluster(environment: Mapping[str, str]) -> Finding | None:
    """Returns an error if TF_CONFIG would stop every run."""
    try:
        tf_config.claim(environment)
    except UserError as mistake:
        return error(NAME, str(mistake), "correct TF_CONFIG, or unset it")
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
            f"{said}, but there is no GPU {missing[0]}; CUDA uses only the GPUs before it",
            f"name GPUs from 0 to {num_gpus - 1}",
        )
    if not num_visible:
        hidden = f"{said} hides all {num_gpus} GPUs, so training will run on the CPU"
        return warning(NAME, hidden, "unset CUDA_VISIBLE_DEVICES, unless this is intended")
    return None


def _library_path(value: str, num_gpus: int) -> Finding | None:
    """Returns a warning if the loader would find another CUDA before the wheels."""
    if not num_gpus:
        return None
    for folder in filter(None, value.split(":")):
        libraries = [
            each
            for name in ("libcudart", "libcudnn", "libcublas", "libnccl")
            for each in sorted(pathlib.Path(folder).glob(f"{name}.so*"))
        ]
        if libraries and "/nvidia/" not in folder:
            return warning(
                NAME,
                f"LD_LIBRARY_PATH names {folder}, which has {libraries[0].name}; TensorFlow may "
                "load it and not the library of the wheel",
                "unset LD_LIBRARY_PATH; tfaccel finds the wheels without it",
            )
    return None
