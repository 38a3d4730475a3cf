"""What Pillow says of encoded images: which cannot be decoded, why, and how large one is.

undecodable(source.images, [3, 14])    # ["cats/x.jpg (image file is truncated)"]
"""

import io
from collections.abc import Iterable

import PIL.Image

from tfaccel.data.source import Blobs
from tfaccel.errors import UserError

# What both DALI and Pillow decode, so that a file that fails in one can be named by the other.
IMAGE_SUFFIXES = (".bmp", ".jp2", ".jpeg", ".jpg", ".png", ".ppm", ".tif", ".tiff", ".webp")

# What Pillow raises for files that are no image, cut short, or too large to be honest.
UNREADABLE = (OSError, SyntaxError, PIL.Image.DecompressionBombError)


def undecodable(blobs: Blobs, ids: Iterable[int]) -> list[str]:
    """Returns `"name (cause)"` for each of these images that cannot be read or decoded."""
    bad = []
    for index in ids:
        try:
            with _open(blobs, index) as image:
                image.load()
        except UNREADABLE as error:
            bad.append(f"{blobs.name(index)} ({cause(error)})")
    return bad


def image_size(blobs: Blobs, index: int) -> tuple[int, int]:
    """Returns an image's (height, width) in pixels, as its header has them.

    Raises:
      UserError: it cannot be read, or is not an image.
    """
    image = _header(blobs, index)
    return image.height, image.width


def check_mask(blobs: Blobs, index: int) -> None:
    """Raises UserError unless an image's values are its grey levels, as those of a mask are."""
    mode = _header(blobs, index).mode
    if mode != "L":
        raise UserError(
            f"{blobs.name(index)} is of Pillow's mode {mode}; expected masks of mode L, whose grey "
            "level is the class (decoding loses a palette's indices, and makes 0 and 255 of mode "
            "1): convert them"
        )


def cause(error: Exception) -> str:
    """Returns what is wrong, without the path or the object that the name stands for."""
    if isinstance(error, PIL.UnidentifiedImageError):
        return "not an image"
    return getattr(error, "strerror", None) or str(error)


def _header(blobs: Blobs, index: int) -> PIL.Image.Image:
    """Returns an image that is not decoded, and closed."""
    try:
        with _open(blobs, index) as image:
            return image
    except UNREADABLE as error:
        raise UserError(
            f"{blobs.name(index)} cannot be read as an image ({cause(error)}); replace it or move "
            "it away"
        ) from error


def _open(blobs: Blobs, index: int) -> PIL.Image.Image:
    return PIL.Image.open(io.BytesIO(blobs.read(index)))
