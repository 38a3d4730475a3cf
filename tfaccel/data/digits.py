"""The embedded data set: 1,797 handwritten digits, as PNG files in class folders.

The folder holds `training` (1,437 images) and `testing` (360 images), 8 x 8 pixels, grey. Source:
digits.npz beside this file, which has the test images of "Optical Recognition of Handwritten
Digits" (E. Alpaydin and C. Kaynak, 1998, UCI Machine Learning Repository, CC BY 4.0) in the order
of scikit-learn's `load_digits`: images [1797, 8, 8], 0 to 16, and labels [1797], both uint8.
We do not depend on scikit-learn: where it is installed, Keras imports it at each start, which takes
a second.

    root = ensure_digits()
    images, labels = load_digits()

`ensure_listed_digits` writes the same images with two lists, `training.csv` and `testing.csv`, of
which each row says several things of its image: see `COLUMNS`.
"""

import pathlib
from collections.abc import Iterator

import numpy as np
import PIL.Image

from tfaccel.data.embedded import write_once

# What a list says of each image: 1 for an even digit, 1 for a digit with a closed loop, the digit
# itself, and its ink, which is the sum of the pixels as shares of full ones (11.5 to 27.1).
COLUMNS = ("path", "even", "loop", "value", "ink")
WITH_LOOP = (0, 6, 8, 9)


def load_digits() -> tuple[np.ndarray, np.ndarray]:
    """Returns images, [1797, 8, 8] uint8, 0 to 16, and labels, [1797] uint8, 0 to 9."""
    with np.load(pathlib.Path(__file__).with_suffix(".npz")) as file:
        return file["images"], file["labels"]


def ensure_digits() -> pathlib.Path:
    """Writes the folders to XDG_CACHE_HOME or ~/.cache on first use, and returns their root.

    Raises:
      UserError: the folders cannot be written.
    """
    return write_once("digits", _write)


def ensure_listed_digits() -> pathlib.Path:
    """Writes the images and lists to XDG_CACHE_HOME or ~/.cache on first use; returns their root.

    Raises:
      UserError: the files cannot be written.
    """
    return write_once("listed_digits", _write_lists)


def _write(root: pathlib.Path) -> None:
    for index, image, label in _pixels():
        folder = root / _split(index) / str(label)
        folder.mkdir(parents=True, exist_ok=True)
        PIL.Image.fromarray(image).save(folder / f"{index:04d}.png")


def _write_lists(root: pathlib.Path) -> None:
    lines = {"training": [",".join(COLUMNS)], "testing": [",".join(COLUMNS)]}
    for index, image, label in _pixels():
        split = _split(index)
        (root / split).mkdir(exist_ok=True)
        PIL.Image.fromarray(image).save(root / split / f"{index:04d}.png")
        said = int(label % 2 == 0), int(label in WITH_LOOP), label, f"{image.sum() / 255:.3f}"
        lines[split].append(",".join(map(str, (f"{split}/{index:04d}.png", *said))))
    for split, rows in lines.items():
        (root / f"{split}.csv").write_text("\n".join(rows) + "\n", encoding="utf-8")


def _split(index: int) -> str:
    return "testing" if index % 5 == 0 else "training"  # every fifth image is a test image


def _pixels() -> Iterator[tuple[int, np.ndarray, int]]:
    """Yields the index, the pixels in 0 to 255 and the digit of each image."""
    images, labels = load_digits()
    pixels = (images * 15.9375).round().astype("uint8")  # 0..16 in the source
    yield from zip(range(len(labels)), pixels, labels.tolist(), strict=True)
