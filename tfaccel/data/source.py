"""The common form of all image sources: where each example's bytes are, and the labels.

The files in data/sources/ return an `ImageSource` or `ArraySource`, and the loaders read it. Class
folders, lists, TFRecords and tar shards all become ranges of bytes in files. So any example can be
read at any time, and the toolkit decides on the order.
"""

import dataclasses
import hashlib
import io
import os
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Executor
from typing import BinaryIO, NamedTuple, Protocol

import numpy as np

from tfaccel.common.errors import UserError
from tfaccel.common.redact import shown
from tfaccel.common.regular_file import check_regular, open_regular, read_regular
from tfaccel.config import ImageConfig
from tfaccel.data import stamps
from tfaccel.data.file_names import FileNames
from tfaccel.data.raster import RasterForm, form_of, has_arrays

# What the labels of an image are, and the form of a source's labels:
#   classes      one class: [num_examples] int32, indices into `class_names`
#   multilabel   any number of classes: [num_examples, classes] float32, 1 for the image's classes
#   regression   numbers: [num_examples, targets] float32, in the order of `target_names`
TASKS = ("classes", "multilabel", "regression")

# The fact with the names of the classes, of the numbers, or of the values of masks.
NAMES = "label names"

# The number of an example's file; its place in it and its size, or None for a whole file.
Unit = tuple[int, int | None, int | None]


class UnreadableError(UserError):
    """Some examples cannot be used.

    Attributes:
      ids: indices of the examples in the source.
    """

    def __init__(self, message: str, ids: tuple[int, ...]):
        """Takes the message and the indices of the examples."""
        super().__init__(message)
        self.ids = ids


class Reader(Protocol):
    """What reads examples that are in a store, or in files of another library.

    A unit is an example's file, its place in the file and its size; the last two are None for whole
    files. Several threads may use a reader at once.

    Attributes:
      fit: whether all shards together may be fetched, and not single examples.
      names: the files.
    """

    fit: bool
    names: FileNames

    def read(self, number: int, offset: int | None, size: int | None) -> bytes:
        """Returns the bytes of a unit."""

    def ahead(self, units: Iterable[Unit]) -> None:
        """Begins to fetch units, and returns at once."""

    def states(self) -> np.ndarray:
        """Returns [num_files, 2] int64 that change with the files, as far as it is known."""

    def state(self, number: int) -> bytes:
        """Returns what changes with a file, and names it."""

    def learn(self) -> None:
        """Finds out the states of all files, which `state` then returns quickly."""

    def taken(self, ids: np.ndarray) -> "Reader":
        """Returns a reader of some of the files, if each example is a whole file."""


class Lines(NamedTuple):
    """The lines of a list that name the images.

    Attributes:
      file: the list.
      numbers: [num_examples] int64, the number of each example's line, from 1.
    """

    file: str
    numbers: np.ndarray

    def of(self, index: int) -> str:
        """Returns the line of an example, in words."""
        return f"{self.file} line {self.numbers[index]}"


@dataclasses.dataclass(frozen=True)
class Blobs:
    """Encoded images: each is a whole file, or a range of bytes in a file.

    Attributes:
      files: absolute paths, or URLs of a store, kept as `FileNames`. If images are whole files, one
        for each example.
      file_of: [num_examples] int32, index of the file of each example; None for whole files.
      offsets: [num_examples] int64, in bytes; None for whole files.
      sizes: [num_examples] int64, in bytes; None for whole files.
      recode: what turns the stored bytes into those of another encoding; None for the stored ones.
      form: for images that are read as they are stored, their form: see `raster.py`. None for
        images of 8 bits with 1 or 3 channels, which the usual decoders read.
      reader: what reads the examples, if these are not whole files or ranges of bytes in files of
        this host; None if they are.
      lines: for whole files that a list names, their lines, which messages name; else None.
    """

    files: Sequence[str]
    file_of: np.ndarray | None = None
    offsets: np.ndarray | None = None
    sizes: np.ndarray | None = None
    recode: Callable[[bytes], bytes] | None = None
    form: RasterForm | None = None
    reader: Reader | None = None
    lines: Lines | None = None

    def __post_init__(self):
        """Stores the paths compactly."""
        object.__setattr__(self, "files", FileNames.of(self.files))

    def __repr__(self):
        """Returns the number of examples and files, and the folder."""
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
    def are_read_as_files(self) -> bool:
        """Whether another library may read each example's file, instead of `read`."""
        return self.are_files and self.recode is None and self.reader is None

    @property
    def dtype(self) -> str:
        """The data type of decoded pixels."""
        return "uint8" if self.form is None else self.form.dtype

    @property
    def folder(self) -> str:
        """The deepest folder that contains all files."""
        return self.files.folder

    def name(self, index: int) -> str:
        """Returns the name of an example: its path, or "shard.tar[bytes 512+1024]"."""
        if self.are_files:
            return self.files[index]
        file = self.files[self.file_of[index]]
        if hasattr(self.reader, "title"):  # an object in memory, without a path
            return f"{self.reader.unit_name} {self.offsets[index]} of {self.reader.title}"
        if hasattr(self.reader, "unit_name"):
            return f"{file}[{self.reader.unit_name} {self.offsets[index]}]"
        return f"{file}[bytes {self.offsets[index]}+{self.sizes[index]}]"

    def digest(self) -> str:
        """Returns a digest of the file names and ranges, which does not depend on the folder."""
        digest = hashlib.blake2b(digest_size=16)
        for part in self.files.below_folder():
            digest.update(part)
        for each in (self.file_of, self.offsets, self.sizes):
            if each is not None:
                digest.update(np.ascontiguousarray(each, np.int64))
        return digest.hexdigest()

    def read(self, index: int) -> bytes:
        """Returns an example's bytes. Several threads may call it at once.

        Raises:
          OSError: the file cannot be read, or has become shorter.
        """
        stored = self._stored(index)
        return stored if self.recode is None else self.recode(stored)

    def opened(self, index: int) -> BinaryIO:
        """Returns an example as an open file. Of a whole file of this host only the part that is
        used is read; errors as in `read`."""
        if self.are_read_as_files:
            return open_regular(self.files[index])
        return io.BytesIO(self.read(index))

    def _stored(self, index: int) -> bytes:
        if self.reader is not None:
            return self.reader.read(*self._unit(index))
        if self.are_files:
            return read_regular(self.files[index])
        offset, size = int(self.offsets[index]), int(self.sizes[index])
        with open_regular(self.files[self.file_of[index]], buffering=0) as file:
            data = os.pread(file.fileno(), size, offset)
        if len(data) < size:
            raise OSError(f"{self.name(index)} ends after {len(data)} bytes")
        return data

    def _unit(self, index: int) -> Unit:
        """Returns the number of an example's file, and its range of bytes or None."""
        if self.are_files:
            return index, None, None
        return int(self.file_of[index]), int(self.offsets[index]), int(self.sizes[index])

    def ahead(self, ids: np.ndarray) -> None:
        """Begins to fetch some examples, if they are in a store, and returns at once."""
        if self.reader is None:
            return
        if not self.are_files and self.reader.fit:
            shards = np.unique(self.file_of[ids]).tolist()
            self.reader.ahead([(each, None, None) for each in shards])
        else:
            self.reader.ahead(map(self._unit, ids.tolist()))

    def check_files(self, ids: np.ndarray, pool: Executor, *, num_threads: int) -> None:
        """Checks the files of some examples, before another library opens them.

        What a reader reads is not checked, because it opens regular files only.

        Args:
          ids: indices of the examples.
          pool: a pool of threads, so that the latencies of a network drive overlap.
          num_threads: number of threads in the pool.

        Raises:
          OSError: a file is missing, or is a FIFO, a device or a socket; it names the first.
        """
        if self.reader is not None:
            return
        numbers = ids if self.are_files else np.unique(self.file_of[ids])
        files = [self.files.encoded(index) for index in numbers.tolist()]
        list(pool.map(check_regular, (files[start::num_threads] for start in range(num_threads))))

    def taken(self, ids: np.ndarray) -> "Blobs":
        """Returns the examples at the given indices."""
        if self.are_files:
            reader = None if self.reader is None else self.reader.taken(ids)
            files = self.files.taken(ids) if reader is None else reader.names
            lines = self.lines and self.lines._replace(numbers=self.lines.numbers[ids])
            return dataclasses.replace(self, files=files, reader=reader, lines=lines)
        ranges = {name: getattr(self, name)[ids] for name in ("file_of", "offsets", "sizes")}
        return dataclasses.replace(self, **ranges)


@dataclasses.dataclass(frozen=True)
class ImageSource:
    """Encoded images with labels, or with target images.

    Attributes:
      images: the input images.
      labels: what is learned, in the form of the task (see `TASKS`); None for pairs.
      class_names: names of the classes, in order; empty for pairs and numbers.
      targets: target images of pairs, one for each input; None for labelled images.
      groups: [num_examples] int64, numbers of the groups that a split keeps together; or None.
      target_names: the name of each column of the labels, if these are numbers, or of each value of
        the masks; else empty.
    """

    images: Blobs
    labels: np.ndarray | None
    class_names: tuple[str, ...] = ()
    targets: Blobs | None = None
    groups: np.ndarray | None = None
    target_names: tuple[str, ...] = ()

    def __repr__(self):
        """Returns a summary of one line."""
        pairs = ", with targets" if self.targets is not None else ""
        folder = shown(self.images.folder)
        return f"<tfaccel source: {len(self):,} images{_told(self)}{pairs}, in {folder}>"

    def __len__(self):
        """Returns the number of examples."""
        return len(self.images)

    @property
    def task(self) -> str | None:
        """One of TASKS, or None for pairs."""
        return _task(self)

    def decoded(self, *, images: np.ndarray, targets: np.ndarray | None = None) -> "ArraySource":
        """Returns the same examples with the given pixels, and with the same labels."""
        return ArraySource(
            images, self.labels, self.class_names, targets, target_names=self.target_names
        )

    def facts(self) -> dict[str, object]:
        """Returns the facts that must be the same on all workers, by name: see `agreement`."""
        parts = [each.digest() for each in (self.images, self.targets) if each is not None]
        return {
            "number of examples": len(self),
            "files": parts,
            "labels": _digest(self.labels),
            NAMES: _names(self),
        }

    def stamps(self) -> dict[str, dict]:
        """Returns values that change if a file is replaced; workers' own copies may differ."""
        parts = {"files": self.images, "target files": self.targets}
        return {name: _stamp(each) for name, each in parts.items() if each}

    def taken(self, ids: np.ndarray) -> "ImageSource":
        """Returns the examples at the given indices, with the same class numbers."""
        return dataclasses.replace(
            self,
            images=self.images.taken(ids),
            labels=None if self.labels is None else self.labels[ids],
            targets=None if self.targets is None else self.targets.taken(ids),
            groups=None if self.groups is None else self.groups[ids],
        )

    def without(self, bad: np.ndarray) -> "ImageSource":
        """Returns the source without the examples at the indices `bad`."""
        return self.taken(np.delete(np.arange(len(self)), bad))


@dataclasses.dataclass(frozen=True)
class ArraySource:
    """Decoded images with labels or target images, in memory or mapped from a file.

    Attributes:
      images: [num_examples, height, width, channels] uint8, uint16 or float32.
      labels: what is learned, in the form of the task (see `TASKS`); None for pairs.
      class_names: names of the classes, in order; empty for pairs and numbers.
      targets: target images of pairs, [num_examples, height, width, channels] of one of these
        dtypes; else None.
      target_names: the name of each column of the labels, if these are numbers, or of each value of
        the masks; else empty.
      copies: copies of images and targets in the GPUs' memory, by (name, device). The loader
        "memory" makes them. All loaders of the source share them, and they live as long as it.
    """

    images: np.ndarray
    labels: np.ndarray | None
    class_names: tuple[str, ...] = ()
    targets: np.ndarray | None = None
    target_names: tuple[str, ...] = ()
    copies: dict = dataclasses.field(default_factory=dict, init=False, repr=False, compare=False)
    groups = None  # an array has none of its own

    def __repr__(self):
        """Returns a summary of one line."""
        pairs = ", with targets" if self.targets is not None else ""
        dtype, shape = self.images.dtype.name, self.images.shape
        return f"<tfaccel source: {dtype} array {shape}{_told(self)}{pairs}>"

    def __len__(self):
        """Returns the number of examples."""
        return len(self.images)

    @property
    def task(self) -> str | None:
        """One of TASKS, or None for pairs."""
        return _task(self)

    def facts(self) -> dict[str, object]:
        """Returns the facts that must be the same on all workers. Pixels would take too long."""
        shapes = [each.shape for each in (self.images, self.targets) if each is not None]
        return {
            "number of examples": len(self),
            "shape": shapes,
            "labels": _digest(self.labels),
            NAMES: _names(self),
        }

    def stamps(self) -> dict[str, dict]:
        """Returns values that change if an array is replaced: see `stamps.of_array`."""
        parts = {"images": self.images, "targets": self.targets}
        return {name: stamps.of_array(each) for name, each in parts.items() if each is not None}

    def taken(self, ids: np.ndarray) -> "ArraySource":
        """Returns the examples at the given indices, with the same class numbers."""
        arrays = {name: getattr(self, name) for name in ("images", "labels", "targets")}
        taken = {name: each[ids] for name, each in arrays.items() if each is not None}
        return dataclasses.replace(self, **taken)


def as_stored(source: ImageSource | ArraySource, images: ImageConfig) -> ImageSource | ArraySource:
    """Returns the source, to be read as it is stored if the usual decoders cannot read it.

    These are images of other than 8 bits, of other than 1 or 3 channels, and .npy files.

    Raises:
      UserError: there are .npy files, and beside them images that are not read as arrays.
    """
    if isinstance(source, ArraySource):
        return source
    parts = [source.images]
    parts += [source.targets] if source.targets is not None and images.targets == "image" else []
    if images.are_usual and not any(map(has_arrays, parts)):
        return source
    form = form_of(images)
    changed = dataclasses.replace(source, images=dataclasses.replace(source.images, form=form))
    if len(parts) > 1:
        changed = dataclasses.replace(
            changed, targets=dataclasses.replace(source.targets, form=form)
        )
    return changed


def spread(length: int, most: int) -> np.ndarray:
    """Returns at most `most` indices, spread evenly over `length` examples: [n] int64."""
    return np.unique(np.linspace(0, length - 1, min(most, length)).astype(int))


def fed_labels(source: ImageSource | ArraySource) -> np.ndarray:
    """Returns the labels as the loaders give them: [num_examples] int64, or unchanged floats.

    TensorFlow passes int32 between functions through the host, so each step would wait for the GPU.
    """
    return source.labels.astype(np.int64) if source.labels.ndim == 1 else source.labels


def _stamp(blobs: Blobs) -> dict[str, object]:
    if blobs.reader is not None:
        return stamps.of_states(blobs.reader.states())
    return stamps.of_files(blobs.files)


def _task(source: ImageSource | ArraySource) -> str | None:
    if source.labels is None:
        return None
    if source.labels.ndim == 1:
        return "classes"
    return "multilabel" if source.class_names else "regression"


def _names(source: ImageSource | ArraySource) -> dict[str, str]:
    """Returns the names of classes, numbers or values of masks, by their number as text."""
    return {str(i): name for i, name in enumerate(source.class_names or source.target_names)}


def _told(source: ImageSource | ArraySource) -> str:
    """Returns what a source's summary says of its labels, with a comma before it; or ""."""
    if source.target_names:
        return f", with the numbers {', '.join(source.target_names)}"
    several = ", several an image" if source.task == "multilabel" else ""
    return f", {len(source.class_names)} classes{several}" if source.class_names else ""


def _digest(labels: np.ndarray | None) -> str | None:
    if labels is None:
        return None
    if labels.ndim > 1:
        digest = hashlib.blake2b(str(labels.shape).encode(), digest_size=16)
        digest.update(np.ascontiguousarray(labels, np.float32))
        return digest.hexdigest()
    return hashlib.blake2b(np.ascontiguousarray(labels, np.int64), digest_size=16).hexdigest()
