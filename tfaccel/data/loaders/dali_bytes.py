"""Encoded images of one batch, and how large they are by their headers: read by DALI.

Takes where the bytes are and which examples; gives DALI's own list of them, for another pipeline,
and arrays of their beginnings and sizes.

    read = make_file_reader(source.images, rows=256, num_threads=4, with_sizes=True)
    encoded, heads, sizes = read(ids)     # heads: [rows, 41] uint8, sizes: [rows, 2] int32

A pipeline of its own, before the one that decodes, so that Python can reckon windows in between
and each file is read once. DALI's threads need not Python's lock, which the training loop holds;
its decoders cut by the same sizes; and the other pipeline takes the bytes without a copy: 256
ImageNet JPEGs, 28 MB, are read in 9 to 15 ms, handed over in 0.1 (2 cores, 2026-11-22).
"""

import concurrent.futures
import pathlib
import weakref
from collections.abc import Callable

import numpy as np
from nvidia.dali import fn, pipeline_def, types
from nvidia.dali.tensors import TensorListCPU

from tfaccel.common import temporary
from tfaccel.common.errors import UserError
from tfaccel.data.file_names import FileNames
from tfaccel.data.source import Blobs
from tfaccel.data.sources.kinds import HEAD_BYTES


def make_file_reader(
    blobs: Blobs, *, rows: int, num_threads: int, with_sizes: bool
) -> Callable[[np.ndarray], tuple[TensorListCPU, np.ndarray, np.ndarray | None]]:
    """Returns the function that reads a batch, from the numbers of its examples.

    It gives the encoded images; their first bytes, [rows, HEAD_BYTES] uint8, zeros behind shorter
    ones; and [rows, 2] int32: each one's (height, width), as its pixels are stored. To be called by
    one thread after another.

    Args:
      blobs: the encoded images.
      rows: of each batch.
      num_threads: that read.
      with_sizes: whether sizes are wanted; None else.

    Raises:
      RuntimeError: from the function, when a file cannot be read, or DALI does not know its header.
        DALI does not say which; no call is possible after it.
      OSError, UserError: likewise, when a range of bytes cannot be read, or copied.
    """
    settings = {"num_threads": num_threads, "device_id": None, "prefetch_queue_depth": 1}
    pipeline = _files(with_sizes, batch_size=rows, **settings)
    paths = _paths(blobs, rows=rows, num_threads=num_threads)

    def read(ids):
        pipeline.feed_input("path", paths(ids))
        encoded, heads, *shapes = pipeline.run()
        sizes = shapes[0].as_array()[:, :2].astype(np.int32) if shapes else None
        return encoded, heads.as_array().copy(), sizes

    return read


@pipeline_def
def _files(with_sizes):
    """Paths, as uint8 that zero bytes may follow, to bytes and [height, width, channels]."""
    path = fn.external_source(name="path", ndim=1, dtype=types.UINT8)
    # Mapping small files costs more than copying them: 18,700 against 34,500 MNIST PNGs a second
    # on 2 cores (2026-11-21). A file cut short while mapped would be a SIGBUS, too.
    encoded = fn.io.file.read(path, dont_use_mmap=True)
    # Python takes 10 us to get at one image's bytes, and as long for the beginnings of all.
    head = fn.slice(encoded, start=0, shape=HEAD_BYTES, axes=[0], out_of_bounds_policy="pad")
    if not with_sizes:
        return encoded, head
    return encoded, head, fn.peek_image_shape(encoded, adjust_orientation=False)


def _paths(blobs: Blobs, *, rows: int, num_threads: int) -> Callable[[np.ndarray], np.ndarray]:
    """Returns the function that gives a batch's paths from its examples: [rows, longest] uint8.

    DALI hands the bytes to `open`, which stops at the first zero.
    """
    if not blobs.are_files:
        return _copies(blobs, rows=rows, num_threads=num_threads)
    return blobs.files.rows


def _copies(blobs: Blobs, *, rows: int, num_threads: int) -> Callable[[np.ndarray], np.ndarray]:
    """Returns the function that copies a batch's ranges of bytes to files, and gives their paths.

    DALI reads whole files, and copies bytes that Python has read with Python's lock: 5 to 8 ms for
    256 ImageNet JPEGs, without the reading (2 cores, 2026-11-22). To write a file costs 100 us, and
    20 us where TMPDIR is a tmpfs such as /dev/shm, most of it without the lock.

    Args:
      blobs: the ranges.
      rows: of each batch, which takes the place of the one before.
      num_threads: that copy.
    """
    own = temporary.Held("shards")
    folder = str(own.path)
    pool = concurrent.futures.ThreadPoolExecutor(num_threads)
    files = [f"{folder}/{row:06d}" for row in range(rows)]  # DALI has read a batch when it is there
    as_rows = FileNames.of(files).rows(np.arange(rows))

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

    def paths(ids):
        list(pool.map(copy, ids.tolist(), files))
        return as_rows[: len(ids)]

    weakref.finalize(paths, own.remove)  # or when Python ends
    return paths
