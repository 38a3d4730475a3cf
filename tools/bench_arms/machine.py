"""The machine that tools/bench.py runs on and its files, as far as TensorFlow is not needed.

gpus = gpu_names()              # ["NVIDIA H200", "NVIDIA H200"]
hardware(gpus, num_used=1)      # "1xH200"
environment_of(num_gpus=1)      # of a process that is to see one
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
    """Returns the environment of an arm, which sees so many of the GPUs that this process sees.

    Args:
      num_gpus: that it sees.
      python: the arm's interpreter. Another one than this has packages and libraries of its own:
        its torch would end with this one's cuDNN, which LD_LIBRARY_PATH has it find first.
    """
    inherited = dict(os.environ)
    if python != sys.executable:
        for name in ("LD_LIBRARY_PATH", "PYTHONPATH"):
            inherited.pop(name, None)
    own = {
        "CUDA_VISIBLE_DEVICES": ",".join(visible_gpus()[:num_gpus]) or "-1",
        "PYTHONPATH": os.pathsep.join(filter(None, [str(TOOLS), inherited.get("PYTHONPATH")])),
    }
    # With its warnings, TensorFlow says on which GPU memory was full: read where an arm fails.
    return {"TF_CPP_MIN_LOG_LEVEL": "1"} | inherited | own


def visible_gpus() -> list[str]:
    """Returns the GPUs that CUDA_VISIBLE_DEVICES leaves, as it names them."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return [str(index) for index in range(len(installed_gpus()))]
    return [] if visible.strip() in ("", "-1") else visible.split(",")


def gpu_names() -> list[str]:
    """Returns the name of each GPU to be used: all of a host are taken for alike."""
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
    """Returns what a row is run on, short enough for a file's name: "2xH200", "16-cores"."""
    if not gpus:
        return f"{len(os.sched_getaffinity(0))}-cores"
    return f"{num_used}x{gpus[0].removeprefix('NVIDIA ').replace(' ', '-')}"


def has_torch(python: str) -> bool:
    """Returns whether an interpreter has torch and torchvision; imports neither."""
    find = "import importlib.util as i; assert i.find_spec('torch') and i.find_spec('torchvision')"
    try:
        return subprocess.run([python, "-c", find], capture_output=True).returncode == 0
    except OSError:
        return False


def files_below(folder: pathlib.Path, suffixes: tuple[str, ...]) -> tuple[str, ...]:
    """Returns the files of these suffixes, at any depth, sorted.

    Raises:
      ValueError: there are none.
    """
    found = (each for each in folder.rglob("*") if each.suffix.lower() in suffixes)
    files = tuple(sorted(str(each.absolute()) for each in found))
    if not files:
        raise ValueError(f"{folder} has no files named {' or '.join(suffixes)} at any depth")
    return files
