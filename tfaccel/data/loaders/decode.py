"""Decodes images into uint8 arrays of one size, once, with Pillow.

arrays = {"images": np.empty(shape, np.uint8)}
decode_into(arrays, source, targets="image", num_threads=8)
"""

import contextlib
import functools
import io

import numpy as np
import PIL.Image

from tfaccel.common.errors import UserError
from tfaccel.data.loaders.windows import nearest_index
from tfaccel.data.source import ImageSource, UnreadableError
from tfaccel.data.sources.pillow import cause, decoded, deep, unfit_mask
from tfaccel.data.threads import mapped
from tfaccel.process import waits

BLOCK = 32  # images that a thread decodes together: 50 ms for photographs


def shapes(
    source: ImageSource, *, stored_size: tuple[int, int], channels: int, targets: str
) -> dict[str, tuple[int, int, int, int]]:
    """Returns the shapes of the arrays for a source: "images" and, for pairs, "targets".

    Args:
      source: the encoded images.
      stored_size: (height, width) to which each image is resized.
      channels: channels of the inputs, 1 or 3.
      targets: "image" for targets with the channels of the inputs, or "mask" for one channel.
    """
    found = {"images": (len(source), *stored_size, channels)}
    if source.targets is not None:
        found["targets"] = (len(source), *stored_size, 1 if targets == "mask" else channels)
    return found


def decode_into(
    arrays: dict[str, np.ndarray], source: ImageSource, *, targets: str, num_threads: int
) -> None:
    """Decodes every image, and resizes it as the window "stretch" does.

    Args:
      arrays: uint8 arrays with the shapes of `shapes`, which are filled. Masks are resized to the
        nearest pixels.
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
                sizes.append(_decode(arrays[name][index], blobs.read(index), nearest=is_mask))
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


def two_sizes(source: ImageSource, index: int, size, target_size) -> str:
    """Returns the error message for a pair with different (height, width)."""
    one, other = (f"{height}x{width}" for height, width in (size, target_size))
    return (
        f"{source.images.name(index)} has {one} pixels, but its target "
        f"{source.targets.name(index)} has {other}; expected the same size in a pair"
    )
