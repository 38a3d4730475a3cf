"""What a DALI pipeline is fed: paths, labels and random draws, as arrays of whole batches.

Takes the encoded images and a Feed; gives the function that makes what a batch is made of from the
batch's number.

    read = make_reader(source, feed, num_threads=4, fed=collections.deque(maxlen=3))
    read(0)["image.path"]                 # [rows, longest] uint8
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

from tfaccel.data.feed import Feed
from tfaccel.data.source import Blobs, ImageSource
from tfaccel.errors import UserError


def make_reader(
    source: ImageSource, feed: Feed, *, num_threads: int, fed: collections.deque
) -> Callable[[int], dict[str, np.ndarray]]:
    """Returns the function that reads a batch, from its number: arrays of all rows by name.

    They are "image.path", [rows, longest] uint8; "label", [rows] int32, or "target.path", like
    that of the image; and the feed's draws by kind, as `Feed.draw_specs` has them. To be called
    with one number after another.

    Args:
      source: the encoded images.
      feed: what each batch holds.
      num_threads: that copy ranges of bytes; whole files are read by DALI alone.
      fed: is given the examples of each batch; no more than it holds are in the pipeline.
    """
    paths_of = functools.partial(_paths, num_threads=num_threads, keep=fed.maxlen)
    image_paths = paths_of(source.images)
    target_paths = None if source.targets is None else paths_of(source.targets)

    def read(number):
        ids = feed.rows(number).ids
        fed.append(ids)
        inputs = {"image.path": image_paths(number, ids)}
        if target_paths is None:
            inputs["label"] = source.labels[ids]
        else:
            inputs["target.path"] = target_paths(number, ids)
        return inputs | feed.draws(number)

    return read


def _paths(blobs: Blobs, *, num_threads: int, keep: int) -> Callable:
    """Returns the function that gives a batch's paths from its number and its examples."""
    if not blobs.are_files:
        return _copies(blobs, num_threads=num_threads, keep=keep)
    paths = _as_rows(blobs.files)
    return lambda _, ids: paths[ids]


def _copies(blobs: Blobs, *, num_threads: int, keep: int) -> Callable:
    """Returns the function that copies a batch's ranges of bytes to files, and gives their paths.

    DALI reads whole files or takes bytes as an input: but TensorFlow passes an input through the
    GPU, either image by image, 360 us each, or padded to the batch's longest, which is 5 times the
    bytes and 570 us for ImageNet (and gigabytes where one image has 15 MB). To write it costs 100
    us, and 20 us where TMPDIR is a tmpfs such as /dev/shm (2 cores, 2026-11-21).

    Args:
      blobs: the ranges.
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

    def paths(number, ids):
        written[number] = [f"{folder}/{number:012d}-{row:06d}" for row in range(len(ids))]
        list(pool.map(copy, ids.tolist(), written[number]))
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
