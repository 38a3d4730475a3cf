"""Makes one replica's batches with tf.data, on the CPU.

Images are decoded and resized one by one, in parallel. The other operations take whole batches, on
the device.

    stream = TfDataStream(source, images, feed=feed, placement=placement, dtype="float16")
    image, label = next(stream)
"""

import collections
import concurrent.futures
import functools
import math
import re
from collections.abc import Callable, Iterator

import numpy as np
import tensorflow as tf

from tfaccel.config import AugmentConfig, ImageConfig
from tfaccel.data.feed import Feed
from tfaccel.data.loaders import faults, pixels
from tfaccel.data.loaders.host import HostStream
from tfaccel.data.loaders.tf_image import COLOUR_TYPES, raster_png, raster_windowed, windowed
from tfaccel.data.placement import Placement
from tfaccel.data.raster import PNG_SIGNATURE, RasterForm, is_animated, read_as
from tfaccel.data.source import Blobs, ImageSource, fed_labels
from tfaccel.data.sources.kinds import HEAD_BYTES, Template, Unseen, agreed, usual_heads
from tfaccel.data.stores.ahead import Ahead

# Batches that tf.data may have begun but not given yet; a fault may be in any of them.
IN_FLIGHT = 8


class TfDataStream(Iterator):
    """An endless iterator over one replica's batches: see `loaders`.

    Raises:
      UnreadableError: `next` raises it if files cannot be decoded. The stream has then ended.
      UserError: `next` raises it if an image is smaller than its crop, or a pair's sizes differ.
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
        """Starts the threads, and reads the first batch's bytes if they are in shards.

        Args:
          source: the encoded images.
          images, feed, placement, dtype: as in `loaders`.

        Raises:
          UnreadableError: an image of the first batch cannot be read from its shard.
        """
        # Each thread also decodes rows ahead.
        rows_ahead, rows = 2 * placement.num_threads, feed.plan.rows_per_replica
        fed = collections.deque(maxlen=IN_FLIGHT + math.ceil(rows_ahead / rows))
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
        else:
            labels = fed_labels(source)
        unseen, ahead = Unseen(len(source)), Ahead(source, feed)

        def begin(number):
            ahead(number)
            ids = feed.rows(number).ids
            fed.append(ids)
            is_new = unseen.among(ids, number)
            for part in filter(None, (source.images, source.targets)):
                # TensorFlow would hang on a FIFO.
                part.check_files(ids[is_new], pool, num_threads=placement.num_threads)
            second = {"second": labels[ids]} if source.targets is None else targets(ids)
            return encoded(ids) | second | {"is_new": is_new} | feed.draws(number)

        with self._faults_named():
            self._stream = HostStream(
                begin,
                functools.partial(
                    _finish,
                    images=images,
                    augment=feed.augment.after_window,
                    dtype=dtype,
                    on_gpu=placement.device.cuda_ordinal is not None,
                ),
                placement=placement,
                each_row=functools.partial(
                    _row, images=images, augment=feed.augment, form=source.images.form
                ),
            )

    def __next__(self):
        """Returns the next batch."""
        with self._faults_named():
            return next(self._stream)


def _encoded(name: str, blobs: Blobs, pool) -> Callable[[np.ndarray], dict[str, np.ndarray]]:
    """Returns a function from ids to the examples' paths or bytes, in a dict with one name."""
    if blobs.are_read_as_files:
        encoded = blobs.files.encoded
        return lambda ids: {
            f"{name}.path": np.array([encoded(index) for index in ids.tolist()], dtype=object)
        }
    return lambda ids: {
        f"{name}.bytes": np.array(list(pool.map(blobs.read, ids.tolist())), dtype=object)
    }


# One row: bytes to pixels of the batch's size, uint8 or as they are stored.


def _row(
    row: dict, *, images: ImageConfig, augment: AugmentConfig, form: RasterForm | None
) -> dict:
    """Returns a row with "pixels", and "second" for pairs: [*image_size, channels]."""
    row = dict(row)
    draws, is_new = row.pop("window", None), row.pop("is_new")
    data, target = _read(row, "image"), _read(row, "target")
    settings = {"images": images, "augment": augment}

    def made(data, kind="image", *, fast=False):
        if form is not None and kind == "image":
            pixels = _raster(data, is_new, images, form)
            return raster_windowed(pixels, draws, fast=fast, **settings)
        data = _checked(data, is_new, is_mask=kind == "mask")
        return windowed(data, draws, kind=kind, fast=fast, **settings)

    if target is None:
        row["pixels"], _ = made(data, fast=augment.window == "random_resized_crop")
        return row
    row["pixels"], size = made(data)
    row["second"], target_size = made(target, images.targets)
    same = tf.debugging.assert_equal(size, target_size, "the sizes of a pair differ")
    with tf.control_dependencies([same]):
        row["pixels"] = tf.identity(row["pixels"])
    return row


def _raster(data, is_new, images: ImageConfig, form: RasterForm):
    """Returns the pixels of an image that is read as it is stored.

    TensorFlow decodes a PNG, after Python has looked for an animation when it is first read. NumPy
    and Pillow decode TIFF and .npy files, in Python.
    """

    def by_tensorflow():
        moves = functools.partial(tf.numpy_function, _is_animated, [data], tf.bool)
        moves = tf.debugging.Assert(~tf.cond(is_new, moves, lambda: False), ["an animated PNG"])
        with tf.control_dependencies([moves]):
            return raster_png(data, images)

    def by_python():
        pixels = tf.numpy_function(functools.partial(read_as, form=form), [data], form.dtype)
        return tf.ensure_shape(pixels, [None, None, images.channels])

    if images.channels not in COLOUR_TYPES or form.dtype == "float32":
        return by_python()
    is_png = tf.strings.substr(data, 0, len(PNG_SIGNATURE)) == PNG_SIGNATURE
    return tf.cond(is_png, by_tensorflow, by_python)


def _read(row: dict, name: str):
    if f"{name}.path" in row:
        return tf.io.read_file(row.pop(f"{name}.path"))
    return row.pop(f"{name}.bytes", None)


def _checked(data, is_new, *, is_mask: bool):
    """Returns an encoded image, after a check of its kind if it is read for the first time.

    The check in Python takes 15 us, one image at a time. Images of the usual kinds do not need it.
    """

    def fits():
        usual = is_usual(tf.io.decode_raw(data, tf.uint8, fixed_length=HEAD_BYTES), is_mask=is_mask)
        check = functools.partial(_agreed, is_mask=is_mask)
        return tf.cond(usual, lambda: True, lambda: tf.numpy_function(check, [data], tf.bool))

    fits = tf.cond(is_new, fits, lambda: True)
    with tf.control_dependencies([tf.debugging.Assert(fits, ["an image of an unusual kind"])]):
        return tf.identity(data)


def is_usual(head: tf.Tensor, *, is_mask: bool) -> tf.Tensor:
    """Returns whether `kinds.are_usual` is true for an image, as a bool tensor.

    Args:
      head: [HEAD_BYTES] uint8, the image's first bytes, filled up with zeros.
      is_mask: whether the image's grey levels are classes.
    """

    def has(template: Template) -> tf.Tensor:
        return tf.reduce_all((head >= template.least) & (head <= template.most))

    known = [has(each) for each in usual_heads(are_masks=is_mask)]
    return functools.reduce(tf.logical_or, known)


def _is_animated(data: bytes) -> np.bool_:
    return np.bool_(is_animated(data))


def _agreed(data: bytes, *, is_mask: bool) -> np.bool_:
    return np.bool_(agreed(data, is_mask=is_mask))


# Whole batches.


def _finish(batch: dict, *, images: ImageConfig, augment: AugmentConfig, dtype: str, on_gpu: bool):
    """Returns a batch from windows, labels or targets, and the other draws."""
    draws = dict(batch)
    taken = draws.pop("pixels"), draws.pop("second")
    settings = {"images": images, "augment": augment, "dtype": dtype, "on_gpu": on_gpu}
    return pixels.examples(*taken, draws, **settings)


def _refused(blobs: Blobs, index: int) -> str | None:
    """Returns "name (cause)" if TensorFlow cannot decode an image, else None."""
    data = blobs.read(index)
    if blobs.form is not None:
        return None  # what cannot be read is known before
    try:
        tf.io.decode_image(data)
    except tf.errors.OpError as error:
        cause = re.sub(r"^{{.*?}} | \[Op:.*", "", error.message.splitlines()[0])
        return f"{blobs.name(index)} ({cause})"
    return None
