"""Chooses images to check, so that each kind of file is among them.

A decoder may fail on one kind of file, and a sample of 32 may miss a kind that one image in a
hundred has. `of_each_kind` reads the headers of encoded images and returns the indices of some.

    ids = of_each_kind(source.images, num_threads=2)
"""

import concurrent.futures

import numpy as np
import PIL.Image

from tfaccel.data.source import Blobs, spread
from tfaccel.data.sources.pillow import UNREADABLE, sample_bits

# The headers to read: 0.2 s if the files are in memory (2 cores, 2026-11-27), and some seconds if a
# disk must seek each.
MOST_HEADERS = 2048
OF_EACH = 2  # files of each kind, because one may be damaged
MOST_KINDS = 32
# Header entries on colors, samples and their order. Text, dates and sizes do not make a kind.
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
    """Returns the indices of some images of each kind, in order: [num] int64.

    It reads the headers of at most MOST_HEADERS images, evenly spread over all of them.
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
    """Returns the facts of an image's header that make up its kind; None if it is not an image."""
    try:
        with blobs.opened(index) as file, PIL.Image.open(file) as image:
            told = tuple(sorted(set(TELLING) & set(map(str, image.info))))
            # For a JPEG: the sampling of each of its components.
            sampling = tuple(each[1:3] for each in getattr(image, "layer", ()))
            details = image.info.get("adobe_transform"), image.info.get("interlace")
            return image.format, image.mode, sample_bits(image), told, sampling, details
    except UNREADABLE:
        return None
