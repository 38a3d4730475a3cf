"""Blurred and sharp crops of a photograph in pairs: the embedded data set of image restoration.

Takes nothing; gives a folder with `train/blurry/<crop>`, `train/sharp/<crop>` (216 pairs) and
`test/...` (42), 96 x 96 pixels, RGB. Source: the sample photograph that Matplotlib carries, the
United States Navy's of Grace Hopper, in the public domain.

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
SIZE = 96  # of a crop's sides
# Where crops begin in the photograph, 600 rows of 512: those to test on lie below row 391, and
# those to train on end 16 rows above, out of the blur's reach.
TOPS = {"train": range(0, 281, 35), "test": (392, 448, 504)}
LEFTS = {"train": range(0, 417, 18), "test": range(0, 417, 32)}


def ensure_blurred() -> pathlib.Path:
    """Writes the folders on first use, to XDG_CACHE_HOME or ~/.cache, and returns their root.

    Raises:
      UserError: they cannot be written there.
    """
    return write_once("portrait", _write)


def _write(root: pathlib.Path) -> None:
    sharp = load_photo()
    # As a whole, before it is cut: a crop's edges are blurred with what is beyond them.
    blurry = sharp.filter(PIL.ImageFilter.GaussianBlur(BLUR_RADIUS))
    for split, (name, photo) in itertools.product(TOPS, {"sharp": sharp, "blurry": blurry}.items()):
        _write_crops(photo, split, root / split / name)


def load_photo() -> PIL.Image.Image:
    """Returns the photograph, 512 pixels wide and 600 high, RGB."""
    with PIL.Image.open(get_sample_data(PHOTO, asfileobj=False)) as photo:
        return photo.convert("RGB")


def _write_crops(photo: PIL.Image.Image, split: str, folder: pathlib.Path) -> None:
    folder.mkdir(parents=True)
    for top, left in itertools.product(TOPS[split], LEFTS[split]):
        crop = photo.crop((left, top, left + SIZE, top + SIZE))
        crop.save(folder / f"{top:03d}-{left:03d}.png")
