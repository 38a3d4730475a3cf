"""The embedded data set: scikit-learn's 1,797 handwritten digits, as PNG class folders.

Takes nothing; gives a folder with `training` (1,437 images) and `testing` (360), 8 x 8 pixels,
grey. Source: UCI ML "Optical Recognition of Handwritten Digits", which scikit-learn carries.

    root = ensure_digits()
"""

import logging
import os
import pathlib
import shutil
import tempfile

import PIL.Image
from sklearn.datasets import load_digits

from tfaccel.errors import UserError

log = logging.getLogger("tfaccel")


def ensure_digits(cache: pathlib.Path | None = None) -> pathlib.Path:
    """Writes the folders on first use and returns their root.

    Args:
      cache: where to keep them; XDG_CACHE_HOME, or ~/.cache, by default.

    Raises:
      UserError: they cannot be written there.
    """
    cache = cache or pathlib.Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser()
    root = cache / "tfaccel" / "digits"
    if root.is_dir():
        log.info("data: the embedded digits, in %s", root)
        return root
    log.info("data: writing the embedded digits to %s", root)
    # Written aside and renamed: a killed process leaves no half data set, and of two processes
    # that write at once the later one finds the folder there and keeps it.
    try:
        root.parent.mkdir(parents=True, exist_ok=True)
        unfinished = pathlib.Path(tempfile.mkdtemp(prefix="digits.", dir=root.parent))
        _write(unfinished)
    except OSError as error:
        raise UserError(
            f"the embedded digits cannot be written to {root.parent} ({error.strerror}); set "
            "XDG_CACHE_HOME to a folder that can be written, or give --config.data.root"
        ) from error
    try:
        unfinished.rename(root)
    except OSError:
        shutil.rmtree(unfinished)
        if not root.is_dir():
            raise
    return root


def _write(root: pathlib.Path) -> None:
    digits = load_digits()
    # Every fifth image tests. Pixels are 0..16 in the source.
    pixels = (digits.images * 15.9375).round().astype("uint8")
    for index, (image, label) in enumerate(zip(pixels, digits.target, strict=True)):
        folder = root / ("testing" if index % 5 == 0 else "training") / str(label)
        folder.mkdir(parents=True, exist_ok=True)
        PIL.Image.fromarray(image).save(folder / f"{index:04d}.png")
