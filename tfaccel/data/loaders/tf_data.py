"""One replica's batches through tf.data, on the CPU.

Takes encoded images and a Feed, which says what each batch holds; gives tensors on the replica's
device. Images are decoded and resized one by one, in parallel; the rest is done with whole batches,
on the device.

    stream = TfDataStream(source, images, feed=feed, placement=placement, dtype="float16")
    image, label = next(stream)

JPEG, PNG, BMP, GIF and WebP, by content, whatever a file's name says.
"""

import collections
import concurrent.futures
import dataclasses
import functools
import os
import re
from collections.abc import Callable

import numpy as np
import tensorflow as tf

from tfaccel.config import CROPS, AugmentConfig, ImageConfig
from tfaccel.data.feed import Feed
from tfaccel.data.loaders import faults, pixels
from tfaccel.data.loaders.host import HostStream
from tfaccel.data.placement import Placement
from tfaccel.data.source import Blobs, ImageSource

# Batches between the first function and the one that is given: what a fault may be in.
IN_FLIGHT = 8
JPEG_SCALES = (1, 2, 4, 8)  # at which libjpeg decodes
MARGIN = 16  # pixels: the largest block that libjpeg decodes at once
# ITU-R 601 in 1/65536, as Pillow and JPEG itself have it; libpng's own conversion is another.
GREY = (19595, 38470, 7471)


class TfDataStream:
    """An endless iterator over one replica's batches: see `loaders`.

    Raises:
      UnreadableError: from `next`, when files cannot be decoded. The stream is over then.
      UserError: likewise, when an image is smaller than its crop, or a pair has two sizes.
    """

    def __init__(
        self,
        source: ImageSource,
        images: ImageConfig,
        *,
        feed: Feed,
        placement: Placement,
        dtype: str,
    ):
        """Reads the first batch's bytes, and starts the threads.

        Args:
          source: the encoded images.
          images: size, channels and normalisation.
          feed: which of them each batch holds, with which draws.
          placement: the replica's device, and how many threads.
          dtype: "float16" or "float32", of the images.

        Raises:
          UnreadableError: a file of the first batch cannot be read.
        """
        fed = collections.deque(maxlen=_in_flight(feed, placement))
        self._faults_named = functools.partial(
            faults.named,
            source,
            images,
            feed.augment,
            fed=fed,
            refused=_refused,
            decoder="TensorFlow",
        )
        pool = concurrent.futures.ThreadPoolExecutor(placement.num_threads)
        encoded = _encoded("image", source.images, pool)
        if source.targets is not None:
            targets = _encoded("target", source.targets, pool)

        def begin(number):
            ids = feed.rows(number).ids
            fed.append(ids)
            second = (
                {"second": source.labels[ids].astype(np.int64)}
                if source.targets is None
                else targets(ids)
            )
            return encoded(ids) | second | feed.draws(number)

        settings = {"images": images, "augment": feed.augment}
        with self._faults_named():
            self._stream = HostStream(
                begin,
                functools.partial(_finish, dtype=dtype, **settings),
                placement=placement,
                each_row=functools.partial(_row, **settings),
            )

    def __iter__(self):
        """Returns itself."""
        return self

    def __next__(self):
        """Returns the next batch."""
        with self._faults_named():
            return next(self._stream)


def _in_flight(feed: Feed, placement: Placement) -> int:
    """Returns how many batches a fault may be in: rows are decoded ahead, too, by each thread."""
    rows = feed.plan.rows_per_replica
    return IN_FLIGHT + -(-2 * placement.num_threads // rows)


def _encoded(name: str, blobs: Blobs, pool) -> Callable[[np.ndarray], dict[str, np.ndarray]]:
    """Returns the function from examples to what they are read from, by name."""
    if blobs.are_files:
        files = np.array([os.fsencode(each) for each in blobs.files], dtype=object)
        return lambda ids: {f"{name}.path": files[ids]}
    return lambda ids: {
        f"{name}.bytes": np.array(list(pool.map(blobs.read, ids.tolist())), dtype=object)
    }


# One row: bytes to uint8 pixels of the batch's size.


def _row(row: dict, *, images: ImageConfig, augment: AugmentConfig) -> dict:
    """Returns a row whose "pixels", and "second" of pairs, are [*image_size, channels] uint8."""
    row = dict(row)
    draws = row.pop("window", None)
    data, target = _read(row, "image"), _read(row, "target")
    settings = {"images": images, "augment": augment}
    if target is None:
        fast = augment.window == "random_resized_crop"
        row["pixels"], _ = _resized(data, draws, fast=fast, **settings)
        return row
    row["pixels"], size = _resized(data, draws, **settings)
    row["second"], target_size = _resized(target, draws, kind=images.targets, **settings)
    same = tf.debugging.assert_equal(size, target_size, "a pair of two sizes")
    with tf.control_dependencies([same]):
        row["pixels"] = tf.identity(row["pixels"])
    return row


def _read(row: dict, name: str):
    if f"{name}.path" in row:
        return tf.io.read_file(row.pop(f"{name}.path"))
    return row.pop(f"{name}.bytes", None)


def _resized(data, draws, *, images, augment, kind="image", fast=False):
    """Returns the window of an encoded image, resized, and the size that the image has.

    Args:
      data: the encoded image.
      draws: of its window; None if it is not random.
      images: size and channels.
      augment: which window.
      kind: "image" or "mask".
      fast: whether it may be decoded and resized less exactly.
    """
    channels = 1 if kind == "mask" else images.channels
    find = None  # all of it
    if augment.window != "stretch":
        find = functools.partial(
            pixels.window, image_size=images.image_size, augment=augment, draws=draws
        )
    is_crop = augment.window in CROPS
    to_size = _fast if fast else _nearest if kind == "mask" else _averaged

    def from_jpeg():
        size = tf.io.extract_jpeg_shape(data)[:2]
        if fast:
            return _fast_jpeg(data, *find(size), images.image_size, channels), size
        image = _exact_jpeg(data, size, find, channels)
        return (image if is_crop else to_size(image, images.image_size)), size

    def from_other():
        image = _decoded(data, channels)
        size = tf.shape(image)[:2]
        image = _cut(image, *find(size), channels) if find else image
        return (image if is_crop else to_size(image, images.image_size)), size

    image, size = tf.cond(tf.io.is_jpeg(data), from_jpeg, from_other)
    return tf.ensure_shape(image, [*images.image_size, channels]), size


def _exact_jpeg(data, size, find, channels: int):
    """Returns the window that `find` gives; all, if it is None."""
    if find is None:
        return tf.io.decode_jpeg(data, channels=channels, dct_method="INTEGER_ACCURATE")
    corner, extent = find(size)
    # Colours are interpolated from what lies beside them: decode that too, and cut it off.
    start, stop = tf.maximum(corner - MARGIN, 0), tf.minimum(corner + extent + MARGIN, size)
    image = tf.io.decode_and_crop_jpeg(
        data,
        tf.concat([start, stop - start], 0),
        channels=channels,
        dct_method="INTEGER_ACCURATE",
    )
    return _cut(image, corner - start, extent, channels)


def _fast_jpeg(data, corner, extent, new_size, channels: int):
    """Returns a window, decoded as small as it may be and resized."""

    def branch(scale, to_size):
        # To whole pixels of the smaller image: its window is off by half of one at most.
        start, stop = ((each + scale // 2) // scale for each in (corner, corner + extent))
        image = tf.io.decode_and_crop_jpeg(
            data,
            tf.concat([start, stop - start], 0),
            channels=channels,
            ratio=scale,
            dct_method="INTEGER_FAST",
            fancy_upscaling=False,
        )
        return _rounded(to_size(image, new_size))

    # One switch for both choices: what TensorFlow does not take costs time as well.
    branches = [functools.partial(branch, scale, tf.image.resize) for scale in JPEG_SCALES]
    averaged = functools.partial(tf.image.resize, antialias=True)
    branches.append(functools.partial(branch, JPEG_SCALES[-1], averaged))
    room = tf.reduce_min(extent // new_size)
    limits = [*JPEG_SCALES[1:], 2 * JPEG_SCALES[-1]]  # from the last on, see pixels.is_shrunk
    return tf.switch_case(tf.raw_ops.Bucketize(input=room, boundaries=limits), branches)


def _decoded(data, channels: int):
    """Returns all of an image that is not a JPEG."""
    image = tf.io.decode_image(data, expand_animations=False)
    grey = tf.shape(image)[-1] < 3  # and perhaps opacity, which is left out as everywhere
    if channels == 1:
        image = tf.cond(grey, lambda: image[..., :1], lambda: _to_grey(image[..., :3]))
    else:
        image = tf.cond(grey, lambda: tf.repeat(image[..., :1], 3, axis=-1), lambda: image[..., :3])
    return tf.ensure_shape(image, [None, None, channels])


def _to_grey(image):
    weighted = tf.reduce_sum(tf.cast(image, tf.int32) * GREY, axis=-1, keepdims=True)
    return tf.cast((weighted + 2**15) // 2**16, tf.uint8)


def _cut(image, corner, extent, channels: int):
    return tf.slice(image, tf.concat([corner, [0]], 0), tf.concat([extent, [channels]], 0))


def _nearest(image, new_size):
    """Returns the image resized to the nearest pixels."""
    size = tf.shape(image)
    for axis in (0, 1):
        image = tf.gather(image, pixels.nearest_index(size[axis], new_size[axis]), axis=axis)
    return image


def _averaged(image, new_size):
    """Returns the image resized, antialiased.

    Which takes time: 1,100 us of 320x290 to 224x224 pixels, where plain interpolation takes 230;
    and 170 us of 28x28 pixels that stay as they are (2 CPU cores, 2026-11-21).
    """

    def resized():
        return _rounded(tf.image.resize(image, new_size, antialias=True))

    return tf.cond(tf.reduce_all(tf.shape(image)[:2] == new_size), lambda: image, resized)


def _fast(image, new_size):
    """Returns the image resized, antialiased if it must be."""
    resize = functools.partial(tf.image.resize, image, new_size)
    averaged = functools.partial(resize, antialias=True)
    shrunk = pixels.is_shrunk(tf.shape(image)[:2], new_size)
    return _rounded(tf.cond(shrunk, averaged, resize))


def _rounded(image):
    return tf.cast(image + 0.5, tf.uint8)


# All rows.


def _finish(batch: dict, *, images: ImageConfig, augment: AugmentConfig, dtype: str):
    """Returns a batch from windows, labels or targets, and the other draws."""
    draws = dict(batch)
    taken = draws.pop("pixels"), draws.pop("second")
    whole = dataclasses.replace(augment, window="stretch")  # windows are taken already
    return pixels.examples(*taken, draws, images=images, augment=whole, dtype=dtype)


def _refused(blobs: Blobs, ids) -> list[str]:
    """Returns "name (cause)" for each image that TensorFlow cannot decode."""
    bad = []
    for index in ids:
        try:
            tf.io.decode_image(blobs.read(index))
        except tf.errors.OpError as error:
            cause = re.sub(r"^{{.*?}} | \[Op:.*", "", error.message.splitlines()[0])
            bad.append(f"{blobs.name(index)} ({cause})")
    return bad
