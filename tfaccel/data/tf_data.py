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
import contextlib
import dataclasses
import functools
import os
import re
from collections.abc import Callable

import numpy as np
import tensorflow as tf

from tfaccel.config import AugmentConfig, ImageConfig
from tfaccel.data import pixels
from tfaccel.data.faults import explained
from tfaccel.data.feed import Feed
from tfaccel.data.host import HostStream
from tfaccel.data.placement import Placement
from tfaccel.data.source import Blobs, ImageSource

# Batches between the first function and the one that is given: what a fault may be in.
IN_FLIGHT = 8
JPEG_SCALES = (1, 2, 4, 8)  # at which libjpeg decodes
MARGIN = 16  # pixels: the largest block that libjpeg decodes at once
# ITU-R 601 in 1/65536, as Pillow and JPEG itself have it; libpng's own conversion is another.
GREY = (19595, 38470, 7471)


class TfDataStream:
    """An endless iterator over one replica's batches.

    Yields (image, label) or, for pairs, (image, target), on the replica's device; rows is the
    plan's `rows_per_replica`, always:
      image: [rows, height, width, channels] `dtype`, (pixel / 255 - mean) / std.
      label: [rows] int32.
      target: like image; where images.targets is "mask", [rows, height, width, 1] int32, grey
        values as they are.

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
        self._source, self._images, self._augment = source, images, feed.augment
        self._fed = fed = collections.deque(maxlen=IN_FLIGHT)
        pool = concurrent.futures.ThreadPoolExecutor(placement.num_threads)
        encoded = _encoded("image", source.images, pool)
        if source.targets is not None:
            targets = _encoded("target", source.targets, pool)

        def begin(number):
            ids = feed.rows(number).ids
            fed.append(ids)
            second = {"second": source.labels[ids]} if source.targets is None else targets(ids)
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

    @contextlib.contextmanager
    def _faults_named(self):
        try:
            yield
        except (OSError, tf.errors.OpError) as error:
            ids = np.unique(np.concatenate(list(self._fed))).tolist()
            cause = explained(
                error,
                self._source,
                self._images,
                self._augment,
                ids=ids,
                refused=_refused,
                decoder="TensorFlow",
            )
            if cause is error:
                raise
            raise cause from error


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
        row["pixels"], _ = _resized(data, draws, fast=True, **settings)
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
      fast: whether a random window that is resized may be decoded and resized less exactly.
    """
    channels = 1 if kind == "mask" else images.channels
    fast = fast and augment.window == "random_resized_crop"
    find = None  # all of it
    if augment.window != "stretch":
        find = functools.partial(
            pixels.window, image_size=images.image_size, augment=augment, draws=draws
        )
    crop, size = tf.cond(
        tf.io.is_jpeg(data),
        lambda: _jpeg_window(data, find, images.image_size, channels, fast=fast),
        lambda: _other_window(data, find, channels),
    )
    if augment.window not in ("center_crop", "random_crop"):  # which have the size already
        crop = _to_size(crop, images.image_size, nearest=kind == "mask", fast=fast)
    return tf.ensure_shape(crop, [*images.image_size, channels]), size


def _jpeg_window(data, find, image_size, channels: int, *, fast: bool):
    """Returns the window that `find` gives, if fast at down to an eighth, and the image's size."""
    size = tf.io.extract_jpeg_shape(data)[:2]
    if find is None:
        return tf.io.decode_jpeg(data, channels=channels, dct_method="INTEGER_ACCURATE"), size
    corner, extent = find(size)
    decode = functools.partial(tf.io.decode_and_crop_jpeg, data, channels=channels)
    if not fast:
        # Colours are interpolated from what lies beside them: decode that too, and cut it off.
        start, stop = tf.maximum(corner - MARGIN, 0), tf.minimum(corner + extent + MARGIN, size)
        image = decode(tf.concat([start, stop - start], 0), dct_method="INTEGER_ACCURATE")
        return _cut(image, corner - start, extent, channels), size

    def scaled(scale):
        # To whole pixels of the smaller image: its window is off by half of one at most.
        start, stop = ((each + scale // 2) // scale for each in (corner, corner + extent))
        faster = {"dct_method": "INTEGER_FAST", "fancy_upscaling": False}
        return decode(tf.concat([start, stop - start], 0), ratio=scale, **faster)

    room = tf.reduce_min(extent // image_size)
    which = sum(tf.cast(room >= scale, tf.int32) for scale in JPEG_SCALES[1:])
    branches = [functools.partial(scaled, scale) for scale in JPEG_SCALES]
    return tf.switch_case(which, branches), size


def _other_window(data, find, channels: int):
    """Returns the window that `find` gives, and the size of the image."""
    image = tf.io.decode_image(data, expand_animations=False)
    grey = tf.shape(image)[-1] < 3  # and perhaps opacity, which is left out as everywhere
    if channels == 1:
        image = tf.cond(grey, lambda: image[..., :1], lambda: _to_grey(image[..., :3]))
    else:
        image = tf.cond(grey, lambda: tf.repeat(image[..., :1], 3, axis=-1), lambda: image[..., :3])
    size = tf.shape(image)[:2]
    return (_cut(image, *find(size), channels) if find else image), size


def _cut(image, corner, extent, channels: int):
    return tf.slice(image, tf.concat([corner, [0]], 0), tf.concat([extent, [channels]], 0))


def _to_grey(image):
    weighted = tf.reduce_sum(tf.cast(image, tf.int32) * GREY, axis=-1, keepdims=True)
    return tf.cast((weighted + 2**15) // 2**16, tf.uint8)


def _to_size(image, new_size, *, nearest: bool, fast: bool):
    """Returns the image resized, uint8: antialiased, or nearest."""
    if nearest:
        size = tf.shape(image)
        for axis in (0, 1):
            index = pixels.nearest_index(size[axis], new_size[axis])
            image = tf.gather(image, index, axis=axis)
        return image
    size = tf.shape(image)[:2]
    resize = functools.partial(tf.image.resize, image, new_size)
    averaged = functools.partial(resize, antialias=True)

    def resized():
        found = tf.cond(pixels.is_shrunk(size, new_size), averaged, resize) if fast else averaged()
        return tf.cast(found + 0.5, tf.uint8)

    # Averaging takes time: 1,100 us of 320x290 to 224x224 pixels, where plain interpolation takes
    # 230; and 170 us of 28x28 pixels that stay as they are (2 CPU cores, 2026-11-21).
    return tf.cond(tf.reduce_all(size == new_size), lambda: image, resized)


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
