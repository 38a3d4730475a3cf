"""What a DALI pipeline is fed: paths, labels and random draws, as tf.data sets.

Takes the encoded images and a Feed; gives, for each input of the pipeline, the function that makes
a batch of it from its number, and the data set that the pipeline's plugin takes.

    readers = make_readers(source, feed, num_threads=4, fed=collections.deque(maxlen=7))
    readers["image.path"](0)              # [rows, longest] uint8
    inputs = {name: make_input(read, like=read(0), device=device) for name, read in ...}
"""

import collections
import concurrent.futures
import functools
import os
import pathlib
import shutil
import tempfile
import weakref
from collections.abc import Callable, Sequence

import numpy as np
import tensorflow as tf
from nvidia.dali.plugin import tf as dali_tf

from tfaccel.data.feed import Feed
from tfaccel.data.source import Blobs, ImageSource
from tfaccel.errors import UserError
from tfaccel.runtime import Device

READ_AHEAD = 1  # batches, beside those that the pipeline holds


def make_readers(
    source: ImageSource, feed: Feed, *, num_threads: int, fed: collections.deque
) -> dict[str, Callable]:
    """Returns the function that makes each input of a batch from its number: an array of all rows.

    Args:
      source: the encoded images.
      feed: what each batch holds.
      num_threads: that copy ranges of bytes; whole files are read by DALI alone.
      fed: is given the examples of each batch; no more than it holds are in the pipeline.
    """

    def ids(number):
        return feed.rows(number).ids

    def noted_ids(number):
        fed.append(ids(number))
        return fed[-1]

    draws = functools.lru_cache(maxsize=4)(feed.draws)  # all kinds at once; asked for one by one
    paths_of = functools.partial(_paths, num_threads=num_threads, keep=fed.maxlen)
    inputs = {"image.path": paths_of(source.images, noted_ids)}
    if source.targets is None:
        inputs["label"] = lambda number: source.labels[ids(number)]
    else:
        inputs["target.path"] = paths_of(source.targets, ids)
    for kind in feed.draw_specs:
        inputs[kind] = lambda number, kind=kind: draws(number)[kind]
    return inputs


def _paths(blobs: Blobs, ids_of: Callable, *, num_threads: int, keep: int) -> Callable:
    """Returns the function that gives a batch's paths: [rows, longest] uint8."""
    if not blobs.are_files:
        return _copies(blobs, ids_of, num_threads=num_threads, keep=keep)
    paths = _as_rows(blobs.files)
    return lambda number: paths[ids_of(number)]


def _copies(blobs: Blobs, ids_of: Callable, *, num_threads: int, keep: int) -> Callable:
    """Returns the function that copies a batch's ranges of bytes to files, and gives their paths.

    DALI reads whole files or takes bytes as an input: but TensorFlow passes an input through the
    GPU, either image by image, 360 us each, or padded to the batch's longest, which is 5 times the
    bytes and 570 us for ImageNet (and gigabytes where one image has 15 MB). To write it costs 100
    us, and 20 us where TMPDIR is a tmpfs such as /dev/shm (2 cores, 2026-11-21).

    Args:
      blobs: the ranges.
      ids_of: gives a batch's examples from its number.
      num_threads: that copy.
      keep: batches that may not have been read yet; the files of others are deleted.
    """
    folder = tempfile.mkdtemp(prefix="tfaccel-")
    pool = concurrent.futures.ThreadPoolExecutor(num_threads)
    written = {}

    def copy(index, file):
        data = blobs.read(index)
        try:
            pathlib.Path(file).write_bytes(data)
        except OSError as error:
            raise UserError(
                f"DALI reads images of shards from copies in {folder}, which cannot be written "
                f"({error.strerror}); set TMPDIR to a folder with room for some batches, e.g. "
                "/dev/shm"
            ) from error

    def paths(number):
        ids = ids_of(number).tolist()
        written[number] = [f"{folder}/{number:012d}-{row:06d}" for row in range(len(ids))]
        list(pool.map(copy, ids, written[number]))
        if len(written) > keep:
            for file in written.pop(min(written)):
                os.unlink(file)
        return _as_rows(written[number])

    weakref.finalize(paths, shutil.rmtree, folder, ignore_errors=True)  # or when Python ends
    return paths


def _as_rows(files: Sequence[str]) -> np.ndarray:
    """Returns the paths as [num_files, longest] uint8, padded with zero bytes.

    DALI hands the bytes to `open`, which stops at the first zero.
    """
    encoded = np.array([os.fsencode(file) for file in files])  # numpy pads with zero bytes
    return encoded.view(np.uint8).reshape(len(files), encoded.dtype.itemsize)


def make_input(read: Callable, like: np.ndarray, device: Device):
    """Returns a DALI input of whole batches, on the device where the plugin wants its inputs.

    Args:
      read: makes a batch of it from the number. Only the caller keeps it.
      like: what the first batch was.
      device: of the pipeline.
    """
    dtype = tf.dtypes.as_dtype(like.dtype)
    # TensorFlow keeps its functions for good. This one holds no reference to what it reads with, or
    # all paths and threads would be kept with it.
    read = weakref.ref(read)
    with tf.device("/cpu:0"):
        # Not from_generator, which complains when Python ends before it.
        dataset = tf.data.Dataset.counter().map(
            lambda number: tf.ensure_shape(
                tf.numpy_function(lambda number: read()(number), [number], dtype), like.shape
            )
        )
        dataset = dataset.prefetch(READ_AHEAD)
    if device.cuda_ordinal is not None:
        with tf.device(device.name):
            dataset = dataset.apply(tf.data.experimental.copy_to_device(device.name))
    return dali_tf.experimental.Input(dataset, batch=True)
