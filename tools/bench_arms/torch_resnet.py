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

import torch
import torchvision

from bench_arms import protocol, torch_arm
from bench_arms.torch_arm import DEVICE

NUM_CLASSES = 1000


def begin(settings: dict) -> protocol.Arm:
    """Makes the network and the batches, and trains the first steps."""
    torch_arm.choose_quick_settings()
    batches = make_batches(settings)
    step = make_step(settings)

    def rates(seconds):
        return {"images_per_second": settings["steps"] * settings["batch"] / seconds}

    environment = torch_arm.environment("torch", "torchvision")
    return torch_arm.timed(settings, step, batches, rates=rates, environment=environment)


def make_batches(settings: dict) -> list[tuple]:
    """Returns random batches of images and labels, on the device."""
    shape = (settings["batch"], 3, settings["image_size"], settings["image_size"])
    dtype = getattr(torch, settings["dtype"])
    return [
        (
            torch.randn(shape, device=DEVICE).to(dtype, memory_format=torch.channels_last),
            torch.randint(NUM_CLASSES, shape[:1], device=DEVICE),
        )
        for _ in range(torch_arm.NUM_BATCHES)
    ]


def make_step(settings: dict):
    """Returns a function that trains one step on a batch."""
    names = {name.replace("_", ""): name for name in torchvision.models.list_models()}
    name = names[settings["model"].replace("_", "").lower()]
    model = torchvision.models.get_model(name, weights=None, num_classes=NUM_CLASSES)
    model = model.to(DEVICE, memory_format=torch.channels_last).train()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9, fused=True)

    def loss_of(images, labels):
        return torch.nn.functional.cross_entropy(model(images), labels)

    dtype = getattr(torch, settings["dtype"])
    return torch_arm.compiled_step(loss_of, optimizer, dtype, settings["mode"])


if __name__ == "__main__":
    protocol.serve(begin)
