"""Whether all images have one size: their headers are read once, and again where files changed.

one_size(source.images, num_threads=8)    # (32, 32), or None for several

Headers take 60 us each: a minute of CPU for a million images, where their sizes and times take 3 s.
The answer is kept in $XDG_CACHE_HOME/tfaccel/sizes.
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

LEAST_KEPT = 10_000  # images, of which headers take half a second

log = logging.getLogger("tfaccel")


def one_size(blobs: Blobs, *, num_threads: int) -> tuple[int, int] | None:
    """Returns the (height, width) that all images have; None where they differ.

    Args:
      blobs: the images, at least one.
      num_threads: that read headers.

    Raises:
      UserError: one cannot be read, or is not an image.
    """
    if len(blobs) < LEAST_KEPT:
        return _found(blobs, num_threads)
    digest = hashlib.blake2b(digest_size=16)
    identify(digest, blobs, num_threads)
    place = cache_folder("sizes") / f"{digest.hexdigest()}.json"
    try:
        known = json.loads(read_regular(place))["size"]
        return None if known is None else (int(known[0]), int(known[1]))
    except Exception as error:  # a damaged file may make its reader raise anything
        if not isinstance(error, FileNotFoundError):
            log.warning("data: %s is damaged (%s) and is made anew", place, error)
    log.info("data: reading the headers of %d images, once", len(blobs))
    found = _found(blobs, num_threads)
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        replace(place, json.dumps({"size": found}).encode())
    except OSError as error:
        log.warning(
            "data: that images have one size cannot be kept in %s (%s): the next start reads their "
            "headers again",
            place.parent,
            error.strerror or error,
        )
    return found


def _found(blobs: Blobs, num_threads: int) -> tuple[int, int] | None:
    sizes = image_sizes(blobs, np.arange(len(blobs)), num_threads=num_threads)
    return None if (sizes != sizes[0]).any() else (int(sizes[0, 0]), int(sizes[0, 1]))
