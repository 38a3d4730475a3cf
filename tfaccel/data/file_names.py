"""The absolute paths of many files, in one piece of memory.

Takes paths, as text or as the bytes that they have in common and the rest of each; gives a sequence
of text. Of a million files it takes some 40 bytes each; as a tuple of text they were 150.

    names = FileNames.of(["/data/a/1.png", "/data/a/2.png"])
    names[0], names[:2], len(names)
    names.encoded(0), names.rows(ids)    # as the system has them, in bytes
"""

import itertools
import os
from collections.abc import Iterable, Iterator, Sequence

import numpy as np

AT_A_TIME = 65536  # paths that are text at once
TAIL = 8  # bytes of a path's end that are looked at together


class FileNames(Sequence):
    """Paths, read-only. Equal to any sequence of the same text; a slice is a tuple of text.

    Attributes:
      folder: the folder that all files lie in.
    """

    def __init__(self, begin: str, rests: bytes | bytearray, folder: str):
        """Takes what `of` and `in_folders` make.

        Args:
          begin: what all paths begin with.
          rests: what follows in each, and a zero byte.
          folder: the folder that all files lie in.
        """
        self.folder = folder
        self._begin, self._bytes = os.fsencode(begin), np.frombuffer(rests, np.uint8)
        self._ends = np.flatnonzero(self._bytes == 0)  # no path holds a zero byte

    @classmethod
    def of(cls, files: Iterable[str]) -> "FileNames":
        """Returns these paths, taken one after another.

        Raises:
          ValueError: one holds a zero byte, which no path may have.
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
        """Returns the files of folders below a root: quicker than `of`.

        Args:
          root: absolute, as `os.path.abspath` gives it.
          folders: their names.
          files: of each folder, the names of its files, at least one. Taken one after another.
        """
        if len(folders) == 1:
            root, folders = os.path.join(root, folders[0]), [""]
        rests = bytearray()
        for folder, names in zip(folders, files, strict=True):
            own = f"/{folder}/" if folder else "/"
            rests += os.fsencode(own + f"\0{own}".join(names)) + b"\0"
        return cls(root.rstrip("/"), rests, root)

    def __len__(self) -> int:
        """Returns how many."""
        return len(self._ends)

    def __getitem__(self, index):
        """Returns a path; a tuple of them for a slice."""
        if isinstance(index, slice):
            start, stop, step = index.indices(len(self))
            if step == 1:
                return tuple(map(os.fsdecode, self.encoded_part(start, stop)))
            return tuple(self[each] for each in range(start, stop, step))
        return os.fsdecode(self.encoded(index))

    def __iter__(self) -> Iterator[str]:
        """Yields the paths: quicker than one by one."""
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
        """Returns how many there are, and in which folder."""
        return f"<{len(self)} files in {self.folder}>"

    def encoded(self, index: int) -> bytes:
        """Returns a path's bytes."""
        start, end = self._range(index)
        return self._begin + self._bytes[start:end].tobytes()

    def encoded_part(self, start: int, stop: int) -> list[bytes]:
        """Returns the bytes of the paths from `start` on, before `stop`."""
        if start >= stop:
            return []
        first, last = self._range(start)[0], self._range(stop - 1)[1]
        return [self._begin + each for each in self._bytes[first:last].tobytes().split(b"\0")]

    def rows(self, ids: np.ndarray) -> np.ndarray:
        """Returns the bytes of some paths, [num_ids, longest] uint8: zero bytes follow each."""
        encoded = np.array([self.encoded(index) for index in ids.tolist()])
        return encoded.view(np.uint8).reshape(len(ids), encoded.dtype.itemsize)

    def suffixes(self) -> set[str]:
        """Returns what the files' names end with, in lowercase: {".png"}."""
        found = set()
        for start in range(0, len(self), AT_A_TIME):
            ends = self._ends[start : start + AT_A_TIME]
            is_long = ends >= TAIL  # from the beginning of all bytes
            tails = self._bytes[ends[is_long, None] + np.arange(-TAIL, 0)].view(np.uint64)
            found |= {each.tobytes().rpartition(b"\0")[2] for each in np.unique(tails)}
            found |= {self.encoded(start + each) for each in np.flatnonzero(~is_long)}
        # Where the last bytes hold no dot, it may come before.
        if any(b"." not in each for each in found):
            found = map(self.encoded, range(len(self)))
        return {os.fsdecode(os.path.splitext(each)[1]).lower() for each in found}

    def taken(self, ids: np.ndarray) -> "FileNames":
        """Returns the paths at these indices alone."""
        return FileNames.of([self[index] for index in ids.tolist()])

    def below_folder(self) -> Iterable[bytes]:
        """Yields the bytes of all paths from the folder's own on, each and a zero byte."""
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
            raise IndexError(f"there are {len(self)} files, and none at {index}")
        start = int(self._ends[number - 1]) + 1 if number else 0
        return start, int(self._ends[number])


class GrowingFileNames:
    """Paths that are found part by part, of which only the bytes are kept.

    growing = GrowingFileNames()
    growing.add(["/data/a/1.png", "/data/a/2.png"])
    growing.add(["/data/b/1.png"])
    growing.done()    # <3 files in /data>
    """

    def __init__(self):
        """Starts with none."""
        self._ends = ()  # the first and the last in the order of text
        self._begin, self._rests, self._count = "", bytearray(), 0

    def add(self, files: Sequence[str]) -> None:
        """Takes some more paths, at best some ten thousand at once."""
        if not files:
            return
        self._ends = min([min(files), *self._ends[:1]]), max([max(files), *self._ends[1:]])
        # What the first and the last in order share, all share.
        shared = os.path.commonprefix(self._ends)  # noqa: RUF071 - of letters
        size = len(shared[: len(self._folder())])
        if self._count and size < len(self._begin):  # what came before begins earlier, too
            more = os.fsencode(self._begin[size:])
            self._rests = bytearray(more + self._rests[:-1].replace(b"\0", b"\0" + more) + b"\0")
        self._begin = shared[:size]
        self._rests += os.fsencode("\0".join([file[size:] for file in files])) + b"\0"
        self._count += len(files)

    def _folder(self) -> str:
        return os.path.commonpath([os.path.dirname(each) for each in self._ends])

    def done(self) -> FileNames:
        """Returns all of them. None may be added afterwards.

        Raises:
          ValueError: one holds a zero byte, which no path may have.
        """
        names = FileNames(self._begin, self._rests, self._folder() if self._ends else "")
        if len(names) != self._count:
            raise ValueError("a path holds a zero byte")
        return names
