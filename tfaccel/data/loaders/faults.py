"""Finds the images that made a loader fail, and what is wrong with them.

The libraries that decode often do not name the file. `named` checks the examples that the loader
was reading, and raises one error that names the files.

    with named(source, images, augment, fed=[[3, 14]], refused=..., decoder="DALI"):
        batch = next(iterator)
"""

import contextlib
import re
from collections.abc import Callable, Iterable, Iterator, Sequence

import numpy as np
import tensorflow as tf

from tfaccel.common.errors import UserError
from tfaccel.config import CROPS, AugmentConfig, ImageConfig
from tfaccel.data.loaders.decode import two_sizes
from tfaccel.data.source import Blobs, ImageSource, UnreadableError
from tfaccel.data.sources.kinds import unfit_blob
from tfaccel.data.sources.pillow import Headers, image_size, undecodable


@contextlib.contextmanager
def named(
    source: ImageSource,
    images: ImageConfig,
    augment: AugmentConfig,
    *,
    fed: Iterable[Sequence[int]],
    refused: Callable[[Blobs, int], str | None],
    decoder: str,
) -> Iterator[None]:
    """Within the context, replaces a loader's error by one that names the images at fault.

    Args:
      source: the examples.
      images: the settings of the images.
      augment: the settings of the augmentation.
      fed: the ids of each batch that the loader may be reading.
      refused: returns "name (cause)" if the loader's library cannot decode an image, else None.
      decoder: name of the loader's library.

    Raises:
      UnreadableError: files cannot be decoded.
      UserError: the images of a pair differ in size, an image is smaller than its crop, or a
        reader has raised a UserError inside TensorFlow.
    """
    try:
        yield
    except (OSError, RuntimeError, tf.errors.OpError) as error:
        said = re.search(rf"^.*\b{UserError.__name__}: (.+)$", str(error), re.MULTILINE)
        if said:  # TensorFlow keeps only the text of a Python exception
            raise UserError(said[1]) from error
        ids = np.unique(np.concatenate(list(fed))).tolist()
        cause = _explained(
            error, source, images, augment, ids=ids, refused=refused, decoder=decoder
        )
        if cause is error:
            raise
        raise cause from error


def _explained(error, source, images, augment, *, ids, refused, decoder) -> Exception:
    """Returns the error to raise: `error` itself if the images are not its cause."""
    if isinstance(error, tf.errors.ResourceExhaustedError) or "out of memory" in str(error):
        return error  # no image is at fault, and checking all of them takes seconds
    bad = _of_each(undecodable, source, ids)
    if bad:
        return UnreadableError(
            f"{len(bad)} of {len(ids)} images just read cannot be decoded, first "
            f"{next(iter(bad.values()))}; replace or remove such files",
            ids=tuple(bad),
        )
    unfit = unfit_error(source, images, ids, num_read=len(ids))
    if unfit:
        return unfit
    wrong = wrong_size(source, images, augment, ids)
    if wrong:
        return UserError(wrong)
    if "CUDA" in str(error):
        return error  # the device is at fault
    bad = _of_each(refused, source, ids)
    if bad:
        return UnreadableError(
            f"{decoder} cannot decode {len(bad)} of {len(ids)} images just read, first "
            f"{next(iter(bad.values()))}; convert such files to RGB or grey PNG or JPEG, or use "
            "another loader",
            ids=tuple(bad),
        )
    return error


def unfit_error(
    source: ImageSource, images: ImageConfig, ids: Sequence[int], *, num_read: int
) -> UnreadableError | None:
    """Returns the error about the examples that are `kinds.unfit`, or None if there are none.

    Args:
      source: the examples, all of which can be decoded.
      images: the settings of the images.
      ids: the examples that are checked.
      num_read: the number of examples that were read together with them.
    """
    is_mask = {id(source.targets): images.targets == "mask"}

    def fault_of(blobs, index):
        return unfit_blob(blobs, index, is_mask=is_mask.get(id(blobs), False))

    bad = _of_each(fault_of, source, ids)
    if not bad:
        return None
    return UnreadableError(
        f"{len(bad)} of {num_read} images just read are of a kind that this loader does not take, "
        f"first {next(iter(bad.values()))}; convert such files, skip them with bad_files='skip', "
        "or list them with `tfaccel audit`",
        ids=tuple(bad),
    )


def _of_each(fault_of, source: ImageSource, ids) -> dict[int, str]:
    """Returns the fault of each bad example, from its target or otherwise from its image."""
    parts = [each for each in (source.targets, source.images) if each is not None]
    faults = ((index, fault_of(part, index)) for index in ids for part in parts)
    return {index: fault for index, fault in faults if fault}


def wrong_size(
    source: ImageSource,
    images: ImageConfig,
    augment: AugmentConfig,
    ids: Iterable[int],
    *,
    headers: Headers | None = None,
) -> str | None:
    """Returns the error message for a pair of two sizes, or an image that is smaller than its crop.

    Args:
      source: the examples.
      images: the settings of the images.
      augment: the window that is cut out of the original images.
      ids: the examples whose headers are checked.
      headers: what has read some of them already; None for nothing.

    Returns:
      The message about the first such example; None if all sizes are right.

    Raises:
      UserError: an example is not an image.
    """
    for index in ids:
        size = image_size(source.images, index, headers=headers)
        name = source.images.name(index)
        if source.targets is not None:
            other = image_size(source.targets, index, headers=headers)
            if other != size:
                return two_sizes(source, index, size, other)
        if augment.window in CROPS and any(
            old < new for old, new in zip(size, images.image_size, strict=True)
        ):
            return (
                f"{name} has {_pixels(size)} (height x width), less than the "
                f"{_pixels(images.image_size)} that window={augment.window!r} cuts "
                "out; use a smaller image_size, or another window"
            )
    return None


def _pixels(size: tuple[int, int]) -> str:
    return f"{size[0]}x{size[1]} pixels"
