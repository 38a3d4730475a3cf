"""What every image source gives: where each example's bytes are, and what it is labelled.

Takes nothing; `ImageSource` and `ArraySource` are what the files in data/sources/ return and what
the loaders read. Class folders, lists, TFRecords and tar shards are all ranges of bytes in files,
so that any example can be read at any time, and the order is the toolkit's own.
"""

import dataclasses
import hashlib
import os
from collections.abc import Sequence
from concurrent.futures import Executor

import numpy as np

from tfaccel.common.errors import UserError
from tfaccel.common.redact import shown
from tfaccel.common.regular_file import check_regular, open_regular, read_regular
from tfaccel.data import stamps
from tfaccel.data.file_names import FileNames


class UnreadableError(UserError):
    """Some examples cannot be used.

    Attributes:
      ids: which, counted in the source.
    """

    def __init__(self, message: str, ids: tuple[int, ...]):
        """Takes the sentence and the examples."""
        super().__init__(message)
        self.ids = ids


@dataclasses.dataclass(frozen=True)
class Blobs:
    """Encoded images: each a whole file, or a range of bytes in one.

    Attributes:
      files: absolute paths, kept as `FileNames`; of whole files, one for each example.
      file_of: [num_examples] int32, which file holds each example; None for whole files.
      offsets: [num_examples] int64, in bytes; None for whole files.
      sizes: [num_examples] int64, in bytes; None for whole files.
    """

    files: Sequence[str]
    file_of: np.ndarray | None = None
    offsets: np.ndarray | None = None
    sizes: np.ndarray | None = None

    def __post_init__(self):
        """Keeps the paths in little memory."""
        object.__setattr__(self, "files", FileNames.of(self.files))

    def __repr__(self):
        """Returns how many, and from where; not every path."""
        where = f" in {shown(self.folder)}" if self.files else ""
        return f"<tfaccel images: {len(self):,} encoded, in {len(self.files):,} files{where}>"

    def __len__(self):
        """Returns the number of examples."""
        return len(self.files) if self.file_of is None else len(self.file_of)

    @property
    def are_files(self) -> bool:
        """Whether each example is a whole file."""
        return self.file_of is None

    @property
    def folder(self) -> str:
        """The folder that all files lie in."""
        return self.files.folder

    def name(self, index: int) -> str:
        """Returns what to call an example: its path, or "shard.tar[bytes 512+1024]"."""
        if self.are_files:
            return self.files[index]
        file = self.files[self.file_of[index]]
        return f"{file}[bytes {self.offsets[index]}+{self.sizes[index]}]"

    def digest(self) -> str:
        """Returns what tells these from others, wherever the folder that holds all of them is."""
        digest = hashlib.blake2b(digest_size=16)
        for part in self.files.below_folder():
            digest.update(part)
        for each in (self.file_of, self.offsets, self.sizes):
            if each is not None:
                digest.update(np.ascontiguousarray(each, np.int64))
        return digest.hexdigest()

    def read(self, index: int) -> bytes:
        """Returns an example's bytes. Safe to call from several threads.

        Raises:
          OSError: the file cannot be read, or has become shorter.
        """
        if self.are_files:
            return read_regular(self.files[index])
        offset, size = int(self.offsets[index]), int(self.sizes[index])
        with open_regular(self.files[self.file_of[index]], buffering=0) as file:
            data = os.pread(file.fileno(), size, offset)
        if len(data) < size:
            raise OSError(f"{self.name(index)} ends after {len(data)} bytes")
        return data

    def check_files(self, ids: np.ndarray, pool: Executor, *, num_threads: int) -> None:
        """Looks at the files of some examples, which another library is to open.

        Args:
          ids: of the examples.
          pool: of threads, so that a network drive is not waited for once for each file.
          num_threads: of the pool.

        Raises:
          OSError: for the first that is not there, or is a FIFO, a device or a socket.
        """
        numbers = ids if self.are_files else np.unique(self.file_of[ids])
        files = [self.files.encoded(index) for index in numbers.tolist()]
        list(pool.map(check_regular, (files[start::num_threads] for start in range(num_threads))))

    def taken(self, ids: np.ndarray) -> "Blobs":
        """Returns the examples at these indices alone."""
        if self.are_files:
            return Blobs(self.files.taken(ids))
        return Blobs(self.files, *(each[ids] for each in (self.file_of, self.offsets, self.sizes)))


@dataclasses.dataclass(frozen=True)
class ImageSource:
    """Encoded images with labels, or with target images.

    Attributes:
      images: the inputs.
      labels: [num_examples] int32, an index into `class_names` for each; None for pairs.
      class_names: of the labels, in order; empty for pairs.
      targets: of paired images, one for each input; None for labelled ones.
    """

    images: Blobs
    labels: np.ndarray | None
    class_names: tuple[str, ...] = ()
    targets: Blobs | None = None

    def __repr__(self):
        """Returns what it holds, in a line; not every path and label."""
        classes = f", {len(self.class_names)} classes" if self.class_names else ""
        pairs = ", with targets" if self.targets is not None else ""
        folder = shown(self.images.folder)
        return f"<tfaccel source: {len(self):,} images{classes}{pairs}, in {folder}>"

    def __len__(self):
        """Returns the number of examples."""
        return len(self.images)

    def facts(self) -> dict[str, object]:
        """Returns what must be the same for all workers, by name: see `agreement`."""
        parts = [each.digest() for each in (self.images, self.targets) if each is not None]
        return {"number of examples": len(self), "files": parts, "labels": _digest(self.labels)}

    def stamps(self) -> dict[str, dict]:
        """Returns what changes when a file is replaced; of workers' own copies it may differ."""
        parts = {"files": self.images, "target files": self.targets}
        return {name: stamps.of_files(each.files) for name, each in parts.items() if each}

    def taken(self, ids: np.ndarray) -> "ImageSource":
        """Returns the examples at these indices alone. Class numbers stay."""
        return dataclasses.replace(
            self,
            images=self.images.taken(ids),
            labels=None if self.labels is None else self.labels[ids],
            targets=None if self.targets is None else self.targets.taken(ids),
        )

    def without(self, bad: np.ndarray) -> "ImageSource":
        """Returns this less the examples at the indices `bad`. Class numbers stay."""
        return self.taken(np.delete(np.arange(len(self)), bad))


@dataclasses.dataclass(frozen=True)
class ArraySource:
    """Decoded images with labels, in memory or mapped from a file.

    Attributes:
      images: [num_examples, height, width, channels] uint8.
      labels: [num_examples] int32.
      class_names: of the labels, in order.
      targets: of paired images, [num_examples, height, width, channels] uint8; else None.
      copies: of images and targets in GPUs' memory, by (name, device); the loader "memory" makes
        them. All loaders of this source share them, and they go when it goes.
    """

    images: np.ndarray
    labels: np.ndarray | None
    class_names: tuple[str, ...] = ()
    targets: np.ndarray | None = None
    copies: dict = dataclasses.field(default_factory=dict, init=False, repr=False, compare=False)

    def __repr__(self):
        """Returns what it holds, in a line; not every pixel."""
        classes = f", {len(self.class_names)} classes" if self.class_names else ""
        pairs = ", with targets" if self.targets is not None else ""
        return f"<tfaccel source: uint8 array {self.images.shape}{classes}{pairs}>"

    def __len__(self):
        """Returns the number of examples."""
        return len(self.images)

    def facts(self) -> dict[str, object]:
        """Returns what must be the same for all workers, by name. (Not pixels: they take long.)"""
        shapes = [each.shape for each in (self.images, self.targets) if each is not None]
        return {"number of examples": len(self), "shape": shapes, "labels": _digest(self.labels)}

    def stamps(self) -> dict[str, dict]:
        """Returns what changes when an array is replaced: see `stamps.of_array`."""
        parts = {"images": self.images, "targets": self.targets}
        return {name: stamps.of_array(each) for name, each in parts.items() if each is not None}

    def taken(self, ids: np.ndarray) -> "ArraySource":
        """Returns the examples at these indices alone. Class numbers stay."""
        arrays = {name: getattr(self, name) for name in ("images", "labels", "targets")}
        taken = {name: each[ids] for name, each in arrays.items() if each is not None}
        return dataclasses.replace(self, **taken)


def _digest(labels: np.ndarray | None) -> str | None:
    if labels is None:
        return None
    return hashlib.blake2b(np.ascontiguousarray(labels, np.int64), digest_size=16).hexdigest()
