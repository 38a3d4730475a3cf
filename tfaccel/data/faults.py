"""Why a loader failed: which images, and what is wrong with them.

Takes the loader's error and the examples that it was at; gives one sentence that names the files,
which the libraries that decode often do not.

    raise explained(error, source, images, augment, ids=[3, 14], refused=..., decoder="DALI")
"""

from collections.abc import Callable, Sequence

import tensorflow as tf

from tfaccel.config import AugmentConfig, ImageConfig
from tfaccel.data.decode import two_sizes
from tfaccel.data.source import Blobs, ImageSource, UnreadableError
from tfaccel.data.sources.pillow import image_size, undecodable
from tfaccel.errors import UserError


def explained(
    error: Exception,
    source: ImageSource,
    images: ImageConfig,
    augment: AugmentConfig,
    *,
    ids: Sequence[int],
    refused: Callable[[Blobs, Sequence[int]], list[str]],
    decoder: str,
) -> Exception:
    """Returns what to raise: `error` itself where the images are not its cause.

    Args:
      error: the loader's, or TensorFlow's from it.
      source: the images.
      images: what they were to become.
      augment: likewise.
      ids: which of them the loader was at.
      refused: returns "name (cause)" for each image that the loader's library cannot decode.
      decoder: that library's name.

    Returns:
      UnreadableError, for files that cannot be decoded; UserError, for a pair of two sizes, or
      an image that is smaller than its crop.
    """
    bad = _named(undecodable, source, ids)
    if bad:
        return UnreadableError(
            f"{len(bad)} of {len(ids)} images just read cannot be decoded, first "
            f"{next(iter(bad.values()))}; replace or remove such files",
            ids=tuple(bad),
        )
    wrong = _wrong_size(source, images, augment, ids)
    if wrong:
        return UserError(wrong)
    if isinstance(error, tf.errors.ResourceExhaustedError) or "CUDA" in str(error):
        return error  # the device or its memory
    bad = _named(refused, source, ids)
    if bad:
        return UnreadableError(
            f"{decoder} cannot decode {len(bad)} of {len(ids)} images just read, first "
            f"{next(iter(bad.values()))}; convert such files to RGB or grey PNG or JPEG, or use "
            "another loader",
            ids=tuple(bad),
        )
    return error


def _named(faults_of, source: ImageSource, ids) -> dict[int, str]:
    """Returns the first fault of each example that has one, in its image or in its target."""
    parts = [each for each in (source.images, source.targets) if each is not None]
    faults = {
        index: [fault for part in parts for fault in faults_of(part, [index])] for index in ids
    }
    return {index: each[0] for index, each in faults.items() if each}


def _wrong_size(
    source: ImageSource, images: ImageConfig, augment: AugmentConfig, ids
) -> str | None:
    for index in ids:
        size, name = image_size(source.images, index), source.images.name(index)
        if source.targets is not None:
            other = image_size(source.targets, index)
            if other != size:
                return two_sizes(source, index, size, other)
        is_crop = augment.window in ("center_crop", "random_crop")
        if is_crop and any(old < new for old, new in zip(size, images.image_size, strict=True)):
            return (
                f"{name} has {_pixels(size)}, less than the {_pixels(images.image_size)} that "
                f"window={augment.window!r} cuts out; use a smaller image_size, or another window"
            )
    return None


def _pixels(size: tuple[int, int]) -> str:
    return f"{size[0]}x{size[1]} pixels"
