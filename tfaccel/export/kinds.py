"""Which of many images to look at, so that each kind of file is among them.

Takes encoded images; gives the places of some, by their headers: a decoder goes wrong by the kind
of a file, and a sample of 32 misses the one kind in a hundred.

    ids = of_each_kind(source.images, num_threads=2)
"""

import concurrent.futures
import io

import numpy as np
import PIL.Image

from tfaccel.data.source import Blobs, open_regular
from tfaccel.data.sources.pillow import UNREADABLE, sample_bits
from tfaccel.export.samples import spread

# Headers that are read: 0.2 s where files are in memory (2 cores, 2026-11-27), and some seconds
# where a disk looks for each.
MOST_HEADERS = 2048
OF_EACH = 2  # files of a kind: one may be damaged
MOST_KINDS = 32
# What a file says of its colours, its samples and their order. Text, dates and sizes make no kind.
TELLING = (
    "adobe",
    "adobe_transform",
    "chromaticity",
    "compression",
    "exif",
    "gamma",
    "icc_profile",
    "interlace",
    "progressive",
    "srgb",
    "transparency",
)


def of_each_kind(blobs: Blobs, *, num_threads: int) -> np.ndarray:
    """Returns the places of some images of each kind, in order: [num] int64.

    Of up to MOST_HEADERS images, spread over all, the headers are read.

    Args:
      blobs: the images.
      num_threads: that read at a time.
    """
    ids = spread(len(blobs), MOST_HEADERS)
    with concurrent.futures.ThreadPoolExecutor(num_threads) as pool:
        kinds = list(pool.map(lambda index: kind_of(blobs, index), ids.tolist()))
    found = {}
    for index, kind in zip(ids.tolist(), kinds, strict=True):
        if kind is not None and (kind in found or len(found) < MOST_KINDS):
            found.setdefault(kind, []).append(index)
    return np.array(sorted(each for some in found.values() for each in some[:OF_EACH]), np.int64)


def kind_of(blobs: Blobs, index: int) -> tuple | None:
    """Returns what makes an image's kind, by its header; None for a file that is no image."""
    try:
        file = (
            open_regular(blobs.files[index]) if blobs.are_files else io.BytesIO(blobs.read(index))
        )
        with file, PIL.Image.open(file) as image:
            told = tuple(sorted(set(TELLING) & set(map(str, image.info))))
            # Of a JPEG: how each of its components is sampled.
            sampling = tuple(each[1:3] for each in getattr(image, "layer", ()))
            details = image.info.get("adobe_transform"), image.info.get("interlace")
            return image.format, image.mode, sample_bits(image), told, sampling, details
    except UNREADABLE:
        return None
