"""Pairs of blurred and sharp crops of a photograph: the embedded data set for image restoration.

The folder holds `train/blurry/<crop>` and `train/sharp/<crop>` (216 pairs), and `test/...` (42
pairs). A crop has 96 x 96 pixels, RGB. Source: the sample photograph that Matplotlib contains, the
United States Navy's portrait of Grace Hopper, in the public domain.

    root = ensure_blurred()
"""

import itertools
import pathlib

import PIL.Image
import PIL.ImageFilter
from matplotlib.cbook import get_sample_data

from tfaccel.data.embedded import write_once

PHOTO = "grace_hopper.jpg"
BLUR_RADIUS = 1.0  # standard deviation of the blur, in pixels
SIZE = 96  # height and width of a crop, in pixels
# Where crops begin in the photograph, which has 600 rows of 512 pixels. Test crops begin at row 392
# or below. Training crops end 16 rows above that, so the blur mixes no test pixels into them.
TOPS = {"train": range(0, 281, 35), "test": (392, 448, 504)}
LEFTS = {"train": range(0, 417, 18), "test": range(0, 417, 32)}


def ensure_blurred() -> pathlib.Path:
    """Writes the folders to XDG_CACHE_HOME or ~/.cache on first use, and returns their root.

    Raises:
      UserError: the folders cannot be written.
    """
    return write_once("portrait", _write)


def _write(root: pathlib.Path) -> None:
    sharp = load_photo()
    # The photograph is blurred before it is cut, so that a crop is blurred right up to its edges.
    blurry = sharp.filter(PIL.ImageFilter.GaussianBlur(BLUR_RADIUS))
    for split, (name, photo) in itertools.product(TOPS, {"sharp": sharp, "blurry": blurry}.items()):
        _write_crops(photo, split, root / split / name)


def load_photo() -> PIL.Image.Image:
    """Returns the photograph, RGB, 512 pixels wide and 600 high."""
    with PIL.Image.open(get_sample_data(PHOTO, asfileobj=False)) as photo:
        return photo.convert("RGB")


def _write_crops(photo: PIL.Image.Image, split: str, folder: pathlib.Path) -> None:
    folder.mkdir(parents=True)
    for top, left in itertools.product(TOPS[split], LEFTS[split]):
        crop = photo.crop((left, top, left + SIZE, top + SIZE))
        crop.save(folder / f"{top:03d}-{left:03d}.png")
