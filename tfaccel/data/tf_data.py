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
      UnreadableExamples: from `next`, when files cannot be decoded. The stream is over then.
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
          UnreadableExamples: a file of the first batch cannot be read.
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
            if source.targets is None:
                second = {"second": source.labels[ids]}
            else:
                second = targets(ids)
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
                refusal=_refusal,
                decoder="TensorFlow",
            )
            if cause is error:
                raise
            raise cause from error


def _encoded(name: str, blobs: Blobs, pool) -> Callable[[np.ndarray], dict[str, np.ndarray]]:
    """Returns the function from examples to what they are read from, by name."""
    if blobs.are_files:
        files = np.array(blobs.files, dtype=object)
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
    find = functools.partial(
        pixels.window, image_size=images.image_size, augment=augment, draws=draws
    )
    fast = fast and augment.window == "random_resized_crop"
    crop, size = tf.cond(
        tf.io.is_jpeg(data),
        lambda: _jpeg_window(data, find, images.image_size, channels, fast=fast),
        lambda: _other_window(data, find, channels),
    )
    crop.set_shape([None, None, channels])
    return tf.ensure_shape(_to_size(crop, images.image_size, augment, kind), [*images.image_size, channels]), size


def _jpeg_window(data, find, image_size, channels, *, fast):
    size = tf.io.extract_jpeg_shape(data)[:2]
    corner, extent = find(size)
    if not fast:
        ...
