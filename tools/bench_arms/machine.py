"""The GPUs and the files of the machine that tools/bench.py runs on; needs no TensorFlow.

gpus = gpu_names()              # ["NVIDIA H200", "NVIDIA H200"]
hardware(gpus, num_used=1)      # "1xH200"
environment_of(num_gpus=1)      # the environment of a process that shall see one GPU
"""

import os
import pathlib
import subprocess
import sys
from collections.abc import Sequence

import pynvml

TOOLS = pathlib.Path(__file__).parents[1]
JPEG_SUFFIXES = (".jpg", ".jpeg")


def environment_of(num_gpus: int, *, python: str = sys.executable) -> dict[str, str]:
    """Returns the environment of an arm, which sees some of the GPUs that this process sees.

    Args:
      num_gpus: how many GPUs the arm sees.
      python: the arm's interpreter. If it is not the interpreter of this process, it has its own
        packages and libraries, so LD_LIBRARY_PATH and PYTHONPATH are not inherited. Otherwise its
        torch would load the cuDNN of this process and crash.
    """
    inherited = dict(os.environ)
    if python != sys.executable:
        for name in ("LD_LIBRARY_PATH", "PYTHONPATH"):
            inherited.pop(name, None)
    own = {
        "CUDA_VISIBLE_DEVICES": ",".join(visible_gpus()[:num_gpus]) or "-1",
        "PYTHONPATH": os.pathsep.join(filter(None, [str(TOOLS), inherited.get("PYTHONPATH")])),
    }
    # Level 1 keeps TensorFlow's warnings. They name the GPU that is out of memory if an arm fails.
    return {"TF_CPP_MIN_LOG_LEVEL": "1"} | inherited | own


def visible_gpus() -> list[str]:
    """Returns the GPUs of CUDA_VISIBLE_DEVICES, as it names them; all GPUs if it is not set."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return [str(index) for index in range(len(installed_gpus()))]
    return [] if visible.strip() in ("", "-1") else visible.split(",")


def gpu_names() -> list[str]:
    """Returns the name of each visible GPU, assuming that all GPUs of a host are equal."""
    installed = installed_gpus()
    return [installed[0]] * len(visible_gpus()) if installed else []


def installed_gpus() -> list[str]:
    """Returns the name of each GPU that the driver reports."""
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return []
    try:
        handles = map(pynvml.nvmlDeviceGetHandleByIndex, range(pynvml.nvmlDeviceGetCount()))
        return [pynvml.nvmlDeviceGetName(each) for each in handles]
    finally:
        pynvml.nvmlShutdown()


def hardware(gpus: Sequence[str], *, num_used: int) -> str:
    """Returns a short name of the hardware for file names: "2xH200" or "16-cores"."""
    if not gpus:
        return f"{len(os.sched_getaffinity(0))}-cores"
    return f"{num_used}x{gpus[0].removeprefix('NVIDIA ').replace(' ', '-')}"


def has_torch(python: str) -> bool:
    """Checks whether an interpreter has torch and torchvision, without importing them."""
    return has_packages(python, "torch", "torchvision")


def has_packages(python: str, *names: str) -> bool:
    """Checks whether an interpreter has packages, without importing them."""
    find = f"import importlib.util as i; assert all(map(i.find_spec, {names!r}))"
    try:
        return subprocess.run([python, "-c", find], capture_output=True).returncode == 0
    except OSError:
        return False


def files_below(folder: pathlib.Path, suffixes: tuple[str, ...]) -> tuple[str, ...]:
    """Returns the files with these suffixes, at any depth, sorted.

    Raises:
      ValueError: there are no such files.
    """
    found = (each for each in folder.rglob("*") if each.suffix.lower() in suffixes)
    files = tuple(sorted(str(each.absolute()) for each in found))
    if not files:
        raise ValueError(f"{folder} has no {' or '.join(suffixes)} files at any depth")
    return files
