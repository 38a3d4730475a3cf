"""Finds the images in ArrayRecord files of `tf.train.Example`, which Grain and TFDS write.

    source = array_record("flowers/train.array_record-*", image_key="image", label_key="label")

Any record of such a file can be read at once, through the library array_record (the extra
`arrayrecord`). The files are read once as a whole to find the labels. The results are kept as those
of TFRecords.
"""

import functools
import os
import threading
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, BinaryIO

import numpy as np

from tfaccel.common.checks import check_choice, check_int
from tfaccel.common.errors import UserError
from tfaccel.common.extras import how_to_add, is_installed
from tfaccel.data.file_names import FileNames
from tfaccel.data.source import TASKS, ImageSource, Unit
from tfaccel.data.sources.index import Keeper, Pattern, examples, list_shards
from tfaccel.data.sources.tfrecord import alike, row_of, source_of

AT_A_TIME = 64  # records that are read together while the labels are found
# Of the library: it does not read more than is asked for, which is quicker in a random order.
OPTIONS = {"options": "readahead_buffer_size:0", "file_reader_buffer_size": 32768}


def array_record(
    pattern: Pattern,
    *,
    image_key: str = "image/encoded",
    label_key: str = "image/class/label",
    first_label: int = 0,
    index_dir: str | os.PathLike | None = None,
    class_names: Sequence[str] | None = None,
    task: str = "classes",
) -> ImageSource:
    """Finds the images in ArrayRecord files, in the order of the files' names and the records.

    The labels are those of `tfaccel.sources.tfrecord`. The images may have any size and 1 or 3
    channels.

    Args:
      pattern: the files: a path, a pattern with * ? or [], or a sequence of these.
      image_key: a feature with one value, an encoded image. TFDS names it "image".
      label_key: a feature with the label. TFDS names it "label".
      first_label: the number of the first class.
      index_dir: the folder of the files' indexes; None for the folders of the files.
      class_names: all classes in order; None for those that occur.
      task: "classes", "multilabel" or "regression".

    Raises:
      UserError: array_record is not installed; a file is missing, or is no whole ArrayRecord file;
        a record is no Example or lacks a feature; or a label is wrong.
    """
    check_int("first_label", first_label, at_least=0)
    check_choice("task", task, TASKS)
    if not is_installed("array_record"):
        raise UserError(
            f"ArrayRecord files need array_record; add the extra: {how_to_add('arrayrecord')}"
        )
    keys, several = {"image": image_key, "label": label_key}, task != "classes"
    shards = list_shards(pattern)
    found = examples(
        shards,
        key=f"array_record {keys}" + (" lists" if several else ""),
        index_dir=index_dir,
        rows=functools.partial(_rows, keys=keys, lists=several),
    )
    counts = np.bincount(found.images.file_of, minlength=len(shards))
    reader = Records(shards, np.split(found.starts, np.cumsum(counts)[:-1]))
    settings = {"first_label": first_label, "class_names": class_names, "label_key": label_key}
    return source_of(found.read_by(reader), task=task, **settings)


def _rows(file: BinaryIO, keeper: Keeper, keys: dict[str, str], *, lists: bool) -> Iterator[dict]:
    """Returns the number and the size of each record's image, where it begins, and its label."""
    return alike(_each(file.name, keys, lists=lists), file.name)


def _each(file: str, keys: dict[str, str], *, lists: bool) -> Iterator[dict]:
    reader = _opened(file)
    for first in range(0, reader.num_records(), AT_A_TIME):
        last = min(first + AT_A_TIME, reader.num_records())
        for number, record in enumerate(reader.read(first, last), start=first):
            data = lambda start, end, record=record: record[start:end]  # noqa: E731
            row = row_of(file, number, data, 0, len(record), keys=keys, lists=lists)
            yield row | {"image_offset": number, "image_start": row["image_offset"]}


def _opened(file: str) -> Any:
    """Returns the library's reader of a file."""
    from array_record.python.array_record_module import ArrayRecordReader

    reader = ArrayRecordReader(file, **OPTIONS)
    if reader.num_records() == 0:  # the library does not say more
        raise UserError(
            f"shard {file} has no records, is cut short, or is no ArrayRecord file; write it again"
        )
    return reader


class Records:
    """Reads the images in ArrayRecord files. It is a `source.Reader`.

    A unit is the number of a file, the number of a record in it, and the size of the image.
    """

    fit, unit_name = False, "record"

    def __init__(self, files: Sequence[str], starts: Sequence[np.ndarray]):
        """Opens no file yet.

        Args:
          files: paths of the files.
          starts: where the image begins in each record of each file, in bytes: [num_records] int64.
        """
        self.names, self._starts = FileNames.of(files), starts
        self._readers, self._lock = {}, threading.Lock()

    def read(self, number: int, offset: int, size: int) -> bytes:
        """Returns the bytes of an image.

        Raises:
          OSError: the file has fewer records than before.
        """
        reader = self._readers.get(number)
        if reader is None:
            with self._lock:
                reader = self._readers.setdefault(number, _opened(self.names[number]))
        try:
            (record,) = reader.read([offset])
        except RuntimeError as error:
            raise OSError(f"{self.names[number]}, record {offset}: {error}") from error
        start = int(self._starts[number][offset])
        return record[start : start + size]

    def ahead(self, units: Iterable[Unit]) -> None:
        """Does nothing: the files are on this host."""

    def states(self) -> np.ndarray:
        """Returns [num_files, 2] int64, the size and the time of the last change of each file."""
        found = map(os.stat, self.names)
        return np.array([(each.st_size, each.st_mtime_ns) for each in found], np.int64)

    def state(self, number: int) -> bytes:
        """Returns the path, the size and the time of the last change of a file."""
        found = os.stat(self.names[number])
        return self.names.encoded(number) + f"\0{found.st_size}\0{found.st_mtime_ns}".encode()

    def learn(self) -> None:
        """Does nothing: the system answers quickly."""
