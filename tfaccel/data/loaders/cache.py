"""Decoded images on disk. They are made once, and mapped by every run with the same settings.

Arrays are read from disk page by page when examples are taken, so they may be larger than memory.

    source = cached(source, stored_size=(256, 256), channels=3, targets="image", num_threads=8)
    source.images[7]                   # [256, 256, 3] uint8, read-only

    $XDG_CACHE_HOME/tfaccel/pixels/<key>/{images,targets}.npy, manifest.json

The key depends on the files (paths, sizes, times of change, ranges of bytes) and the settings, but
not on the labels. Each run reads the labels from its source.
"""

import contextlib
import fcntl
import functools
import hashlib
import json
import logging
import os
import pathlib
import shutil
import time
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from tfaccel.common.errors import UserError
from tfaccel.common.own_files import open_own
from tfaccel.common.regular_file import check_regular
from tfaccel.common.run_log import summary
from tfaccel.data.file_names import FileNames
from tfaccel.data.loaders.decode import Form, decode_into, forms
from tfaccel.data.source import ArraySource, Blobs, ImageSource
from tfaccel.process import waits
from tfaccel.process.cache_folder import cache_folder

VERSION = 3  # changes whenever the same key would mean other bytes
FILES_AT_A_TIME = 1024  # files that one thread asks for sizes and times
BLOCK_BYTES = 2**24  # bytes under one checksum
SPARE_BYTES = 2**26  # disk space that is left free, for the manifest and other programs

log = logging.getLogger("tfaccel")


def cached(
    source: ImageSource,
    *,
    num_threads: int,
    folder: str | os.PathLike | None = None,
    **settings,
) -> ArraySource:
    """Returns the decoded images from the cache, after decoding them into it if needed.

    If several processes find no cache, one of them decodes and the others wait. The first use in a
    process checks all bytes, at 1.1 GB a second on 2 busy cores (2026-11-21), or at the speed of
    the disk.

    Args:
      source: the encoded images.
      num_threads: number of threads that decode and check.
      folder: the folder of all caches; None for tfaccel/pixels in XDG_CACHE_HOME or ~/.cache.
      **settings: stored_size, channels and targets, as in `decode_all`.

    Raises:
      UnreadableError: as in `decode_all`.
      UserError: as in `decode_all`, or the folder cannot be written, or the disk is full.
    """
    folder = pathlib.Path(folder or cache_folder("pixels")).expanduser().absolute()
    try:
        arrays = arrays_in(stored(source, num_threads=num_threads, folder=folder, **settings))
    except OSError as error:
        raise UserError(
            f"decoded images cannot be kept in {folder} ({error.strerror or error}); set "
            "XDG_CACHE_HOME to a folder that can be written, or use another loader"
        ) from error
    return source.decoded(**arrays)


def stored(
    source: ImageSource,
    *,
    num_threads: int,
    folder: pathlib.Path,
    make_room: Callable[[pathlib.Path, int], None] | None = None,
    **settings,
) -> pathlib.Path:
    """Returns the folder below `folder` that has the decoded images in complete .npy files.

    Args:
      source: the encoded images.
      num_threads: number of threads that decode and check.
      folder: the folder of all caches, absolute.
      make_room: called with the folder and the number of bytes before images are decoded into it;
        it may raise OSError.
      **settings: stored_size, channels and targets, as in `decode_all`.

    Raises:
      OSError: the files cannot be written.
      UnreadableError, UserError: as in `cached`.
    """
    form_of, targets = forms(source, **settings), settings["targets"]
    home = folder / _key(source, form_of, targets, num_threads)
    if _is_whole(home, form_of, num_threads):
        return home
    folder.mkdir(parents=True, exist_ok=True)
    with _alone(home.with_suffix(".lock")):
        if not _is_whole(home, form_of, num_threads):  # another process may have just made it
            if make_room is not None:
                make_room(folder, sum(each.num_bytes for each in form_of.values()))
            _build(home, form_of, source, targets=targets, num_threads=num_threads)
    return home


def _key(source: ImageSource, form_of: dict, targets: str, num_threads: int) -> str:
    digest = hashlib.blake2b(repr((VERSION, form_of, targets)).encode(), digest_size=16)
    for blobs in filter(None, (source.images, source.targets)):
        identify(digest, blobs, num_threads)
    return digest.hexdigest()


def identify(digest, blobs: Blobs, num_threads: int) -> None:
    """Adds to a digest what changes with the images: paths, sizes, times and ranges of bytes.

    Args:
      digest: a digest of hashlib.
      blobs: the images, which take 2 us of CPU for each file.
      num_threads: number of threads that ask for sizes and times.
    """
    if blobs.reader is not None:
        blobs.reader.learn()
        for number in range(len(blobs.files)):
            digest.update(blobs.reader.state(number))
    else:
        with ThreadPoolExecutor(num_threads) as pool:
            starts = range(0, len(blobs.files), FILES_AT_A_TIME)
            for lines in pool.map(functools.partial(_identities, blobs.files), starts):
                digest.update(lines)
    if not blobs.are_files:
        for each in (blobs.file_of, blobs.offsets, blobs.sizes):
            digest.update(np.ascontiguousarray(each, np.int64))


def _identities(files: FileNames, start: int) -> bytes:
    stop = min(start + FILES_AT_A_TIME, len(files))
    return b"".join(map(_identity, files.encoded_part(start, stop)))


def _identity(file: bytes) -> bytes:
    try:
        stat = os.stat(file)
    except OSError:
        return file  # decoding it reports the error
    return b"%s\0%d %d\0" % (file, stat.st_size, stat.st_mtime_ns)


@contextlib.contextmanager
def _alone(lock: pathlib.Path) -> Iterator[None]:
    """Within the context, no other process has this lock. The lock ends with its process."""
    # The file stays: if it were removed, two processes could hold the lock.
    with open(open_own(lock, os.O_WRONLY | os.O_CREAT), "w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            summary("cache: waiting for another process that writes %s", lock.with_suffix(""))
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _build(home: pathlib.Path, form_of: dict, source, *, targets: str, num_threads: int) -> None:
    """Writes the cache under another name, and renames it when it is complete."""
    part, began = home.with_suffix(".part"), time.monotonic()
    for leftover in (part, home):  # of a process that was killed, or damaged
        if leftover.exists():
            shutil.rmtree(leftover)
    part.mkdir()
    try:
        files = {name: part / f"{name}.npy" for name in form_of}
        arrays = {name: _reserved(files[name], form) for name, form in form_of.items()}
        with waits.on("decoding the images into the cache", of=f"{len(source)} of {form_of}"):
            decode_into(arrays, source, targets=targets, num_threads=num_threads)
        # The files are not flushed, because that may wait for everything else that is written to
        # the disk. After a power failure, the checksums show which bytes are lost.
        checksums = {name: _checksums(files[name], num_threads) for name in files}
        (part / "manifest.json").write_text(json.dumps({"checksums": checksums}))
        part.rename(home)
    except BaseException:
        shutil.rmtree(part, ignore_errors=True)
        raise
    log.info(
        "cache: decoded %d images into %s, %.0f MiB, in %.1f s",
        len(source),
        home,
        sum(each.num_bytes for each in form_of.values()) / 2**20,
        time.monotonic() - began,
    )


def _reserved(file: pathlib.Path, form: Form) -> np.memmap:
    """Returns a new mapped array with reserved disk space; on a full disk, a write would crash.

    Raises:
      OSError: there is not enough space.
    """
    free, needed = shutil.disk_usage(file.parent).free, form.num_bytes + SPARE_BYTES
    if free < needed:
        raise OSError(f"they need {needed / 2**20:.0f} MiB, but {free / 2**20:.0f} MiB are free")
    array = np.lib.format.open_memmap(file, mode="w+", dtype=form.dtype, shape=form.shape)
    with open(file, "r+b") as opened:
        os.posix_fallocate(opened.fileno(), 0, file.stat().st_size)
    return array


def _is_whole(home: pathlib.Path, form_of: dict, num_threads: int) -> bool:
    """Returns whether the arrays are complete and unchanged, and warns if they are damaged."""
    if not home.exists():
        return False
    began, manifest = time.monotonic(), home / "manifest.json"
    try:
        version = str(manifest), manifest.stat().st_mtime_ns
        if version not in _checked:
            check_regular(home.iterdir())  # NumPy would wait for a FIFO
            for name, expected in json.loads(manifest.read_text())["checksums"].items():
                if _checksums(home / f"{name}.npy", num_threads) != expected:
                    raise ValueError(f"{name}.npy has changed since it was written")
            _checked.add(version)
            log.info("cache: %s is used; checked in %.1f s", home, time.monotonic() - began)
        found = {name: Form(each.shape, each.dtype.name) for name, each in arrays_in(home).items()}
        if found != form_of:
            raise ValueError("its arrays have other shapes or data types than expected")
        return True
    except Exception as error:  # a reader of a damaged file may raise anything
        log.warning("cache: %s is damaged (%s) and will be written again", home, error)
        return False


_checked: set[tuple[str, int]] = set()  # manifests that this process has checked, which takes time


def arrays_in(home: pathlib.Path) -> dict[str, np.ndarray]:
    """Returns the mapped arrays of a cache, by name."""
    return {file.stem: np.load(file, mmap_mode="r") for file in sorted(home.glob("*.npy"))}


def _checksums(file: pathlib.Path, num_threads: int) -> list[int]:
    """Returns the CRC-32 of each block of a file."""
    starts = range(0, file.stat().st_size, BLOCK_BYTES)
    with ThreadPoolExecutor(num_threads) as pool:
        return list(pool.map(functools.partial(_checksum, file), starts))


def _checksum(file: pathlib.Path, start: int) -> int:
    with open(file, "rb", buffering=0) as opened:
        return zlib.crc32(os.pread(opened.fileno(), BLOCK_BYTES, start))
