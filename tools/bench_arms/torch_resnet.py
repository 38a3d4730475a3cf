"""An arm of tools/bench.py: a torchvision network in compiled PyTorch, with data on the device.

It talks to the driver through protocol.py. Layouts are channels-last, operations in float32 use
TF32, and cuDNN searches for the quickest kernels. Network and loss are compiled together. The
momentum optimizer is fused, so that it removes the loss scale without a wait of the host. The
images are on the device, normalised, and in the dtype that the first convolution takes. Settings:

    dtype               the dtype of autocasting: "bfloat16"; or "float16", with a loss scale
    mode                the mode of torch.compile: "default" or "max-autotune"
    model, image_size   a torchvision model, with or without underscores; height and width of its
                        images
    batch               images of a step
    drop, steps         untimed and timed steps of each stretch

It needs no TensorFlow, and may use another installation than the driver.
"""

import os
import platform
import time

import torch
import torchvision

from bench_arms import protocol

NUM_CLASSES = 1000
NUM_BATCHES = 4  # the batches that the steps use in turn


def begin(settings: dict) -> protocol.Arm:
    """Makes the network and the batches, and trains the first steps."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    torch.backends.cudnn.benchmark = True
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = True
    batches = make_batches(settings, device)
    step = make_step(settings, device)
    step(*batches[0])
    wait_for_device()
    first_step = time.time() - settings["started"]

    def train(num_steps):
        for index in range(num_steps):
            step(*batches[index % NUM_BATCHES])
        wait_for_device()

    def stretch():
        train(settings["drop"])
        began = time.perf_counter()
        train(settings["steps"])
        seconds = time.perf_counter() - began
        return {
            "images_per_second": settings["steps"] * settings["batch"] / seconds,
            "seconds": seconds,
            "timed_steps": settings["steps"],
            "peak_memory_mib": peak_memory_mib(),
        }

    train(settings["drop"])
    ready = {
        "settings": settings,
        "environment": environment(),
        "seconds_to_first_step": first_step,
        "peak_memory_mib": peak_memory_mib(),
    }
    return protocol.Arm(ready, stretch)


def make_batches(settings: dict, device: str) -> list[tuple]:
    """Returns random batches of images and labels, on the device."""
    shape = (settings["batch"], 3, settings["image_size"], settings["image_size"])
    dtype = getattr(torch, settings["dtype"])
    return [
        (
            torch.randn(shape, device=device).to(dtype, memory_format=torch.channels_last),
            torch.randint(NUM_CLASSES, shape[:1], device=device),
        )
        for _ in range(NUM_BATCHES)
    ]


def make_step(settings: dict, device: str):
    """Returns a function that trains one step on a batch."""
    names = {name.replace("_", ""): name for name in torchvision.models.list_models()}
    name = names[settings["model"].replace("_", "").lower()]
    model = torchvision.models.get_model(name, weights=None, num_classes=NUM_CLASSES)
    model = model.to(device, memory_format=torch.channels_last).train()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9, fused=True)
    scaler = torch.amp.GradScaler(device, enabled=settings["dtype"] == "float16")
    dtype = getattr(torch, settings["dtype"])

    def loss_of(images, labels):
        with torch.autocast(device, dtype):
            return torch.nn.functional.cross_entropy(model(images), labels)

    loss_of = torch.compile(loss_of, mode=settings["mode"])

    def step(images, labels):
        optimizer.zero_grad(set_to_none=True)
        scaler.scale(loss_of(images, labels)).backward()
        scaler.step(optimizer)
        scaler.update()

    return step


def wait_for_device() -> None:
    """Waits until all steps are done."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def peak_memory_mib() -> float | None:
    """Returns the peak memory of tensors on the GPU; None on the CPU."""
    return torch.cuda.max_memory_allocated() / 2**20 if torch.cuda.is_available() else None


def environment() -> dict:
    """Returns versions and hardware."""
    on_gpu = torch.cuda.is_available()
    return {
        "python": platform.python_version(),
        "packages": {"torch": torch.__version__, "torchvision": torchvision.__version__},
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version(),
        "cpu_cores": len(os.sched_getaffinity(0)),
        "gpus": [{"name": torch.cuda.get_device_name()}] if on_gpu else [],
    }


if __name__ == "__main__":
    protocol.serve(begin)
