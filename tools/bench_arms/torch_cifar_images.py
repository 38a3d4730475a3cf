"""Reads CIFAR-10's files to the GPU, and augments a whole epoch there at once, in a few kernels.

    images, labels = read(root / "train", class_names, device)  # [n, 40, 40, 3] uint8, [n] int64
    augment = torch.compile(augmented)
    epoch = augment(images, labels, draw(...))                  # batches of images, and of targets

The augmentations are those of configs/cifar10.py. Images are shifted by up to 4 pixels, and the new
pixels are black. They are mirrored, and saturation, contrast and brightness vary by up to 0.3 each.
They are normalised. Cutmix (0.4) pastes a box of the next image of the batch. Labels are smoothed
by 0.1. As in airbench, an image is mirrored in every second epoch, and the images of a partial
batch are left out of an epoch.
"""

import pathlib
from collections.abc import Sequence

import torch
import torchvision
from torch.nn import functional

SIDE, SHIFT = 32, 4
MEAN, STD = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)
COLOR, CUTMIX_ALPHA, SMOOTHING = 0.3, 0.4, 0.1
MIDDLE_GREY = 128.0
RGB_TO_GREY = (0.299, 0.587, 0.114)


def class_names_in(root: pathlib.Path) -> list[str]:
    """Returns the sorted names of the subfolders, which are the classes."""
    return sorted(each.name for each in root.iterdir() if each.is_dir())


def read(
    root: pathlib.Path, class_names: Sequence[str], device: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the images of `root/<class>/*.jpg`, with black borders, and their labels.

    One thread decodes 15,000 images a second. More threads are not faster, because of Python's
    global lock.

    Args:
      root: a folder of class folders.
      class_names: the names of the classes, in the order of their labels.
      device: the device for the images and the labels.

    Returns:
      [n, 40, 40, 3] uint8 and [n] int64.
    """
    files = [sorted((root / name).glob("*.jpg")) for name in class_names]
    labels = [label for label, each in enumerate(files) for _ in each]
    decoded = [
        torchvision.io.decode_jpeg(
            torchvision.io.read_file(str(file)), torchvision.io.ImageReadMode.RGB
        )
        for each in files
        for file in each
    ]
    images = torch.stack(decoded).to(device).permute(0, 2, 3, 1)
    images = functional.pad(images, (0, 0, *[SHIFT] * 4)).contiguous()
    return images, torch.tensor(labels, device=device)


def unpadded(images: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Returns normalised images without their borders: [n, 3, 32, 32] channels-last."""
    return _normalised(images[:, SHIFT:-SHIFT, SHIFT:-SHIFT].float()).to(dtype).permute(0, 3, 1, 2)


def draw(first_mirrored: torch.Tensor, *, epoch: int, batch: int) -> dict[str, torch.Tensor]:
    """Returns the random numbers of an epoch, on the device, in the order of its batches.

    Args:
      first_mirrored: [n] bool; True for an image that is mirrored in epochs 0, 2, 4, ...
      epoch: the epoch, from 0.
      batch: images of a step.
    """
    device, num_images = first_mirrored.device, len(first_mirrored)
    rows = num_images // batch * batch
    order = torch.randperm(num_images, device=device)[:rows]
    alpha = torch.tensor(CUTMIX_ALPHA, device=device)
    return {
        "order": order,
        "mirrored": first_mirrored[order] ^ (epoch % 2 == 1),
        "shift": torch.randint(0, 2 * SHIFT + 1, (rows, 2), device=device),
        "color": 1 + COLOR * (2 * torch.rand(rows, 3, device=device) - 1),
        "own part": torch.distributions.Beta(alpha, alpha).sample((rows,)),
        "center": torch.rand(rows, 2, device=device),
    }


def augmented(
    images: torch.Tensor,
    labels: torch.Tensor,
    draws: dict[str, torch.Tensor],
    *,
    batch: int,
    num_classes: int,
    dtype: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the batches of an epoch: images, and target probabilities.

    Args:
      images: the images that `read` returned.
      labels: the labels that `read` returned.
      draws: the random numbers of the epoch, from `draw`.
      batch: images of a step.
      num_classes: the number of probabilities.
      dtype: the dtype of the returned images.

    Returns:
      [steps, batch, 3, 32, 32] images, each batch channels-last; and
      [steps, batch, num_classes] float32 targets.
    """
    windows = _windows(images, draws["order"], draws["shift"], draws["mirrored"])
    windows = _normalised(_colored(windows.float(), draws["color"])).to(dtype)
    targets = functional.one_hot(labels[draws["order"]], num_classes).float()
    targets = targets * (1 - SMOOTHING) + SMOOTHING / num_classes
    inside = _boxes(draws["own part"], draws["center"])
    of_next = inside.float().mean((1, 2))[:, None]
    windows = torch.where(inside[..., None], _next(windows, batch), windows)
    targets = (1 - of_next) * targets + of_next * _next(targets, batch)
    windows = windows.unflatten(0, (-1, batch)).permute(0, 1, 4, 2, 3)
    return windows, targets.unflatten(0, (-1, batch))


def _windows(images, order, shift, mirrored):
    """Returns [rows, 32, 32, 3]: a crop of each padded image, mirrored or not."""
    pixel = torch.arange(SIDE, device=images.device)
    column = torch.where(mirrored[:, None], SIDE - 1 - pixel, pixel) + shift[:, 1:]
    row = pixel + shift[:, :1]
    return images[order[:, None, None], row[:, :, None], column[:, None, :]]


def _colored(pixels, factors):
    """Varies saturation, then contrast, then brightness, and clips to 0..255."""
    saturation, contrast, brightness = (factors[:, i, None, None, None] for i in range(3))
    grey = (pixels * _constant(RGB_TO_GREY, pixels)).sum(-1, keepdim=True)
    pixels = grey + (pixels - grey) * saturation
    pixels = ((pixels - MIDDLE_GREY) * contrast + MIDDLE_GREY) * brightness
    return pixels.clamp(0, 255)


def _normalised(pixels):
    return (pixels / 255 - _constant(MEAN, pixels)) / _constant(STD, pixels)


def _boxes(own_part, center):
    """Returns [rows, 32, 32] bool: True inside the cutmix box, as Yun et al. draw it."""
    half = ((1 - own_part).sqrt() * SIDE).floor() // 2
    center = (center * SIDE).floor()
    pixel = torch.arange(SIDE, device=center.device)
    within = (pixel >= (center - half[:, None])[..., None]) & (
        pixel < (center + half[:, None])[..., None]
    )
    return within[:, 0, :, None] & within[:, 1, None, :]


def _next(rows, batch: int):
    """Returns, for each row, the next row of its batch; for the last row, the first one."""
    return rows.unflatten(0, (-1, batch)).roll(-1, 1).flatten(0, 1)


def _constant(values, like):
    return torch.tensor(values, dtype=torch.float32, device=like.device)
