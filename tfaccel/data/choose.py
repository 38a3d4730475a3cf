"""Which loader suits the data and the machine, and why.

Takes a source, the settings and the replica's device; gives a loader's name and the reason, in
words, for the log.

    loader, reason = choose_loader(source, images, augment, device=Device("/gpu:0", 0))
"""

import concurrent.futures
import functools
import os
import pathlib

import numpy as np
import psutil
import pynvml
import tensorflow as tf

from tfaccel.config import AugmentConfig, ImageConfig
from tfaccel.data.source import ArraySource, ImageSource
from tfaccel.data.sources.pillow import image_size
from tfaccel.errors import UserError
from tfaccel.runtime import Device

# Of the memory that is free when the data is opened, for training images, and again for test ones:
# the model, its activations and, on the CPU, other programs need the rest.
MEMORY_SHARE = 0.25

TENSORFLOW_SUFFIXES = {".bmp", ".gif", ".jpeg", ".jpg", ".png", ".webp"}
NUM_SAMPLED = 64  # images whose headers are read to see whether all have one size


def choose_loader(
    source: ImageSource | ArraySource,
    images: ImageConfig,
    augment: AugmentConfig,
    *,
    device: Device,
    num_threads: int = 1,
) -> tuple[str, str]:
    """Returns one of "dali_gpu", "dali_cpu", "tf_data", "memory", "cache", and the reason.

    It never chooses "cache" for files: images of many sizes would lose pixels, and a disk is not
    always faster than a decoder.

    Args:
      source: the images.
      images: what they are to become.
      augment: likewise.
      device: of the replicas.
      num_threads: that read headers.

    Raises:
      UserError: the loader that was asked for cannot be had.
    """
    on_gpu = device.cuda_ordinal is not None
    if images.loader == "dali_gpu" and not on_gpu:
        raise UserError("loader='dali_gpu' on the CPU; use 'dali_cpu', 'auto', or a GPU")
    if isinstance(source, ArraySource):
        return _for_arrays(source, images, device)
    if images.loader != "auto":
        return images.loader, "it was asked for"
    stored, why = storable_size(source, images, augment, num_threads=num_threads)
    if stored is not None:
        needed = _bytes(source, stored, images)
        free = _free_bytes(device)
        place = "the GPU" if on_gpu else "this machine"
        if needed <= MEMORY_SHARE * free:
            return "memory", (
                f"{why}; all {len(source)} take {_mib(needed)} of {_mib(free)} free on {place}"
            )
        why = f"all {len(source)} would take {_mib(needed)} of {_mib(free)} free on {place}"
    if on_gpu:
        return "dali_gpu", f"{why}, so that they are decoded anew each epoch, on the GPU"
    suffixes = {pathlib.Path(each).suffix.lower() for each in source.images.files[:10000]}
    other = sorted(suffixes - TENSORFLOW_SUFFIXES) if source.images.are_files else []
    if other:
        return "dali_cpu", f"{why}, and TensorFlow does not decode {other[0]}"
    return "tf_data", f"{why}; on a CPU it decodes JPEG and PNG faster than DALI"


def storable_size(
    source: ImageSource, images: ImageConfig, augment: AugmentConfig, *, num_threads: int
) -> tuple[tuple[int, int] | None, str]:
    """Returns the (height, width) in which images can be kept decoded without a change, and why.

    None where they cannot: a window is cut out of images of various sizes.
    """
    if images.stored_size is not None:
        return images.stored_size, "stored_size says what is kept"
    if augment.window == "stretch":
        return images.image_size, "each image is always resized to the same pixels"
    # A few first, which mostly answers it; then all.
    sample = np.unique(np.linspace(0, len(source) - 1, NUM_SAMPLED).astype(int)).tolist()
    for ids in (sample, range(len(source))):
        with concurrent.futures.ThreadPoolExecutor(num_threads) as pool:
            sizes = set(pool.map(functools.partial(image_size, source.images), ids))
        if len(sizes) > 1:
            return None, f"window={augment.window!r} is cut out of images of many sizes"
    size = sizes.pop()
    return size, f"images have one size, {size[0]}x{size[1]}"


def _for_arrays(source, images, device) -> tuple[str, str]:
    if images.loader in ("dali_gpu", "dali_cpu", "tf_data"):
        raise UserError(
            f"loader={images.loader!r} decodes files, but the source is decoded arrays; use "
            "'auto', 'memory' or 'cache'"
        )
    if images.loader != "auto":
        return images.loader, "it was asked for"
    arrays = [each for each in (source.images, source.targets) if each is not None]
    needed, free = sum(each.nbytes for each in arrays), _free_bytes(device)
    if needed <= MEMORY_SHARE * free:
        return "memory", f"the arrays take {_mib(needed)} of {_mib(free)} free"
    return "cache", f"the arrays would take {_mib(needed)} of {_mib(free)} free: they stay mapped"


def _bytes(source: ImageSource, size: tuple[int, int], images: ImageConfig) -> int:
    channels = images.channels
    if source.targets is not None:
        channels += 1 if images.targets == "mask" else channels
    return len(source) * size[0] * size[1] * channels


def _free_bytes(device: Device) -> int:
    """Returns the memory that may be taken for images now: on the host, where they are decoded, and
    on the replica's GPU."""
    on_host = psutil.virtual_memory().available
    if device.cuda_ordinal is None:
        return on_host
    pynvml.nvmlInit()
    try:
        name = nvml_name(device.cuda_ordinal, os.environ.get("CUDA_VISIBLE_DEVICES"))
        by = pynvml.nvmlDeviceGetHandleByIndex
        by = pynvml.nvmlDeviceGetHandleByUUID if isinstance(name, str) else by
        free = pynvml.nvmlDeviceGetMemoryInfo(by(name)).free
    finally:
        pynvml.nvmlShutdown()
    return min(on_host, free, _limit_bytes(device) or free)


def nvml_name(cuda_ordinal: int, cuda_visible_devices: str | None) -> int | str:
    """Returns what NVML calls a GPU, an index or a UUID, by its place among those CUDA sees."""
    if not cuda_visible_devices:
        return cuda_ordinal
    name = cuda_visible_devices.split(",")[cuda_ordinal].strip()
    return int(name) if name.isdigit() else name


def _limit_bytes(device: Device) -> int | None:
    """Returns the limit that `memory` in RuntimeConfig sets on TensorFlow's part of a GPU."""
    gpus = tf.config.get_visible_devices("GPU")
    place = int(device.name.rpartition(":")[2])
    limits = tf.config.get_logical_device_configuration(gpus[place]) if place < len(gpus) else None
    limit = limits[0].memory_limit if limits else None
    return None if limit is None else int(limit) << 20


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / 2**20:,.0f} MiB"
