"""An arm of tools/bench_cifar.py: trains CIFAR-10 with PyTorch, as airbench does.

    python tools/bench_arms/torch_cifar.py --root=/data/cifar10 --precision=half --mode=max-autotune

The method is that of Keller Jordan's cifar10-airbench (github.com/KellerJordan/cifar10-airbench,
legacy/):

- Decoded images are on the GPU as uint8, and a whole epoch is augmented at once. Layouts are
  channels-last.
- The loss is summed, so that half precision needs no other loss scale. Momentum is Nesterov's.
- Everything is compiled on random labels before the clock starts, and the host does not wait for
  the GPU before the end.

This program adds two things: network and loss are compiled together, forwards and backwards, and
the update is fused. Network, augmentations and recipe are those of configs/cifar10.py, which reach
94% on JPEG files. Those of airbench do not.

It prints lines of JSON, each as soon as it is known:

    settings, environment
    decode_seconds          reads and decodes both splits, and copies them to the GPU; this time is
                            in no other figure
    compile_seconds         compiles, lets cuDNN choose kernels, and runs the few steps for that
    test_accuracies         0 to 1, by epoch from 1: the last one, or all with --evaluate-each-epoch
    training_seconds        all epochs with augmentation, and these tests
    epoch_seconds           each epoch with its test
    seconds_to_target       training time until a test reached --target; null if no test did

It needs no TensorFlow.
"""

import argparse
import functools
import itertools
import json
import pathlib
import time

import torch
from torch import nn
from torch.nn import functional

from bench_arms import torch_cifar_images as cifar_images
from bench_arms.torch_arm import DEVICE, environment, peak_memory_mib, wait_for_device
from bench_arms.torch_cifar_network import make_network, mean_with_mirrored

MOMENTUM, RATE, WEIGHT_DECAY = 0.85, 9.0, 0.006  # the rate is for 1,024 images
NESTEROV_SCALE = 1 + 1 / (1 - MOMENTUM)  # airbench divides its rate by this
WARMUP = 0.1  # a share of all epochs
TEST_BATCH = 2000
TRIALS = 3  # CUDA graphs are recorded in the second trial

# The dtype of images and of autocast convolutions. With "half", weights are float16 too.
DTYPES = {
    "half": torch.float16,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "float32": torch.float32,
}


def main() -> None:
    """Decodes, compiles, trains and tests."""
    options = parse()
    torch.manual_seed(options.seed)
    torch.backends.cudnn.benchmark = True
    torch.set_float32_matmul_precision("high")  # TF32 for operations in float32
    say(settings=vars(options), environment=environment("torch", "torchvision"))

    began = time.perf_counter()
    class_names = cifar_images.class_names_in(options.root / "train")
    train, test = (
        cifar_images.read(options.root / split, class_names, DEVICE) for split in ("train", "test")
    )
    wait_for_device()
    say(decode_seconds=time.perf_counter() - began)

    began = time.perf_counter()
    run = Training(options, train, test, num_classes=len(class_names))
    run.compile()
    wait_for_device()
    say(compile_seconds=time.perf_counter() - began, steps_per_epoch=run.epoch_steps)
    say(**run.train(), peak_memory_mib=peak_memory_mib())


def parse() -> argparse.Namespace:
    """Parses the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--root", type=pathlib.Path, required=True, help="has train/<class>/*.jpg and test/")
    add("--epochs", type=int, default=130)
    add("--batch", type=int, default=1024, help="images of a step")
    add("--precision", choices=DTYPES, default="bfloat16", help="half: float16 weights too")
    add("--mode", default="default", help='the mode of torch.compile; "eager" to compile nothing')
    add(
        "--evaluate-each-epoch",
        action="store_true",
        help="test after each epoch, not only the last",
    )
    add("--target", type=float, default=0.94, help="the test accuracy to reach")
    add("--width", type=float, default=1.0, help="scales the network's channels; for tests")
    add("--seed", type=int, default=0)
    return parser.parse_args()


def say(**values) -> None:
    """Prints a line of JSON."""
    print(json.dumps(values, default=str), flush=True)


class Training:
    """A network, its data on the device, and the compiled parts that train and test it.

    Attributes:
      network: the network, which is in training mode between calls.
      epoch_steps: the number of steps in an epoch; the images of a partial batch are left out.
    """

    def __init__(self, options, train, test, *, num_classes: int):
        """Takes both splits, as torch_cifar_images.read returns them."""
        self._options = options
        self._images, self._labels = train
        device, dtype = self._images.device, DTYPES[options.precision]
        self._test = cifar_images.unpadded(test[0], dtype), test[1]
        self.epoch_steps = len(self._images) // options.batch
        if self.epoch_steps == 0:
            raise SystemExit(
                f"--batch={options.batch} is more than the {len(self._images)} images; use "
                f"--batch={len(self._images)} or less"
            )
        self.network = make_network(width=options.width, num_classes=num_classes).to(device)
        if options.precision == "half":
            _halve(self.network)
        self._augmented = _compiled(cifar_images.augmented, options, mode="default")
        self._augmented = functools.partial(
            self._augmented, batch=options.batch, num_classes=num_classes, dtype=dtype
        )
        is_cast = options.precision in ("float16", "bfloat16")

        def loss_of(images, targets):
            with torch.autocast(device.type, dtype, enabled=is_cast):
                logits = self.network(images)
            return functional.cross_entropy(logits.float(), targets, reduction="sum")

        def num_right(images, labels):
            with torch.no_grad(), torch.autocast(device.type, dtype, enabled=is_cast):
                logits = mean_with_mirrored(self.network, images)
            return (logits.argmax(1) == labels).sum()

        self._loss_of, self._num_right = (_compiled(each, options) for each in (loss_of, num_right))
        self._optimizer = make_optimizer(self.network, options.batch, device.type)

    def compile(self) -> None:
        """Compiles everything by a few steps on random labels, and then restores the weights."""
        before = {name: each.clone() for name, each in self.network.state_dict().items()}
        labels, self._labels = self._labels, self._labels[torch.randperm(len(self._labels))]
        for epoch in range(TRIALS):
            images, targets = self._epoch(epoch, torch.rand(len(labels)).to(labels.device) < 0.5)
            for step in range(min(TRIALS, self.epoch_steps)):
                self._step(images[step], targets[step], rate=0.01)
            self.test()
        self._labels = labels
        self.network.load_state_dict(before)
        self._optimizer.state.clear()

    def train(self) -> dict:
        """Trains all epochs, waits for the device at the end, and returns the figures."""
        options, marks, counts = self._options, [_mark()], {}
        first_mirrored = torch.rand(len(self._labels), device=self._labels.device) < 0.5
        for epoch in range(options.epochs):
            images, targets = self._epoch(epoch, first_mirrored)
            for step in range(self.epoch_steps):
                rate = rate_at(epoch * self.epoch_steps + step, options.epochs * self.epoch_steps)
                self._step(images[step], targets[step], rate=rate)
            if options.evaluate_each_epoch or epoch == options.epochs - 1:
                counts[epoch + 1] = self.test()
            marks.append(_mark())
        wait_for_device()
        num_images = len(self._test[1])
        accuracies = {epoch: count.item() / num_images for epoch, count in counts.items()}
        return timed(marks, accuracies, options.target)

    def test(self) -> torch.Tensor:
        """Returns the number of test images that are recognised, without waiting for the device."""
        self.network.eval()
        parts = zip(*(each.split(TEST_BATCH) for each in self._test), strict=True)
        # With CUDA graphs, the next call overwrites the result of a call, so it is cloned.
        right = torch.stack([self._num_right(*each).clone() for each in parts]).sum()
        self.network.train()
        return right

    def _epoch(self, epoch: int, first_mirrored):
        draws = cifar_images.draw(first_mirrored, epoch=epoch, batch=self._options.batch)
        return self._augmented(self._images, self._labels, draws)

    def _step(self, images, targets, *, rate: float):
        for group in self._optimizer.param_groups:
            group["lr"] = rate / NESTEROV_SCALE / 1024
        self._loss_of(images, targets).backward()
        self._optimizer.step()
        self._optimizer.zero_grad(
            set_to_none=True
        )  # now, because the next call of a CUDA graph overwrites the gradients


def make_optimizer(network: nn.Module, batch: int, device: str) -> torch.optim.Optimizer:
    """Returns fused SGD with Nesterov momentum; kernels decay, biases and batch norm do not.

    The loss is a sum, so the rate is that of a mean divided by 1,024. Keras applies weight decay
    after the momentum. PyTorch applies it before, which makes it 1 / (1 - MOMENTUM) times as large,
    so the decay is scaled by 1 - MOMENTUM.
    """
    kernels = [each for each in network.parameters() if each.ndim > 1]
    others = [each for each in network.parameters() if each.ndim <= 1]
    decay = WEIGHT_DECAY * batch * (1 - MOMENTUM)
    groups = [
        {"params": kernels, "weight_decay": decay},
        {"params": others, "weight_decay": 0.0},
    ]
    return torch.optim.SGD(groups, lr=1.0, momentum=MOMENTUM, nesterov=True, fused=True)


def rate_at(step: int, num_steps: int) -> float:
    """Returns the learning rate: it rises for a tenth of the steps, then falls linearly to 0."""
    warmup_steps = round(WARMUP * num_steps)
    if step < warmup_steps:
        return RATE * (step + 1) / warmup_steps
    return RATE * (num_steps - step) / (num_steps - warmup_steps)


def timed(marks: list, accuracies: dict[int, float], target: float) -> dict:
    """Returns the figures of a training.

    Args:
      marks: the points in time of the start and of the end of each epoch.
      accuracies: test accuracies by epoch, from 1.
      target: the test accuracy to reach.
    """
    ends = [_seconds(marks[0], each) for each in marks]
    reached = next((epoch for epoch, each in accuracies.items() if each >= target), None)
    return {
        "test_accuracies": accuracies,
        "test_accuracy": list(accuracies.values())[-1],
        "training_seconds": ends[-1],
        "epoch_seconds": [b - a for a, b in itertools.pairwise(ends)],
        "epochs_to_target": reached,
        "seconds_to_target": None if reached is None else ends[reached],
    }


def _mark():
    """Returns a point in time in the device's work, without waiting for the device."""
    if not torch.cuda.is_available():
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def _seconds(first, last) -> float:
    return last - first if isinstance(first, float) else first.elapsed_time(last) / 1000


def _compiled(function, options, *, mode: str | None = None):
    if options.mode == "eager":
        return function
    return torch.compile(function, mode=mode or options.mode, dynamic=False)


def _halve(network: nn.Module) -> None:
    network.half()
    for layer in network.modules():
        if isinstance(layer, nn.BatchNorm2d):
            layer.float()


if __name__ == "__main__":
    main()
