"""What the arms of PyTorch share: quick settings, the timed loop, and their figures.

    torch_arm.choose_quick_settings()
    step = torch_arm.compiled_step(loss_of, optimizer, dtype, mode)
    return torch_arm.timed(settings, step, batches, rates=rates, environment=environment("torch"))

It needs no TensorFlow.
"""

import importlib
import os
import platform
import time
from collections.abc import Callable, Sequence

import torch

from bench_arms import protocol

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
NUM_BATCHES = 4  # the batches that the steps use in turn


def choose_quick_settings() -> None:
    """Lets operations in float32 use TF32, and cuDNN search for the quickest kernels."""
    torch.manual_seed(0)
    torch.backends.cudnn.benchmark = True
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = True


def compiled_step(
    loss_of: Callable, optimizer: torch.optim.Optimizer, dtype: torch.dtype, mode: str
) -> Callable:
    """Returns a function that trains one step on a batch: inputs and targets.

    Args:
      loss_of: a function of inputs and targets that returns the loss. It is compiled as a whole.
      optimizer: the optimizer of the network's weights.
      dtype: the dtype of autocasting; float16 has a loss scale.
      mode: the mode of torch.compile.
    """
    scaler = torch.amp.GradScaler(DEVICE, enabled=dtype == torch.float16)

    def autocast_loss_of(inputs, targets):
        with torch.autocast(DEVICE, dtype):
            return loss_of(inputs, targets)

    compiled = torch.compile(autocast_loss_of, mode=mode)

    def step(inputs, targets):
        optimizer.zero_grad(set_to_none=True)
        scaler.scale(compiled(inputs, targets)).backward()
        scaler.step(optimizer)
        scaler.update()

    return step


def timed(
    settings: dict,
    step: Callable,
    batches: Sequence[tuple],
    *,
    rates: Callable[[float], dict],
    **facts,
) -> protocol.Arm:
    """Trains the first steps, and returns an arm that times a stretch on each request.

    Args:
      settings: has the untimed and the timed steps of each stretch, `drop` and `steps`, and the
        time at which the arm was `started`. With "first_steps" it trains so many, and gives the
        time after each "steps_of_mark" as `marks`, as timed_fit.start_arm does.
      step: trains one step on a batch, and need not wait for the device.
      batches: the batches on the device, which the steps use in turn.
      rates: a function of the seconds of a stretch that returns its figures.
      **facts: what else is known once the arm is set up, for the record.
    """

    def train(num_steps):
        for index in range(num_steps):
            step(*batches[index % len(batches)])
        wait_for_device()

    def stretch():
        train(settings["drop"])
        began = time.perf_counter()
        train(settings["steps"])
        seconds = time.perf_counter() - began
        return rates(seconds) | {
            "seconds": seconds,
            "timed_steps": settings["steps"],
            "peak_memory_mib": peak_memory_mib(),
        }

    train(1)
    first_step = time.time() - settings["started"]
    if settings.get("first_steps"):
        marks = [(1, first_step)]
        while marks[-1][0] < settings["first_steps"]:
            train(settings["steps_of_mark"])
            done = marks[-1][0] + settings["steps_of_mark"]
            marks.append((done, time.time() - settings["started"]))
        facts["marks"] = marks
    else:
        train(settings["drop"])
    ready = {
        "settings": settings,
        "seconds_to_first_step": first_step,
        "peak_memory_mib": peak_memory_mib(),
    }
    return protocol.Arm(ready | facts, stretch)


def wait_for_device() -> None:
    """Waits until all steps are done."""
    if DEVICE == "cuda":
        torch.cuda.synchronize()


def peak_memory_mib() -> float | None:
    """Returns the peak memory of tensors on the GPU; None on the CPU."""
    return torch.cuda.max_memory_allocated() / 2**20 if DEVICE == "cuda" else None


def environment(*packages: str) -> dict:
    """Returns hardware and versions, among them those of these packages."""
    versions = {name: importlib.import_module(name).__version__ for name in packages}
    return {
        "python": platform.python_version(),
        "packages": versions,
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version(),
        "cpu_cores": len(os.sched_getaffinity(0)),
        "gpus": [{"name": torch.cuda.get_device_name()}] if DEVICE == "cuda" else [],
    }
