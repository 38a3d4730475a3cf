"""Keeps what scans of a folder find, so that the next scan checks only changed files.

For each image with unchanged size and times, a manifest knows the earlier result. It takes some 20
bytes for each image: 25 MB for 1.3 million.

    manifest = Manifest(results_folder(), blobs)
    key = manifest.key(index)
    if manifest.found(key) is None:
        manifest.add(key, *examine(...))
    manifest.save()
"""

import functools
import hashlib
import json
import logging
import os
import pathlib
import tempfile
from collections.abc import Iterable

import numpy as np
import PIL

from tfaccel.common.errors import UserError
from tfaccel.common.regular_file import open_regular
from tfaccel.data.source import Blobs
from tfaccel.process.cache_folder import cache_folder

log = logging.getLogger("tfaccel")

# Changes whenever examine.py gives another result or text for the same image.
_VERSION = f"7 pillow {PIL.__version__}"

_WIDTHS = 2**31  # a size is one number, height * _WIDTHS + width: half the memory of a pair


def results_folder() -> pathlib.Path:
    """Makes the folder of manifests and lists, and returns it.

    Raises:
      UserError: the folder cannot be written.
    """
    folder = cache_folder("audit")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        raise UserError(
            f"the audit keeps its results in {folder}, which cannot be written "
            f"({error.strerror}); set XDG_CACHE_HOME to a folder that can be written"
        ) from error
    return folder


def label(folder: str, names: Iterable[str] = ()) -> str:
    """Returns a file name with the folder's name and a digest of the folder and the names."""
    digest = hashlib.blake2b(digest_size=6)
    for name in (folder, *names):
        digest.update(os.fsencode(name) + b"\0")
    shown = os.path.basename(folder)[:50] or "root"  # a name may have 255 bytes
    return f"{shown}-{digest.hexdigest()}"


class Manifest:
    """The results for the images of a folder. Several threads may read while one adds."""

    def __init__(self, cache: pathlib.Path, blobs: Blobs):
        """Reads the folder's manifest, if there is one; warns of a damaged one and ignores it.

        Args:
          cache: the folder of manifests.
          blobs: the images.
        """
        self._path = cache / f"{label(blobs.folder)}.npz"
        self._blobs = blobs
        # A shard's state is cached for its many images. A file has only one image.
        self._state = self._of_file if blobs.are_files else functools.cache(self._of_file)
        self._sizes, self._faults = {}, {}
        if self._path.exists():
            try:
                self._sizes, self._faults = _read(self._path)
            except Exception as error:  # a damaged file may make its reader raise anything
                message = "audit: %s is damaged (%s); every image is checked again"
                log.warning(message, self._path, error)

    def key(self, index: int) -> int:
        """Returns a number that identifies an image in its present state.

        Raises:
          OSError: the image's file does not exist.
        """
        blobs = self._blobs
        if blobs.are_files:
            text = self._state(index)
        else:
            place = f"\0{blobs.offsets[index]}\0{blobs.sizes[index]}"
            text = self._state(int(blobs.file_of[index])) + place.encode()
        if blobs.form is not None:  # a file may fit one config and not another
            text += f"\0{blobs.form}".encode()
        # With 64 bits and 1.3 million known images, a changed one counts as known once in 1e13.
        return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest())

    def _of_file(self, number: int) -> bytes:
        """Returns what changes with a file."""
        if self._blobs.reader is not None:
            return self._blobs.reader.state(number) + f"\0{_VERSION}".encode()
        return _state(self._blobs.files[number])

    def found(self, key: int) -> tuple[list[tuple[str, str]], tuple[int, int]] | None:
        """Returns the result of `examine`, or None for an image that is not known."""
        size = self._sizes.get(key)
        return None if size is None else (self._faults.get(key, []), divmod(size, _WIDTHS))

    def add(self, key: int, faults: list[tuple[str, str]], size: tuple[int, int]) -> None:
        """Adds the result of `examine` for an image."""
        self._sizes[key] = size[0] * _WIDTHS + size[1]
        if faults:
            self._faults[key] = faults

    def save(self) -> None:
        """Writes the file atomically: if two processes write, the file of the last one stays."""
        handle, unfinished = tempfile.mkstemp(dir=self._path.parent)
        try:
            with open(handle, "wb") as file:
                np.savez(
                    file,
                    known=np.fromiter(self._sizes, np.uint64, len(self._sizes)),
                    sizes=np.fromiter(self._sizes.values(), np.int64, len(self._sizes)),
                    faults=np.frombuffer(json.dumps(list(self._faults.items())).encode(), np.uint8),
                )
            os.replace(unfinished, self._path)
        except BaseException:
            os.unlink(unfinished)
            raise


def _state(file: str) -> bytes:
    stat = os.stat(file)
    # st_ctime changes with the permissions, and if another file with the same time of change has
    # replaced the file.
    state = f"\0{stat.st_size}\0{stat.st_mtime_ns}\0{stat.st_ctime_ns}\0{_VERSION}"
    return os.fsencode(file) + state.encode()


def _read(path: pathlib.Path) -> tuple[dict[int, int], dict[int, list[tuple[str, str]]]]:
    with open_regular(path) as file, np.load(file, allow_pickle=False) as arrays:
        faults = json.loads(arrays["faults"].tobytes())
        sizes = dict(zip(arrays["known"].tolist(), arrays["sizes"].tolist(), strict=True))
    return sizes, {key: [tuple(each) for each in found] for key, found in faults}
