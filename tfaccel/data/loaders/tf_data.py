"""One replica's batches through tf.data, on the CPU.

Takes encoded images and a Feed, which says what each batch holds; gives tensors on the replica's
device. Images are decoded and resized one by one, in parallel; the rest is done with whole batches,
on the device.

    stream = TfDataStream(source, images, feed=feed, placement=placement, dtype="float16")
    image, label = next(stream)
"""

import collections
import concurrent.futures
import functools
import re
from collections.abc import Callable, Iterator

import numpy as np
import tensorflow as tf

from tfaccel.config import AugmentConfig, ImageConfig
from tfaccel.data.feed import Feed
from tfaccel.data.loaders import faults, pixels
from tfaccel.data.loaders.host import HostStream
from tfaccel.data.loaders.tf_image import windowed
from tfaccel.data.placement import Placement
from tfaccel.data.source import Blobs, ImageSource
from tfaccel.data.sources.kinds import HEAD_BYTES, Template, Unseen, agreed, usual_heads

# Batches between the first function and the one that is given: what a fault may be in.
IN_FLIGHT = 8


class TfDataStream(Iterator):
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
        """Starts the threads; of shards, reads the first batch's bytes.

        Args:
          source: the encoded images.
          images: size, channels and normalisation.
          feed: which of them each batch holds, with which draws.
          placement: the replica's device, and how many threads.
          dtype: "float16" or "float32", of the images.

        Raises:
          UnreadableError: an image of the first batch cannot be read from its shard.
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
        unseen = Unseen(len(source))

        def begin(number):
            ids = feed.rows(number).ids
            fed.append(ids)
            is_new = unseen.among(ids, number)
            for part in filter(None, (source.images, source.targets)):
                # TensorFlow would wait for a FIFO.
                part.check_files(ids[is_new], pool, num_threads=placement.num_threads)
            second = (
                {"second": source.labels[ids].astype(np.int64)}
                if source.targets is None
                else targets(ids)
            )
            return encoded(ids) | second | {"is_new": is_new} | feed.draws(number)

        with self._faults_named():
            self._stream = HostStream(
                begin,
                functools.partial(_finish, images=images, dtype=dtype),
                placement=placement,
                each_row=functools.partial(_row, images=images, augment=feed.augment),
            )

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
        encoded = blobs.files.encoded
        return lambda ids: {
            f"{name}.path": np.array([encoded(index) for index in ids.tolist()], dtype=object)
        }
    return lambda ids: {
        f"{name}.bytes": np.array(list(pool.map(blobs.read, ids.tolist())), dtype=object)
    }


# One row: bytes to uint8 pixels of the batch's size.


def _row(row: dict, *, images: ImageConfig, augment: AugmentConfig) -> dict:
    """Returns a row whose "pixels", and "second" of pairs, are [*image_size, channels] uint8."""
    row = dict(row)
    draws, is_new = row.pop("window", None), row.pop("is_new")
    data, target = _read(row, "image"), _read(row, "target")
    data = _looked_at(data, is_new, is_mask=False)
    settings = {"images": images, "augment": augment}
    if target is None:
        fast = augment.window == "random_resized_crop"
        row["pixels"], _ = windowed(data, draws, fast=fast, **settings)
        return row
    target = _looked_at(target, is_new, is_mask=images.targets == "mask")
    row["pixels"], size = windowed(data, draws, **settings)
    row["second"], target_size = windowed(target, draws, kind=images.targets, **settings)
    same = tf.debugging.assert_equal(size, target_size, "a pair of two sizes")
    with tf.control_dependencies([same]):
        row["pixels"] = tf.identity(row["pixels"])
    return row


def _read(row: dict, name: str):
    if f"{name}.path" in row:
        return tf.io.read_file(row.pop(f"{name}.path"))
    return row.pop(f"{name}.bytes", None)


def _looked_at(data, is_new, *, is_mask: bool):
    """Returns an encoded image, after a look at its kind where it is read for the first time.

    Python takes 15 us to look, one image at a time; the usual kinds are known without it.
    """

    def fits():
        usual = is_usual(tf.io.decode_raw(data, tf.uint8, fixed_length=HEAD_BYTES), is_mask=is_mask)
        look = functools.partial(_agreed, is_mask=is_mask)
        return tf.cond(usual, lambda: True, lambda: tf.numpy_function(look, [data], tf.bool))

    fits = tf.cond(is_new, fits, lambda: True)
    with tf.control_dependencies([tf.debugging.Assert(fits, ["an image of an odd kind"])]):
        return tf.identity(data)


def is_usual(head: tf.Tensor, *, is_mask: bool) -> tf.Tensor:
    """Returns whether an image is one that `kinds.are_usual` knows, a bool of the graph.

    Args:
      head: [HEAD_BYTES] uint8, the image's first bytes, and zeros after its end.
      is_mask: whether its grey levels are classes.
    """

    def has(template: Template) -> tf.Tensor:
        return tf.reduce_all((head >= template.least) & (head <= template.most))

    known = [has(each) for each in usual_heads(are_masks=is_mask)]
    return functools.reduce(tf.logical_or, known)


def _agreed(data: bytes, *, is_mask: bool) -> np.bool_:
    return np.bool_(agreed(data, is_mask=is_mask))


# All rows.


def _finish(batch: dict, *, images: ImageConfig, dtype: str):
    """Returns a batch from windows, labels or targets, and the other draws."""
    draws = dict(batch)
    taken = draws.pop("pixels"), draws.pop("second")
    whole = AugmentConfig(window="stretch")  # windows are taken already
    return pixels.examples(*taken, draws, images=images, augment=whole, dtype=dtype)


def _refused(blobs: Blobs, index: int) -> str | None:
    """Returns "name (cause)" of an image that TensorFlow cannot decode, None of any other."""
    data = blobs.read(index)
    try:
        tf.io.decode_image(data)
    except tf.errors.OpError as error:
        cause = re.sub(r"^{{.*?}} | \[Op:.*", "", error.message.splitlines()[0])
        return f"{blobs.name(index)} ({cause})"
    return None
