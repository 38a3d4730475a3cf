"""Blurred and sharp photographs in pairs: the embedded data set of image restoration.

Takes nothing; gives a folder with `train/blurry/<photo>`, `train/sharp/<photo>` (204 pairs) and
`test/...` (40), 96 x 96 pixels, RGB. Source: the two sample photographs that scikit-learn carries,
"china" (danielbuechele) and "flower" (vultilion), both from Flickr under CC BY 2.0.

    root = ensure_blurred()
"""

import itertools
import pathlib

import PIL.Image
import PIL.ImageFilter
from sklearn.datasets import load_sample_images

from tfaccel.data.embedded import write_once

BLUR_RADIUS = 1.0  # standard deviation of the blur, in pixels
SIZE = 96  # of a crop's sides
# Where crops begin in a photograph of 427 x 640: those to test on lie below row 287, and those to
# train on end 16 rows above, out of the blur's reach.
TOPS = {"train": range(0, 176, 35), "test": (287, 331)}
LEFTS = {"train": range(0, 545, 34), "test": range(0, 541, 60)}


def ensure_blurred(cache: pathlib.Path | None = None) -> pathlib.Path:
    """Writes the folders on first use and returns their root.

    Args:
      cache: where to keep them; XDG_CACHE_HOME, or ~/.cache, by default.

    Raises:
      UserError: they cannot be written there.
    """
    return write_once("blurred", _write, cache=cache)


def _write(root: pathlib.Path) -> None:
    photos = load_sample_images()
    for file, pixels in zip(photos.filenames, photos.images, strict=True):
        sharp = PIL.Image.fromarray(pixels)
        # As a whole, before it is cut: a crop's edges are blurred with what is beyond them.
        blurry = sharp.filter(PIL.ImageFilter.GaussianBlur(BLUR_RADIUS))
        for split, (name, photo) in itertools.product(
            TOPS, {"sharp": sharp, "blurry": blurry}.items()
        ):
            _write_crops(photo, split, root / split / name / pathlib.Path(file).stem)


def _write_crops(photo: PIL.Image.Image, split: str, folder: pathlib.Path) -> None:
    folder.mkdir(parents=True)
    for top, left in itertools.product(TOPS[split], LEFTS[split]):
        crop = photo.crop((left, top, left + SIZE, top + SIZE))
        crop.save(folder / f"{top:03d}-{left:03d}.png")
