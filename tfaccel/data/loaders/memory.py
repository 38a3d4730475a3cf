"""Makes batches of decoded images in memory.

The images are uint8 of one size, in memory or mapped from a file. The device cuts windows and
augments.

    source = decode_all(source, stored_size=(32, 32), channels=3, targets="image", num_threads=8)
    stream = MemoryStream(source, images, feed=feed, placement=placement, dtype="float16",
                          on_device=True)
    image, label = next(stream)

A DeferredStream takes the same arguments, and lets the step make the batches.
"""

import dataclasses
import logging
import threading
import time
from collections.abc import Iterator

import numpy as np
import tensorflow as tf

from tfaccel.common.errors import UserError
from tfaccel.common.tables import counted
from tfaccel.config import CROPS, AugmentConfig, ImageConfig
from tfaccel.data.deferred import Deferred, span, stacked
from tfaccel.data.feed import Feed
from tfaccel.data.loaders import pixels
from tfaccel.data.loaders.decode import decode_into, forms
from tfaccel.data.loaders.host import HostStream
from tfaccel.data.loaders.windows import windows
from tfaccel.data.placement import Placement
from tfaccel.data.source import ArraySource, ImageSource, fed_labels
from tfaccel.process import waits
from tfaccel.runtime.devices import Device

log = logging.getLogger("tfaccel")

# Threads of a stream, and those of other replicas, share Python's lock, which NumPy often releases
# during an operation. One epoch of MNIST on two replicas took 12 ms of CPU and 36 switches with one
# thread at a time, and 18 ms and 400 switches with all at once (2 cores, 2026-11-25).
_ONE_AT_A_TIME = threading.Lock()


class MemoryStream(Iterator):
    """An endless iterator over one replica's batches: see `loaders`."""

    def __init__(
        self,
        source: ArraySource,
        images: ImageConfig,
        *,
        feed: Feed,
        placement: Placement,
        dtype: str,
        on_device: bool,
    ):
        """Copies the images to the device if `on_device`, and starts the threads.

        Args:
          source: the decoded images.
          images, feed, placement, dtype: as in `loaders`.
          on_device: whether all images are kept on the replica's GPU. Otherwise the CPU gathers
            each batch ahead of the step. On a CPU replica this makes no difference.

        Raises:
          UserError: the images do not suit `images` or the augmentation.
        """
        _check(source, images, feed.augment)
        on_device &= placement.device.cuda_ordinal is not None
        resident = _resident(source, placement.device) if on_device else {}
        cuts = feed.augment.window in CROPS and not on_device
        begin = _beginning(source, images, feed, on_device=on_device, cuts=cuts)
        augment = feed.augment.after_window if cuts else feed.augment
        finish = _Finish(images, augment, dtype, placement.device.cuda_ordinal is not None)
        self._stream = HostStream(begin, finish, placement=placement, resident=resident)

    def __next__(self):
        """Returns the next batch."""
        return next(self._stream)


class DeferredStream(Iterator):
    """An endless iterator over `Deferred` batches of a replica that has all images in memory."""

    def __init__(
        self,
        source: ArraySource,
        images: ImageConfig,
        *,
        feed: Feed,
        placement: Placement,
        dtype: str,
        most: int,
    ):
        """Copies the images to the device and starts the threads.

        Args:
          source: the decoded images.
          images, feed, placement, dtype: as in `loaders`.
          most: number of batches in a launch; an epoch's last launch may have fewer.

        Raises:
          UserError: the images do not suit `images` or the augmentation.
        """
        _check(source, images, feed.augment)
        self._resident = _resident(source, placement.device)
        on_gpu = placement.device.cuda_ordinal is not None
        self._finish = _Finish(images, feed.augment, dtype, on_gpu)
        begin_one = _beginning(source, images, feed, on_device=True, cuts=False)

        def begin(number):
            with _ONE_AT_A_TIME:
                return stacked([begin_one(each) for each in span(feed, number, most=most)])

        self._stream = HostStream(begin, None, placement=placement, num_rows_varies=True)

    def __next__(self):
        """Returns the batches of the next launch."""
        return Deferred(next(self._stream), self._resident, self._finish)


def decode_all(
    source: ImageSource,
    *,
    stored_size: tuple[int, int],
    channels: int,
    targets: str,
    num_threads: int,
) -> ArraySource:
    """Decodes every image once, into memory.

    Args:
      source: the encoded images.
      stored_size: (height, width) to which each image is resized, as with the window "stretch".
      channels: channels of the inputs.
      targets: "image" or "mask", for pairs.
      num_threads: number of threads that decode.

    Raises:
      UnreadableError: some images cannot be read or decoded; it has the ids of all of them.
      UserError: the images of a pair differ in size.
    """
    began = time.monotonic()
    form_of = forms(source, stored_size=stored_size, channels=channels, targets=targets)
    arrays = {name: np.empty(*form) for name, form in form_of.items()}
    with waits.on("decoding the images into memory", of=f"{len(source)} of {stored_size}"):
        decode_into(arrays, source, targets=targets, num_threads=num_threads)
    log.info(
        "data: decoded %d images into %.0f MiB of memory in %.1f s",
        len(source),
        sum(each.nbytes for each in arrays.values()) / 2**20,
        time.monotonic() - began,
    )
    return source.decoded(**arrays)


def _check(source: ArraySource, images: ImageConfig, augment: AugmentConfig) -> None:
    height, width, channels = source.images.shape[1:]
    parts = {"images": source.images, "targets": source.targets}
    if images.targets == "mask":
        del parts["targets"]
    for name, array in parts.items():
        if array is not None and array.dtype != images.pixel_dtype:
            raise UserError(
                f"pixel_dtype={images.pixel_dtype!r}, but the arrays have {name} of "
                f"{array.dtype.name}; use pixel_dtype={array.dtype.name!r}, or convert them"
            )
    if channels != images.channels:
        raise UserError(
            f"channels={images.channels}, but the arrays have {channels}; use channels={channels}"
        )
    if source.targets is not None:
        found, wanted = source.targets.shape[-1], 1 if images.targets == "mask" else channels
        if found != wanted:
            raise UserError(
                f"the targets have {counted(found, 'channel')}; expected {wanted}, for "
                f"targets={images.targets!r} and channels={channels}; convert the targets"
            )
    small = height < images.image_size[0] or width < images.image_size[1]
    if small and augment.window in CROPS:
        raise UserError(
            f"the stored images have {height}x{width} pixels, less than the "
            f"{images.image_size[0]}x{images.image_size[1]} that window={augment.window!r} cuts "
            "out; use a smaller image_size, a larger stored_size, or another window"
        )


def _resident(source: ArraySource, device: Device) -> dict[str, tf.Tensor]:
    """Returns images and targets on the device, by name. All streams of a source share them."""
    arrays = {name: each for name, each in _arrays(source).items() if each.ndim == 4}
    for name, array in arrays.items():
        if (name, device) not in source.copies:
            copying = waits.on("copying the images to the device")
            with copying, tf.device(device.name):
                is_gpu = device.name.startswith("/gpu")
                source.copies[name, device] = _on_gpu(array) if is_gpu else tf.constant(array)
    return {name: source.copies[name, device] for name in arrays}


def _on_gpu(array: np.ndarray) -> tf.Tensor:
    """Returns the array on the GPU of the current `tf.device`, and waits until it is there.

    TensorFlow copies an array of NumPy to other memory of the host before it copies it to the GPU.
    It reads an array that is passed by DLPack where it is: 1.9 GB took 0.3 s on an H200 host, and 1
    to 2 s by `tf.constant`. NumPy does not pass arrays by DLPack that must not be written to, such
    as a file that is mapped to read it.
    """
    if not (array.flags.c_contiguous and array.flags.writeable):
        return tf.constant(array)
    copy = tf.identity(tf.experimental.dlpack.from_dlpack(array.__dlpack__()))
    # `tf.test.experimental.sync_devices` would also ask the devices of other workers, and fail.
    tf.raw_ops.SyncDevice()
    return copy


def _arrays(source: ArraySource) -> dict[str, np.ndarray]:
    second = source.targets
    if second is None:
        second = fed_labels(source)
    return {"pixels": source.images, "second": second}


def _beginning(source: ArraySource, images: ImageConfig, feed: Feed, *, on_device, cuts):
    """Returns a function of a batch number that makes the host's part: ids and draws, or pixels.

    With `on_device` the device has the images and gathers them by their ids. With `cuts` the host
    cuts out the windows, so that only used pixels are read and copied.
    """
    gathered = {
        name: each for name, each in _arrays(source).items() if not (on_device and each.ndim == 4)
    }

    def begin(number):
        ids, draws = feed.rows(number).ids, feed.draws(number)
        corners = None
        if cuts:
            sizes = np.tile(source.images.shape[1:3], (len(ids), 1))
            drawn = draws.pop("window", None)
            corners, _ = windows(sizes, images.image_size, feed.augment, drawn)
        taken = {
            name: _taken(each, ids, corners, images.image_size) for name, each in gathered.items()
        }
        return taken | ({"ids": ids} if on_device else {}) | draws

    return begin


def _taken(array: np.ndarray, ids, corners, size) -> np.ndarray:
    """Returns a batch's labels, images or windows."""
    if corners is None or array.ndim < 4:
        return np.asarray(array[ids])
    cut = [
        array[index, top : top + size[0], left : left + size[1]]
        for index, (top, left) in zip(ids, corners, strict=True)
    ]
    return np.stack(cut)


@dataclasses.dataclass(frozen=True)
class _Finish:
    """Makes a batch from the arrays of `begin` and, with "ids", from the images on the device."""

    images: ImageConfig
    augment: AugmentConfig
    dtype: str
    on_gpu: bool

    def __call__(self, batch: dict[str, tf.Tensor]) -> tuple:
        draws = dict(batch)
        taken, second, ids = draws.pop("pixels"), draws.pop("second"), draws.pop("ids", None)
        if ids is not None:
            taken = _gathered(taken, ids)
            second = second if second.shape.rank < 4 else _gathered(second, ids)
        return pixels.examples(taken, second, draws, **vars(self))


# XLA's tf.gather works with more than 2**31 pixels.
_gathered = tf.function(tf.gather, jit_compile=True, autograph=False)
