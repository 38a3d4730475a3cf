"""The absolute paths of many files, in one piece of memory.

`FileNames` is a sequence of strings. It is made of whole paths, or of folders and the names of
their files. A million paths take some 40 bytes each; as a tuple of strings they took 150.

    names = FileNames.of(["/data/a/1.png", "/data/a/2.png"])
    names[0], names[:2], len(names)
    names.encoded(0), names.rows(ids)    # the bytes of the paths, as the system has them
"""

import itertools
import os
from collections.abc import Iterable, Iterator, Sequence

import numpy as np

AT_A_TIME = 65536  # paths that are decoded to strings together
TAIL = 8  # bytes at the end of a path that are compared together


class FileNames(Sequence):
    """Paths, read-only. Equal to any sequence of the same strings; a slice is a tuple of strings.

    Attributes:
      folder: the deepest folder that contains all files.
    """

    def __init__(self, begin: str, rests: bytes | bytearray, folder: str):
        """Keeps the pieces that `of` and `in_folders` make.

        Args:
          begin: the beginning that all paths share.
          rests: the rest of each path, followed by a zero byte.
          folder: the deepest folder that contains all files.
        """
        self.folder = folder
        self._begin, self._bytes = os.fsencode(begin), np.frombuffer(rests, np.uint8)
        self._ends = np.flatnonzero(self._bytes == 0)  # no path contains a zero byte

    @classmethod
    def of(cls, files: Iterable[str]) -> "FileNames":
        """Returns the given paths, which are read one after another.

        Raises:
          ValueError: a path contains a zero byte.
        """
        if isinstance(files, cls):
            return files
        files, growing = iter(files), GrowingFileNames()
        while part := list(itertools.islice(files, AT_A_TIME)):
            growing.add(part)
        return growing.done()

    @classmethod
    def in_folders(
        cls, root: str, folders: Sequence[str], files: Iterable[Sequence[str]]
    ) -> "FileNames":
        """Returns the files of folders below a root. It is faster than `of`.

        Args:
          root: an absolute path, as from `os.path.abspath`.
          folders: the folders' names.
          files: the names of each folder's files, at least one; read one after another.
        """
        if len(folders) == 1:
            root, folders = os.path.join(root, folders[0]), [""]
        rests = bytearray()
        for folder, names in zip(folders, files, strict=True):
            own = f"/{folder}/" if folder else "/"
            rests += os.fsencode(own + f"\0{own}".join(names)) + b"\0"
        return cls(root.rstrip("/"), rests, root)

    def __len__(self) -> int:
        """Returns the number of paths."""
        return len(self._ends)

    def __getitem__(self, index):
        """Returns a path, or for a slice a tuple of paths."""
        if isinstance(index, slice):
            start, stop, step = index.indices(len(self))
            if step == 1:
                return tuple(map(os.fsdecode, self.encoded_part(start, stop)))
            return tuple(self[each] for each in range(start, stop, step))
        return os.fsdecode(self.encoded(index))

    def __iter__(self) -> Iterator[str]:
        """Yields the paths, faster than by index."""
        for start in range(0, len(self), AT_A_TIME):
            yield from self[start : start + AT_A_TIME]

    def __eq__(self, other) -> bool:
        """Returns whether the other has the same paths in the same order."""
        if not isinstance(other, FileNames | tuple | list):
            return NotImplemented
        return len(self) == len(other) and all(
            one == another for one, another in zip(self, other, strict=True)
        )

    __hash__ = None

    def __repr__(self) -> str:
        """Returns the number of files and their folder."""
        return f"<{len(self)} files in {self.folder}>"

    def encoded(self, index: int) -> bytes:
        """Returns the bytes of a path."""
        start, end = self._range(index)
        return self._begin + self._bytes[start:end].tobytes()

    def encoded_part(self, start: int, stop: int) -> list[bytes]:
        """Returns the bytes of the paths from `start` up to, not including, `stop`."""
        if start >= stop:
            return []
        first, last = self._range(start)[0], self._range(stop - 1)[1]
        return [self._begin + each for each in self._bytes[first:last].tobytes().split(b"\0")]

    def rows(self, ids: np.ndarray) -> np.ndarray:
        """Returns the bytes of some paths, [num_ids, longest] uint8, filled up with zero bytes."""
        encoded = np.array([self.encoded(index) for index in ids.tolist()])
        return encoded.view(np.uint8).reshape(len(ids), encoded.dtype.itemsize)

    def suffixes(self) -> set[str]:
        """Returns the suffixes of all file names, in lowercase: {".png"}."""
        found = set()
        for start in range(0, len(self), AT_A_TIME):
            ends = self._ends[start : start + AT_A_TIME]
            is_long = ends >= TAIL  # there are TAIL bytes before this end
            tails = self._bytes[ends[is_long, None] + np.arange(-TAIL, 0)].view(np.uint64)
            found |= {each.tobytes().rpartition(b"\0")[2] for each in np.unique(tails)}
            found |= {self.encoded(start + each) for each in np.flatnonzero(~is_long)}
        # A suffix may be longer than the tail. Then all paths are read.
        if any(b"." not in each for each in found):
            found = map(self.encoded, range(len(self)))
        return {os.fsdecode(os.path.splitext(each)[1]).lower() for each in found}

    def taken(self, ids: np.ndarray) -> "FileNames":
        """Returns the paths at the given indices."""
        return FileNames.of([self[index] for index in ids.tolist()])

    def below_folder(self) -> Iterable[bytes]:
        """Yields the bytes of each path below `folder`, followed by a zero byte."""
        cut = len(os.fsencode(self.folder)) - len(self._begin)
        if cut == 0:
            yield self._bytes.data
            return
        for index in range(len(self)):
            yield os.fsencode(self[index][len(self.folder) :]) + b"\0"

    def _range(self, index: int) -> tuple[int, int]:
        number = int(index)
        number += len(self) if number < 0 else 0
        if not 0 <= number < len(self):
            raise IndexError(f"index {index} is out of range for {len(self)} files")
        start = int(self._ends[number - 1]) + 1 if number else 0
        return start, int(self._ends[number])


class GrowingFileNames:
    """Collects paths part by part, and keeps only their bytes.

    growing = GrowingFileNames()
    growing.add(["/data/a/1.png", "/data/a/2.png"])
    growing.add(["/data/b/1.png"])
    growing.done()    # <3 files in /data>
    """

    def __init__(self):
        """Starts without paths."""
        self._ends = ()  # the first and the last path in alphabetical order
        self._begin, self._rests, self._count = "", bytearray(), 0

    def add(self, files: Sequence[str]) -> None:
        """Adds paths, best some ten thousand at once."""
        if not files:
            return
        self._ends = min([min(files), *self._ends[:1]]), max([max(files), *self._ends[1:]])
        # All paths share what the first and the last path in alphabetical order share.
        shared = os.path.commonprefix(self._ends)  # noqa: RUF071 - of letters
        size = len(shared[: len(self._folder())])
        if self._count and size < len(self._begin):  # earlier paths keep more of themselves, too
            more = os.fsencode(self._begin[size:])
            self._rests = bytearray(more + self._rests[:-1].replace(b"\0", b"\0" + more) + b"\0")
        self._begin = shared[:size]
        self._rests += os.fsencode("\0".join([file[size:] for file in files])) + b"\0"
        self._count += len(files)

    def _folder(self) -> str:
        folders = [os.path.dirname(each) for each in self._ends]
        if "://" in folders[0]:  # `commonpath` would make "s3:/" of "s3://"
            shared = os.path.commonprefix([f"{each}/" for each in folders])  # noqa: RUF071
            return shared.rpartition("/")[0]
        return os.path.commonpath(folders)

    def done(self) -> FileNames:
        """Returns all paths. `add` must not be called afterwards.

        Raises:
          ValueError: a path contains a zero byte.
        """
        names = FileNames(self._begin, self._rests, self._folder() if self._ends else "")
        if len(names) != self._count:
            raise ValueError("a path contains a zero byte")
        return names
