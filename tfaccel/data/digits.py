"""The embedded data set: 1,797 handwritten digits, as PNG files in class folders.

The folder holds `training` (1,437 images) and `testing` (360 images), 8 x 8 pixels, grey. Source:
digits.npz beside this file, which has the test images of "Optical Recognition of Handwritten
Digits" (E. Alpaydin and C. Kaynak, 1998, UCI Machine Learning Repository, CC BY 4.0) in the order
of scikit-learn's `load_digits`: images [1797, 8, 8], 0 to 16, and labels [1797], both uint8.
We do not depend on scikit-learn: where it is installed, Keras imports it at each start, which takes
a second.

    root = ensure_digits()
    images, labels = load_digits()
"""

import pathlib

import numpy as np
import PIL.Image

from tfaccel.data.embedded import write_once


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


def _write(root: pathlib.Path) -> None:
    images, labels = load_digits()
    # Every fifth image is a test image. Pixels are 0..16 in the source.
    pixels = (images * 15.9375).round().astype("uint8")
    for index, (image, label) in enumerate(zip(pixels, labels, strict=True)):
        folder = root / ("testing" if index % 5 == 0 else "training") / str(label)
        folder.mkdir(parents=True, exist_ok=True)
        PIL.Image.fromarray(image).save(folder / f"{index:04d}.png")
