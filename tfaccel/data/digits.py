"""The embedded data set: scikit-learn's 1,797 handwritten digits, as PNG class folders.

Takes nothing; gives a folder with `training` (1,437 images) and `testing` (360), 8 x 8 pixels,
grey. Source: UCI ML "Optical Recognition of Handwritten Digits", which scikit-learn carries.

    root = ensure_digits()
"""

import pathlib

import PIL.Image
from sklearn.datasets import load_digits

from tfaccel.data.embedded import write_once


def ensure_digits(cache: pathlib.Path | None = None) -> pathlib.Path:
    """Writes the folders on first use and returns their root.

    Args:
      cache: where to keep them; XDG_CACHE_HOME, or ~/.cache, by default.

    Raises:
      UserError: they cannot be written there.
    """
    return write_once("digits", _write, cache=cache)


def _write(root: pathlib.Path) -> None:
    digits = load_digits()
    # Every fifth image tests. Pixels are 0..16 in the source.
    pixels = (digits.images * 15.9375).round().astype("uint8")
    for index, (image, label) in enumerate(zip(pixels, digits.target, strict=True)):
        folder = root / ("testing" if index % 5 == 0 else "training") / str(label)
        folder.mkdir(parents=True, exist_ok=True)
        PIL.Image.fromarray(image).save(folder / f"{index:04d}.png")
