"""Pictures of handwritten digits with masks: the embedded data set for segmentation.

The folder holds `train/images/<index>.png` and `train/masks/<index>.png` (240 pairs), and
`test/...` (60 pairs). An image has 64 x 64 pixels, RGB: two or three bright digits of random
colors and sizes on a dark background of a random color, with noise. A pixel of a mask is 0 for the
background, or 1 to 10 for the digits 0 to 9. Test scenes have only the test digits of
tfaccel/data/digits.py.

    root = ensure_digit_scenes()
"""

import pathlib

import numpy as np
import PIL.Image

from tfaccel.data.digits import load_digits
from tfaccel.data.embedded import write_once

SIDE = 64  # height and width of a scene, in pixels
NUM_CLASSES = 11  # the background and ten digits
NUM_SCENES = {"train": 240, "test": 60}
DIGIT_SIDES = (24, 33)  # a digit's side is drawn from this range, its end excluded
INK = 0.4  # a pixel with more ink than this, of 0 to 1, belongs to the digit
DARK, BRIGHT = (0, 80), (150, 255)  # the ranges of the background's and a digit's colors
NOISE = 12.0  # standard deviation of each pixel's noise, of 0..255


def ensure_digit_scenes() -> pathlib.Path:
    """Writes the folders to XDG_CACHE_HOME or ~/.cache on first use, and returns their root.

    Raises:
      UserError: the folders cannot be written.
    """
    return write_once("digit-scenes", _write)


def _write(root: pathlib.Path) -> None:
    images, labels = load_digits()
    is_test = np.arange(len(images)) % 5 == 0  # as in digits.py
    for split, (name, count) in enumerate(NUM_SCENES.items()):
        chosen = np.flatnonzero(is_test == (name == "test"))
        random = np.random.default_rng(split)
        for kind in ("images", "masks"):
            (root / name / kind).mkdir(parents=True)
        for index in range(count):
            image, mask = _scene(images[chosen], labels[chosen], random)
            PIL.Image.fromarray(image).save(root / name / "images" / f"{index:03d}.png")
            PIL.Image.fromarray(mask).save(root / name / "masks" / f"{index:03d}.png")


def _scene(
    images: np.ndarray, labels: np.ndarray, random: np.random.Generator
) -> tuple[np.ndarray, np.ndarray]:
    """Returns an image, [64, 64, 3] uint8, and its mask, [64, 64] uint8.

    `images` are [n, 8, 8] uint8, 0 to 16, and `labels` are [n] uint8. A later digit covers others.
    """
    background = random.uniform(*DARK, 3)
    scene = np.broadcast_to(background, (SIDE, SIDE, 3)).copy()
    mask = np.zeros((SIDE, SIDE), np.uint8)
    for _ in range(random.integers(2, 4)):
        chosen = random.integers(len(images))
        side = int(random.integers(*DIGIT_SIDES))
        digit = PIL.Image.fromarray(images[chosen].astype(np.float32) / 16)
        ink = np.asarray(digit.resize((side, side), PIL.Image.Resampling.BILINEAR))
        top, left = random.integers(0, SIDE - side + 1, 2)
        place = slice(top, top + side), slice(left, left + side)
        scene[place] += ink[..., None] * (random.uniform(*BRIGHT, 3) - scene[place])
        mask[place][ink > INK] = 1 + labels[chosen]
    noisy = scene + random.normal(0, NOISE, scene.shape)
    return np.clip(noisy, 0, 255).round().astype(np.uint8), mask
