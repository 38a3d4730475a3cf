"""What earlier scans of a folder found, so that the next one looks at changed files alone.

Takes images; gives, for each whose file has kept its size and times since, what was found. Some
20 bytes an image: 25 MB for 1.3 million.

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

# Changed whenever examine.py would say something else of the same image.
_VERSION = f"5 pillow {PIL.__version__}"

_WIDTHS = 2**31  # a size is kept as one number, height * _WIDTHS + width: half of a pair's memory


def results_folder() -> pathlib.Path:
    """Returns the folder of manifests and lists, and makes it.

    Raises:
      UserError: it cannot be written to.
    """
    folder = cache_folder("audit")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        raise UserError(
            f"the audit keeps its results in {folder}, which cannot be written to "
            f"({error.strerror}); set XDG_CACHE_HOME to a folder that can"
        ) from error
    return folder


def label(folder: str, names: Iterable[str] = ()) -> str:
    """Returns a file name that stands for a folder and these names, and begins as the folder's."""
    digest = hashlib.blake2b(digest_size=6)
    for name in (folder, *names):
        digest.update(os.fsencode(name) + b"\0")
    shown = os.path.basename(folder)[:50] or "root"  # a name may have 255 bytes
    return f"{shown}-{digest.hexdigest()}"


class Manifest:
    """What was found in the images of a folder. Several threads may ask while one adds."""

    def __init__(self, cache: pathlib.Path, blobs: Blobs):
        """Reads the folder's manifest, if there is one; a damaged one is named and passed over.

        Args:
          cache: the folder that it is kept in.
          blobs: the images.
        """
        self._path = cache / f"{label(blobs.folder)}.npz"
        self._blobs = blobs
        # One shard holds many images; a file holds one, and is not to be kept in mind.
        self._state = _state if blobs.are_files else functools.cache(_state)
        self._sizes, self._faults = {}, {}
        if self._path.exists():
            try:
                self._sizes, self._faults = _read(self._path)
            except Exception as error:  # a damaged file may make its reader raise anything
                log.warning(
                    "audit: %s is damaged (%s); every image is looked at again", self._path, error
                )

    def key(self, index: int) -> int:
        """Returns a number that stands for an image as it is now.

        Raises:
          OSError: its file is not there.
        """
        blobs = self._blobs
        if blobs.are_files:
            text = self._state(blobs.files[index])
        else:
            place = f"\0{blobs.offsets[index]}\0{blobs.sizes[index]}"
            text = self._state(blobs.files[blobs.file_of[index]]) + place.encode()
        # 64 bits: beside 1.3 million known images, a changed one passes for known once in 1e13.
        return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest())

    def found(self, key: int) -> tuple[list[tuple[str, str]], tuple[int, int]] | None:
        """Returns what `examine` said; None for an image not looked at before."""
        size = self._sizes.get(key)
        return None if size is None else (self._faults.get(key, []), divmod(size, _WIDTHS))

    def add(self, key: int, faults: list[tuple[str, str]], size: tuple[int, int]) -> None:
        """Takes in what `examine` said of an image."""
        self._sizes[key] = size[0] * _WIDTHS + size[1]
        if faults:
            self._faults[key] = faults

    def save(self) -> None:
        """Writes the file in one go: of two processes that write, the last one's stays, whole."""
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
    # The second time is that of the inode's last change, by which a file shows that it has other
    # permissions, or that another of the same age has taken its place.
    state = f"\0{stat.st_size}\0{stat.st_mtime_ns}\0{stat.st_ctime_ns}\0{_VERSION}"
    return os.fsencode(file) + state.encode()


def _read(path: pathlib.Path) -> tuple[dict[int, int], dict[int, list[tuple[str, str]]]]:
    with open_regular(path) as file, np.load(file, allow_pickle=False) as arrays:
        faults = json.loads(arrays["faults"].tobytes())
        sizes = dict(zip(arrays["known"].tolist(), arrays["sizes"].tolist(), strict=True))
    return sizes, {key: [tuple(each) for each in found] for key, found in faults}
