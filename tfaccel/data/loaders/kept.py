"""Images that are decoded into memory once, and read from disk by later starts.

If decoding takes seconds, the pixels are kept in the cache folder, in the form of the loader
"cache". The next start or resume maps them from there, unless a file has changed. All processes on
a machine that train on the images share this memory.

    source = kept(source, stored_size=(32, 32), channels=3, targets="image", num_threads=8)

    $XDG_CACHE_HOME/tfaccel/kept/<key>/{images,targets}.npy, manifest.json

All kept images take at most MOST_BYTES. The least recently used ones are removed first.
"""

import logging
import os
import pathlib
import shutil
import time

import numpy as np

from tfaccel.common.errors import UserError
from tfaccel.common.run_log import summary
from tfaccel.data.free_memory import mib
from tfaccel.data.loaders.cache import arrays_in, stored
from tfaccel.data.loaders.decode import decode_into, forms
from tfaccel.data.loaders.memory import decode_all
from tfaccel.data.source import ArraySource, ImageSource, spread
from tfaccel.process.cache_folder import cache_folder

LEAST_S = 5.0  # seconds of decoding in one thread; faster data sets are not kept
NUM_TIMED = 32  # images that are decoded to estimate the time for all
MOST_BYTES = 20 * 2**30  # of all kept images
DISK_SHARE = 0.5  # the share of the disk's free space that one data set may take

log = logging.getLogger("tfaccel")


def kept(
    source: ImageSource,
    *,
    num_threads: int,
    **settings,
) -> ArraySource:
    """Returns the decoded images, from disk if an earlier start has kept them.

    Args:
      source: the encoded images.
      num_threads: number of threads that decode and check.
      **settings: stored_size, channels and targets, as in `decode_all`.

    Raises:
      UnreadableError, UserError: as in `decode_all`.
    """
    seconds = _seconds(source, settings)
    if seconds < LEAST_S:
        return decode_all(source, num_threads=num_threads, **settings)
    folder = cache_folder("kept").absolute()
    needed = sum(each.num_bytes for each in forms(source, **settings).values())
    try:
        home = stored(
            source, folder=folder, num_threads=num_threads, make_room=_make_room, **settings
        )
        # The files are in memory after writing or checking, and all local processes share it.
        arrays = arrays_in(home)
        os.utime(home)  # marks them as just used
    except OSError as error:
        log.warning(
            "data: decoded images cannot be kept in %s (%s), so every start decodes them, in about "
            "%.0f CPU seconds",
            folder,
            error.strerror or error,
            seconds,
        )
        return decode_all(source, num_threads=num_threads, **settings)
    log.info(
        "data: %d decoded images, %s, are mapped from %s; they are kept because decoding takes "
        "about %.0f CPU seconds; loader='memory' keeps nothing on disk",
        len(source),
        mib(needed),
        home,
        seconds,
    )
    return source.decoded(**arrays)


def _seconds(source: ImageSource, settings: dict) -> float:
    """Returns how long one thread would take to decode all images, estimated from a sample."""
    sample = source.taken(spread(len(source), NUM_TIMED))
    arrays = {name: np.empty(*form) for name, form in forms(sample, **settings).items()}
    began = time.thread_time()
    try:
        decode_into(arrays, sample, targets=settings["targets"], num_threads=1)
    except UserError:
        return 0.0  # decoding all images then names the file
    return (time.thread_time() - began) / len(sample) * len(source)


def _make_room(folder: pathlib.Path, needed: int) -> None:
    """Removes the least recently used images until the limit allows `needed` more bytes.

    Raises:
      OSError: so many bytes cannot be kept.
    """
    if needed > MOST_BYTES:
        raise OSError(f"they need {mib(needed)}, and the limit is {mib(MOST_BYTES)}")
    homes = [each for each in folder.iterdir() if each.is_dir()]
    homes.sort(key=lambda home: home.stat().st_mtime)
    sizes = [sum(file.stat().st_size for file in home.glob("*.npy")) for home in homes]
    over = sum(sizes) + needed - MOST_BYTES
    for home, size in zip(homes, sizes, strict=True):
        if over <= 0:
            break
        summary("data: removed %s, the least recently used images, to make room", home)
        shutil.rmtree(home, ignore_errors=True)
        over -= size
    free = shutil.disk_usage(folder).free
    if needed > DISK_SHARE * free:
        raise OSError(
            f"they need {mib(needed)}, more than {DISK_SHARE:.0%} of the {mib(free)} that is free"
        )
