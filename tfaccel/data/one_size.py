"""Finds out whether all images have one size. The result is kept, so headers are read once.

    one_size(source.images, num_threads=8)    # (32, 32), or None for several sizes

A million headers take a minute of CPU (60 us each); the files' sizes and times, which show whether
a file has changed, take 3 s. The result is kept in $XDG_CACHE_HOME/tfaccel/sizes.
"""

import hashlib
import json
import logging

import numpy as np

from tfaccel.common.own_files import replace
from tfaccel.common.regular_file import read_regular
from tfaccel.data.loaders.cache import identify
from tfaccel.data.source import Blobs
from tfaccel.data.sources.pillow import image_sizes
from tfaccel.process.cache_folder import cache_folder

LEAST_KEPT = 10_000  # smaller sets are not kept: their headers take less than half a second

log = logging.getLogger("tfaccel")


def one_size(blobs: Blobs, *, num_threads: int) -> tuple[int, int] | None:
    """Returns the (height, width) of all images, or None if they have several sizes.

    Args:
      blobs: the images, at least one.
      num_threads: number of threads that read headers.

    Raises:
      UserError: a file cannot be read, or is not an image.
    """
    if len(blobs) < LEAST_KEPT:
        return _read_size(blobs, num_threads)
    digest = hashlib.blake2b(digest_size=16)
    identify(digest, blobs, num_threads)
    place = cache_folder("sizes") / f"{digest.hexdigest()}.json"
    try:
        known = json.loads(read_regular(place))["size"]
        return None if known is None else (int(known[0]), int(known[1]))
    except Exception as error:  # a reader of a damaged file may raise anything
        if not isinstance(error, FileNotFoundError):
            log.warning("data: %s is damaged (%s) and will be written again", place, error)
    log.info("data: reading the headers of %d images, once", len(blobs))
    found = _read_size(blobs, num_threads)
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        replace(place, json.dumps({"size": found}).encode())
    except OSError as error:
        log.warning(
            "data: the image size cannot be kept in %s (%s), so the next start reads all headers "
            "again",
            place.parent,
            error.strerror or error,
        )
    return found


def _read_size(blobs: Blobs, num_threads: int) -> tuple[int, int] | None:
    sizes = image_sizes(blobs, np.arange(len(blobs)), num_threads=num_threads)
    return None if (sizes != sizes[0]).any() else (int(sizes[0, 0]), int(sizes[0, 1]))
