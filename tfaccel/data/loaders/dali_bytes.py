"""Reads the encoded images of one batch, and their sizes from their headers, with DALI.

The reader takes the ids of examples. It returns DALI's own list of encoded images, which is passed
to another pipeline, and arrays of the images' first bytes and sizes.

    read = make_file_reader(source.images, rows=256, num_threads=4, with_sizes=True)
    encoded, heads, sizes = read(ids)     # heads: [rows, 41] uint8, sizes: [rows, 2] int32

This pipeline runs before the one that decodes, so that Python can compute windows in between and
each file is read once. DALI's threads do not need Python's lock, which the training loop holds, and
DALI's decoders cut windows by the same sizes. The other pipeline takes the bytes without a copy.
256 ImageNet JPEGs, 28 MB, are read in 9 to 15 ms and passed on in 0.1 ms (2 cores, 2026-11-22).
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
    """Returns a function that reads a batch, from the ids of its examples.

    The function returns the encoded images; their first bytes, [rows, HEAD_BYTES] uint8, filled up
    with zeros; and their stored (height, width), [rows, 2] int32. Only one thread at a time may
    call it.

    Args:
      blobs: the encoded images.
      rows: number of rows in each batch.
      num_threads: number of threads that read.
      with_sizes: whether the function returns sizes; otherwise it returns None for them.

    Raises:
      RuntimeError: the function raises it if a file cannot be read, or DALI does not know its
        header. DALI does not name the file, and the function cannot be called again.
      OSError, UserError: the function raises it if a range of bytes cannot be read, or copied.
    """
    settings = {"num_threads": num_threads, "device_id": None, "prefetch_queue_depth": 1}
    pipeline = _files(with_sizes, batch_size=rows, **settings)
    # [rows, longest] uint8, filled up with zeros: DALI's `open` stops at the first zero.
    paths = blobs.files.rows
    if blobs.are_files and blobs.reader is not None and blobs.recode is None:
        paths = _fetcher(blobs, num_threads=num_threads)
    elif not blobs.are_read_as_files:
        paths = _copier(blobs, rows=rows, num_threads=num_threads)

    def read(ids):
        pipeline.feed_input("path", paths(ids))
        encoded, heads, *shapes = pipeline.run()
        sizes = shapes[0].as_array()[:, :2].astype(np.int32) if shapes else None
        return encoded, heads.as_array().copy(), sizes

    return read


@pipeline_def
def _files(with_sizes):
    """From zero-padded paths, uint8, to bytes, first bytes and [height, width, channels]."""
    path = fn.external_source(name="path", ndim=1, dtype=types.UINT8)
    # Mapping small files is slower than copying them: 18,700 MNIST PNGs a second compared with
    # 34,500 on 2 cores (2026-11-21). A mapped file that is cut short would also raise SIGBUS.
    encoded = fn.io.file.read(path, dont_use_mmap=True)
    # Python needs 10 us to read one image's bytes, and no longer for the first bytes of all images.
    head = fn.slice(encoded, start=0, shape=HEAD_BYTES, axes=[0], out_of_bounds_policy="pad")
    if not with_sizes:
        return encoded, head
    return encoded, head, fn.peek_image_shape(encoded, adjust_orientation=False)


def _fetcher(blobs: Blobs, *, num_threads: int) -> Callable[[np.ndarray], np.ndarray]:
    """Returns a function that fetches a batch's files from a store, and returns their paths.

    The files stay open until the next batch, so that no process removes them before DALI has read
    them.

    Args:
      blobs: whole files of a store.
      num_threads: number of threads that open files.
    """
    pool, held = concurrent.futures.ThreadPoolExecutor(num_threads), []

    def paths(ids):
        for each in held:
            each.close()
        held[:] = pool.map(blobs.reader.open, ids.tolist())
        return FileNames.of([each.name for each in held]).rows(np.arange(len(held)))

    return paths


def _copier(blobs: Blobs, *, rows: int, num_threads: int) -> Callable[[np.ndarray], np.ndarray]:
    """Returns a function that copies a batch's ranges of bytes to files, and returns their paths.

    DALI reads whole files. If Python read the bytes, DALI would copy them while holding Python's
    lock: 5 to 8 ms for 256 ImageNet JPEGs, without the reading (2 cores, 2026-11-22). Writing a
    file takes 100 us, or 20 us if TMPDIR is a tmpfs such as /dev/shm, mostly without the lock.

    Args:
      blobs: the ranges.
      rows: number of rows in each batch. A batch overwrites the one before it.
      num_threads: number of threads that copy.
    """
    own = temporary.Held("shards")
    folder = str(own.path)
    pool = concurrent.futures.ThreadPoolExecutor(num_threads)
    files = [f"{folder}/{row:06d}" for row in range(rows)]  # each batch is read before the next
    as_rows = FileNames.of(files).rows(np.arange(rows))

    def copy(index, file):
        data = blobs.read(index)
        try:
            pathlib.Path(file).write_bytes(data)
        except OSError as error:
            raise UserError(
                f"DALI reads images in shards from copies in {folder}, which cannot be written "
                f"({error.strerror}); set TMPDIR to a folder with space for some batches, e.g. "
                "/dev/shm"
            ) from error

    def paths(ids):
        list(pool.map(copy, ids.tolist(), files))
        return as_rows[: len(ids)]

    weakref.finalize(paths, own.remove)  # at Python's exit at the latest
    return paths
