"""Decodes images into arrays of one size, once, with Pillow or by raster.py.

arrays = {name: np.empty(*form) for name, form in forms(source, ...).items()}
decode_into(arrays, source, targets="image", num_threads=8)
"""

import contextlib
import functools
import io
import math
from typing import NamedTuple

import numpy as np
import PIL.Image

from tfaccel.common.errors import UserError
from tfaccel.data import raster
from tfaccel.data.loaders.windows import nearest_index
from tfaccel.data.source import ImageSource, UnreadableError
from tfaccel.data.sources.pillow import cause, decoded, deep, unfit_mask
from tfaccel.data.threads import mapped
from tfaccel.process import waits

BLOCK = 32  # images that a thread decodes together: 50 ms for photographs


class Form(NamedTuple):
    """The shape of an array, [num_examples, height, width, channels], and its dtype."""

    shape: tuple[int, int, int, int]
    dtype: str

    @property
    def num_bytes(self) -> int:
        """The bytes of the array."""
        return math.prod(self.shape) * np.dtype(self.dtype).itemsize


def forms(
    source: ImageSource, *, stored_size: tuple[int, int], channels: int, targets: str
) -> dict[str, Form]:
    """Returns the forms of the arrays for a source: "images" and, for pairs, "targets".

    Args:
      source: the encoded images.
      stored_size: (height, width) to which each image is resized.
      channels: channels of the inputs.
      targets: "image" for targets with the channels of the inputs, or "mask" for one channel.
    """
    found = {"images": Form((len(source), *stored_size, channels), source.images.dtype)}
    if source.targets is not None:
        channels = 1 if targets == "mask" else channels
        found["targets"] = Form((len(source), *stored_size, channels), source.targets.dtype)
    return found


def decode_into(
    arrays: dict[str, np.ndarray], source: ImageSource, *, targets: str, num_threads: int
) -> None:
    """Decodes every image, and resizes it as the window "stretch" does.

    Args:
      arrays: arrays of the `forms`, which are filled. Masks are resized to the nearest pixels.
      source: the encoded images.
      targets: "image" or "mask".
      num_threads: number of threads that decode, if they are faster than one.

    Raises:
      UnreadableError: some images cannot be read or decoded; it has the ids of all of them.
      UserError: the images of a pair differ in size.
    """
    block = functools.partial(_decode_block, arrays, source, targets)
    starts, bad = range(0, len(source), BLOCK), {}
    with contextlib.closing(mapped(block, starts, num_threads=num_threads)) as found:
        for start, faults in zip(starts, found, strict=True):
            bad |= faults
            waits.reached(f"{min(start + BLOCK, len(source)):,} of {len(source):,}")
    if bad:
        raise UnreadableError(
            f"{len(bad)} of {len(source)} images cannot be decoded, first "
            f"{next(iter(bad.values()))}; replace or remove such files",
            ids=tuple(bad),
        )


def _decode_block(arrays, source, targets, start: int) -> dict[int, str]:
    """Decodes BLOCK examples, and returns "name (cause)" for those that cannot be decoded."""
    bad = {}
    for index in range(start, min(start + BLOCK, len(source))):
        parts = [("images", source.images, False)]
        if source.targets is not None:
            parts.append(("targets", source.targets, targets == "mask"))
        sizes = []
        for name, blobs, is_mask in parts:
            try:
                out, data = arrays[name][index], blobs.read(index)
                if blobs.form is not None:
                    sizes.append(_decode_raster(out, data, blobs.form))
                else:
                    sizes.append(_decode(out, data, nearest=is_mask))
            except MemoryError:  # the file is not at fault
                raise
            except Exception as error:  # Pillow raises nearly anything for a damaged file
                bad[index] = f"{blobs.name(index)} ({cause(error)})"
                break
        if len(set(sizes)) > 1:
            raise UserError(two_sizes(source, index, *sizes))
    return bad


def _decode(out: np.ndarray, data: bytes, *, nearest: bool) -> tuple[int, int]:
    """Fills [height, width, channels] with an image, and returns the image's own size."""
    height, width, channels = out.shape
    with PIL.Image.open(io.BytesIO(data)) as opened:
        fault = unfit_mask(opened) if nearest else deep(opened)
        if fault:
            raise ValueError(fault)
        image = decoded(opened, "L" if channels == 1 else "RGB")
    if nearest:
        rows, columns = nearest_index(image.height, height), nearest_index(image.width, width)
        out[..., 0] = np.asarray(image)[rows][:, columns]
    else:
        resized = image.resize((width, height), PIL.Image.Resampling.BILINEAR)  # antialiased
        out[:] = np.asarray(resized).reshape(out.shape)
    return image.height, image.width


def _decode_raster(out: np.ndarray, data: bytes, form: raster.RasterForm) -> tuple[int, int]:
    """Fills [height, width, channels] with an image that is read as it is stored."""
    pixels = raster.read_as(data, form)
    out[:] = resized(pixels, out.shape[:2])
    return pixels.shape[:2]


def resized(pixels: np.ndarray, size: tuple[int, int]) -> np.ndarray:
    """Returns [height, width, channels] of any dtype resized as Pillow does it: antialiased.

    Whole numbers are computed in float32, which holds 16 bits exactly, and rounded.
    """
    if pixels.shape[:2] == tuple(size):
        return pixels
    found = np.empty((*size, pixels.shape[2]), np.float32)
    for channel in range(pixels.shape[2]):
        image = PIL.Image.fromarray(np.ascontiguousarray(pixels[..., channel], np.float32))
        found[..., channel] = image.resize(size[::-1], PIL.Image.Resampling.BILINEAR)
    if pixels.dtype.kind == "f":
        return found
    return np.clip(found + 0.5, 0, np.iinfo(pixels.dtype).max).astype(pixels.dtype)


def two_sizes(source: ImageSource, index: int, size, target_size) -> str:
    """Returns the error message for a pair with different (height, width)."""
    one, other = (f"{height}x{width}" for height, width in (size, target_size))
    return (
        f"{source.images.name(index)} has {one} pixels (height x width), but its target "
        f"{source.targets.name(index)} has {other}; expected the same size in a pair: replace one "
        "of the two, or leave such pairs out with bad_files='skip'"
    )
