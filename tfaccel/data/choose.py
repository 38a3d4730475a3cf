"""Chooses the loader that suits the data and the machine.

The choice has the loader's name, the reason for the log, and the size in which the loader keeps
decoded images.

    choice = choose_loader(source, images, augment, device=Device("/gpu:0", 0))
"""

from collections.abc import Callable
from typing import NamedTuple

from tfaccel.common.errors import UserError
from tfaccel.config import AugmentConfig, ImageConfig
from tfaccel.data.free_memory import free_bytes, mib
from tfaccel.data.loaders.decode import forms
from tfaccel.data.one_size import one_size
from tfaccel.data.source import ArraySource, Blobs, ImageSource, spread
from tfaccel.data.sources.pillow import image_sizes
from tfaccel.runtime.devices import Device

# The share of the free memory that the training images may take, and again the test images. The
# model, its activations and, on a CPU, other programs need the rest.
MEMORY_SHARE = 0.25

# BMP is not in this list, because TensorFlow decodes fewer kinds of BMP than DALI.
TENSORFLOW_SUFFIXES = {".gif", ".jpeg", ".jpg", ".png", ".webp"}
# First bytes of TIFF, PPM and JPEG 2000 files, which only DALI decodes.
_DALI_ONLY = (b"II*", b"MM\0*", b"P4", b"P5", b"P6", b"\0\0\0\x0c", b"\xff\x4f\xff")
NUM_SAMPLED = 64  # images that are read to find out whether all images have one size and format


class Choice(NamedTuple):
    """The chosen loader.

    Attributes:
      loader: "dali_gpu", "dali_cpu", "tf_data", "memory" or "cache".
      reason: a clause for the log.
      stored_size: (height, width) in which "memory" and "cache" keep decoded files; else None.
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

    `loader="auto"` never chooses "cache" for files: images of many sizes would lose pixels, and a
    disk is not always faster than a decoder.

    Args:
      source: the images.
      images: the settings of the images.
      augment: the settings of the augmentation.
      device: the replica's device.
      num_local: number of workers on this machine, which share its memory.
      num_threads: number of threads that read image headers.

    Raises:
      UserError: the requested loader is not available, or does not suit these images.
    """
    on_gpu = device.cuda_ordinal is not None
    has_rasters = isinstance(source, ImageSource) and source.images.form is not None
    if has_rasters and images.loader.startswith("dali"):
        raise UserError(
            f"loader={images.loader!r} reads images of 8 bits with 1 or 3 channels; for "
            f"channels={images.channels}, pixel_dtype={images.pixel_dtype!r} and .npy files use "
            "'memory', 'tf_data', 'cache' or 'auto'"
        )
    if images.loader == "dali_gpu" and not on_gpu:
        raise UserError("loader='dali_gpu' needs a GPU; use loader='dali_cpu' or 'auto'")
    if isinstance(source, ArraySource):
        return _for_arrays(source, images, device, num_local)
    if images.loader in ("dali_gpu", "dali_cpu", "tf_data"):
        return Choice(images.loader, "you asked for it")
    place = "the GPU" if on_gpu else "this machine"
    free = free_bytes(device, num_local) if images.loader == "auto" else 0

    def fits(size):
        return _decoded_bytes(source, size, images) <= MEMORY_SHARE * free

    wanted = fits if images.loader == "auto" else lambda size: True
    stored, why = _storable_size(source, images, augment, wanted, num_threads=num_threads)
    if images.loader != "auto":
        if stored is None:
            raise UserError(
                f"loader={images.loader!r} keeps images of one size, but {why}; give stored_size, "
                "e.g. (256, 256), or use another loader"
            )
        return Choice(images.loader, "you asked for it", stored)
    if stored is not None:
        memory = f"{mib(_decoded_bytes(source, stored, images))} of {mib(free)} free on {place}"
        if fits(stored):
            return Choice("memory", f"{why}; all {len(source)} images take {memory}", stored)
        why = f"all {len(source)} images would take {memory}"
    if has_rasters:
        return Choice("tf_data", f"{why}, and DALI's loaders do not read {_in_words(images)}")
    if on_gpu:
        return Choice("dali_gpu", f"{why}, so the GPU decodes them again in each epoch")
    suffixes = source.images.files.suffixes() if source.images.are_files else set()
    if other := sorted(suffixes - TENSORFLOW_SUFFIXES):
        return Choice("dali_cpu", f"{why}, and TensorFlow does not decode every {other[0]} file")
    if not source.images.are_files and (name := _dali_only_image(source.images)):
        return Choice("dali_cpu", f"{why}, and TensorFlow does not decode {name}")
    return Choice("tf_data", f"{why}; on a CPU, TensorFlow decodes JPEG and PNG faster than DALI")


def _in_words(images: ImageConfig) -> str:
    """Returns why images are read as they are stored."""
    if images.are_usual:
        return ".npy files"
    channels = f"{images.channels} channel{'s' if images.channels > 1 else ''}"
    return f"{channels} of {images.pixel_dtype}"


def _dali_only_image(blobs: Blobs) -> str | None:
    """Returns the name of a sampled image in a shard that TensorFlow does not decode, or None."""
    for index in spread(len(blobs), NUM_SAMPLED).tolist():
        try:
            begins = blobs.read(index)[:4]
        except OSError:  # the loader reports it
            continue
        if begins.startswith(_DALI_ONLY):
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
    """Returns the (height, width) in which decoded images can be kept unchanged, and the reason.

    The size is None where a window is cut out of images of many sizes.
    """
    if images.stored_size is not None:
        return images.stored_size, "stored_size gives the size to keep"
    if augment.window == "stretch":
        return images.image_size, "each image is resized to the same pixels in every epoch"
    # A sample mostly gives the answer. All headers are read only where images may fit.
    sample = spread(len(source), NUM_SAMPLED)
    sizes = image_sizes(source.images, sample, num_threads=num_threads)
    height, width = sizes[0].tolist()
    if (sizes == sizes[0]).all():
        if not wanted((height, width)):
            return (height, width), f"{len(sample)} sampled images have one size, {height}x{width}"
        if one_size(source.images, num_threads=num_threads) is not None:
            return (height, width), f"all images have one size, {height}x{width}"
    return None, f"window={augment.window!r} is cut out of images of many sizes"


def _for_arrays(source, images, device, num_local: int) -> Choice:
    if images.loader in ("dali_gpu", "dali_cpu", "tf_data"):
        raise UserError(
            f"loader={images.loader!r} decodes files, but the source is decoded arrays; use "
            "'auto', 'memory' or 'cache'"
        )
    if images.loader != "auto":
        return Choice(images.loader, "you asked for it")
    arrays = [each for each in (source.images, source.targets) if each is not None]
    needed, free = sum(each.nbytes for each in arrays), free_bytes(device, num_local)
    if needed <= MEMORY_SHARE * free:
        return Choice("memory", f"the arrays take {mib(needed)} of {mib(free)} free")
    reason = f"the arrays would take {mib(needed)} of {mib(free)} free, so they stay where they are"
    return Choice("cache", reason)


def _decoded_bytes(source: ImageSource, size: tuple[int, int], images: ImageConfig) -> int:
    settings = {"channels": images.channels, "targets": images.targets}
    return sum(each.num_bytes for each in forms(source, stored_size=size, **settings).values())
