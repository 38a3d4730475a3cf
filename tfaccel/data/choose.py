"""Which loader suits the data and the machine, and why.

Takes a source, the settings and the replica's device; gives a loader's name, the reason, in words
for the log, and the size that images are kept in.

    choice = choose_loader(source, images, augment, device=Device("/gpu:0", 0))
"""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from tfaccel.common.errors import UserError
from tfaccel.config import AugmentConfig, ImageConfig
from tfaccel.data.free_memory import free_bytes, mib
from tfaccel.data.one_size import one_size
from tfaccel.data.source import ArraySource, Blobs, ImageSource
from tfaccel.data.sources.pillow import image_sizes
from tfaccel.runtime.devices import Device

# Of the memory that is free when the data is opened, for training images, and again for test ones:
# the model, its activations and, on the CPU, other programs need the rest.
MEMORY_SHARE = 0.25

# Not BMP: TensorFlow decodes fewer kinds of it than DALI.
TENSORFLOW_SUFFIXES = {".gif", ".jpeg", ".jpg", ".png", ".webp"}
_DALIS = (b"II*", b"MM\0*", b"P4", b"P5", b"P6", b"\0\0\0\x0c", b"\xff\x4f\xff")  # TIFF, PPM, JP2
NUM_SAMPLED = 64  # images whose headers are read to see whether all have one size


class Choice(NamedTuple):
    """A loader.

    Attributes:
      loader: "dali_gpu", "dali_cpu", "tf_data", "memory" or "cache".
      reason: in words.
      stored_size: (height, width) in which "memory" and "cache" keep the images of files.
    """

    loader: str
    reason: str
    stored_size: tuple[int, int] | None = None


def choose_loader(
    source: ImageSource | ArraySource,
    images: ImageConfig,
    augment: AugmentConfig,
    *,
    device: Device,
    num_local: int = 1,
    num_threads: int = 1,
) -> Choice:
    """Returns the loader to use.

    It never chooses "cache" for files: images of many sizes would lose pixels, and a disk is not
    always faster than a decoder.

    Args:
      source: the images.
      images: what they are to become.
      augment: likewise.
      device: of the replicas.
      num_local: processes of this job on this machine, each of which takes its share.
      num_threads: that read headers.

    Raises:
      UserError: the loader that was asked for cannot be had, or not for these images.
    """
    on_gpu = device.cuda_ordinal is not None
    if images.loader == "dali_gpu" and not on_gpu:
        raise UserError("loader='dali_gpu' on the CPU; use 'dali_cpu', 'auto', or a GPU")
    if isinstance(source, ArraySource):
        return _for_arrays(source, images, device, num_local)
    if images.loader in ("dali_gpu", "dali_cpu", "tf_data"):
        return Choice(images.loader, "it was asked for")
    place = "the GPU" if on_gpu else "this machine"
    free = free_bytes(device, num_local) if images.loader == "auto" else 0

    def fits(size):
        return _bytes(source, size, images) <= MEMORY_SHARE * free

    wanted = fits if images.loader == "auto" else lambda size: True
    stored, why = _storable_size(source, images, augment, wanted, num_threads=num_threads)
    if images.loader != "auto":
        if stored is None:
            raise UserError(
                f"loader={images.loader!r} keeps images of one size, but {why}; give stored_size, "
                "e.g. (256, 256), or another loader"
            )
        return Choice(images.loader, "it was asked for", stored)
    if stored is not None:
        needed = _bytes(source, stored, images)
        if fits(stored):
            reason = f"{why}; all {len(source)} take {mib(needed)} of {mib(free)} free on {place}"
            return Choice("memory", reason, stored)
        why = f"all {len(source)} would take {mib(needed)} of {mib(free)} free on {place}"
    if on_gpu:
        return Choice("dali_gpu", f"{why}, so that they are decoded anew each epoch, on the GPU")
    other = sorted(_suffixes(source) - TENSORFLOW_SUFFIXES)
    if other:
        return Choice("dali_cpu", f"{why}, and TensorFlow does not decode every {other[0]}")
    if not source.images.are_files and (odd := _not_tensorflows(source.images)):
        return Choice("dali_cpu", f"{why}, and TensorFlow does not decode {odd}")
    return Choice("tf_data", f"{why}; on a CPU it decodes JPEG and PNG faster than DALI")


def _suffixes(source: ImageSource) -> set[str]:
    """Returns how the files' names end; nothing for what archives hold."""
    if not source.images.are_files:
        return set()
    return source.images.files.suffixes()


def _not_tensorflows(blobs: Blobs) -> str | None:
    """Returns the name of an image in a shard that TensorFlow does not decode: of a sample."""
    for index in np.unique(np.linspace(0, len(blobs) - 1, NUM_SAMPLED).astype(int)).tolist():
        try:
            begins = blobs.read(index)[:4]
        except OSError:  # the loader says so
            continue
        if begins.startswith(_DALIS):
            return blobs.name(index)
    return None


def _storable_size(
    source: ImageSource,
    images: ImageConfig,
    augment: AugmentConfig,
    wanted: Callable[[tuple[int, int]], bool],
    *,
    num_threads: int,
) -> tuple[tuple[int, int] | None, str]:
    """Returns the (height, width) in which images can be kept decoded without a change, and why.

    None where they cannot: a window is cut out of images of various sizes.
    """
    if images.stored_size is not None:
        return images.stored_size, "stored_size says what is kept"
    if augment.window == "stretch":
        return images.image_size, "each image is always resized to the same pixels"
    # A few first, which mostly answers it; then all, unless images of that size are not wanted.
    sample = np.unique(np.linspace(0, len(source) - 1, NUM_SAMPLED).astype(int))
    sizes = image_sizes(source.images, sample, num_threads=num_threads)
    height, width = sizes[0].tolist()
    if (sizes == sizes[0]).all():
        if not wanted((height, width)):
            return (height, width), f"{len(sample)} images have one size, {height}x{width}"
        if one_size(source.images, num_threads=num_threads) is not None:
            return (height, width), f"images have one size, {height}x{width}"
    return None, f"window={augment.window!r} is cut out of images of many sizes"


def _for_arrays(source, images, device, num_local: int) -> Choice:
    if images.loader in ("dali_gpu", "dali_cpu", "tf_data"):
        raise UserError(
            f"loader={images.loader!r} decodes files, but the source is decoded arrays; use "
            "'auto', 'memory' or 'cache'"
        )
    if images.loader != "auto":
        return Choice(images.loader, "it was asked for")
    arrays = [each for each in (source.images, source.targets) if each is not None]
    needed, free = sum(each.nbytes for each in arrays), free_bytes(device, num_local)
    if needed <= MEMORY_SHARE * free:
        return Choice("memory", f"the arrays take {mib(needed)} of {mib(free)} free")
    would = f"the arrays would take {mib(needed)} of {mib(free)} free: they stay mapped"
    return Choice("cache", would)


def _bytes(source: ImageSource, size: tuple[int, int], images: ImageConfig) -> int:
    channels = images.channels
    if source.targets is not None:
        channels += 1 if images.targets == "mask" else channels
    return len(source) * size[0] * size[1] * channels
