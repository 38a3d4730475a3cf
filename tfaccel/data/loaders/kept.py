"""Decoded images in memory that are decoded once and read from disk by every later start.

Takes encoded images whose pixels fit into memory; gives them decoded. Where decoding takes seconds
the pixels are kept in the cache folder, as the loader "cache" keeps them: the next start, or the
next resume, maps them from there, unless a file was changed. All processes of a machine that train
on them share that memory.

    source = kept(source, stored_size=(32, 32), channels=3, targets="image", num_threads=8)

    $XDG_CACHE_HOME/tfaccel/kept/<key>/{images,targets}.npy, manifest.json

All that is kept takes MOST_BYTES at most: what was used longest ago is removed first.
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
from tfaccel.data.loaders.cache import stored
from tfaccel.data.loaders.decode import decode_into, shapes
from tfaccel.data.loaders.memory import decode_all
from tfaccel.data.source import ArraySource, ImageSource
from tfaccel.process.cache_folder import cache_folder

LEAST_S = 5.0  # of decoding, in one thread, from which on the pixels are kept
NUM_TIMED = 32  # images that are decoded to see how long all take
MOST_BYTES = 20 * 2**30  # of all that is kept
DISK_SHARE = 0.5  # of the disk's free space that one data set may take

log = logging.getLogger("tfaccel")


def kept(
    source: ImageSource,
    *,
    stored_size: tuple[int, int],
    channels: int,
    targets: str,
    num_threads: int,
) -> ArraySource:
    """Returns the decoded images, from disk where an earlier start has kept them.

    Args:
      source: the encoded images.
      stored_size: (height, width) that each is resized to, as the window "stretch" does.
      channels: of the inputs: 1 or 3.
      targets: of pairs: "image" or "mask".
      num_threads: that decode and check.

    Raises:
      UnreadableError: images that cannot be read or decoded, all of them.
      UserError: a pair of two sizes.
    """
    settings = {"stored_size": stored_size, "channels": channels, "targets": targets}
    seconds = _seconds(source, settings)
    if seconds < LEAST_S:
        return decode_all(source, num_threads=num_threads, **settings)
    folder = cache_folder("kept").absolute()
    needed = sum(int(np.prod(each)) for each in shapes(source, **settings).values())
    try:
        home = stored(
            source, folder=folder, num_threads=num_threads, make_room=_make_room, **settings
        )
        # Just written or checked, the files are in memory already, once for all local processes.
        arrays = {file.stem: np.load(file, mmap_mode="r") for file in _files(home)}
        os.utime(home)  # it was used just now
    except OSError as error:
        log.warning(
            "data: decoded images cannot be kept in %s (%s), so that every start decodes them, in "
            "about %.0f CPU seconds",
            folder,
            error.strerror or error,
            seconds,
        )
        return decode_all(source, num_threads=num_threads, **settings)
    log.info(
        "data: %d decoded images, %s, are mapped from %s, where they are kept because decoding "
        "takes about %.0f CPU seconds at every start; loader='memory' keeps nothing on disk",
        len(source),
        mib(needed),
        home,
        seconds,
    )
    return ArraySource(labels=source.labels, class_names=source.class_names, **arrays)


def _files(home: pathlib.Path) -> list[pathlib.Path]:
    return sorted(home.glob("*.npy"))


def _seconds(source: ImageSource, settings: dict) -> float:
    """Returns how long all would take in one thread, by a sample of them."""
    sample = source.taken(
        np.unique(np.linspace(0, len(source) - 1, min(NUM_TIMED, len(source))).astype(int))
    )
    arrays = {name: np.empty(shape, np.uint8) for name, shape in shapes(sample, **settings).items()}
    began = time.thread_time()
    try:
        decode_into(arrays, sample, targets=settings["targets"], num_threads=1)
    except UserError:
        return 0.0  # decoding them all says which
    return (time.thread_time() - began) / len(sample) * len(source)


def _make_room(folder: pathlib.Path, needed: int) -> None:
    """Removes what was used longest ago, until all that is kept is below the limit.

    Raises:
      OSError: so much may not be kept.
    """
    if needed > MOST_BYTES:
        raise OSError(f"they need {mib(needed)}, and at most {mib(MOST_BYTES)} are kept")
    homes = sorted((each for each in folder.iterdir() if each.is_dir()), key=_used_at)
    sizes = [sum(file.stat().st_size for file in _files(home)) for home in homes]
    over = sum(sizes) + needed - MOST_BYTES
    for home, size in zip(homes, sizes, strict=True):
        if over <= 0:
            break
        summary("data: removed %s, which was used longest ago of what is kept", home)
        shutil.rmtree(home, ignore_errors=True)
        over -= size
    free = shutil.disk_usage(folder).free
    if needed > DISK_SHARE * free:
        raise OSError(
            f"they need {mib(needed)}, more than {DISK_SHARE:.0%} of the {mib(free)} that are free"
        )


def _used_at(home: pathlib.Path) -> float:
    return home.stat().st_mtime
