"""Reads images from any object with a length and items, such as a data source of Grain or TFDS.

    source = random_access(grain_source, image="image", label="label")

The object gives encoded images, which the loaders decode and vary. (For arrays that are ready for
the model there is `run.examples`.)
"""

import operator
import uuid
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from tfaccel.common.errors import UserError
from tfaccel.common.run_log import summary
from tfaccel.data.file_names import FileNames
from tfaccel.data.source import Blobs, ImageSource, Unit
from tfaccel.data.sources.labels import named, numbered
from tfaccel.data.threads import mapped

BLOCK = 64  # items that a thread reads together
NUM_THREADS = 8


def random_access(
    items: Any,
    *,
    image: str | int = "image",
    label: str | int = "label",
    labels: Sequence[int] | Sequence[str] | None = None,
    class_names: Sequence[str] | None = None,
) -> ImageSource:
    """Returns the source of an object's items, in their order.

    The source has labels [num_examples] int32. The images may have any size and 1 or 3 channels.
    The object is asked in several threads, once for each image of each epoch.

    Args:
      items: an object with `len(items)` and `items[index]`, from 0. An item is a mapping or a tuple
        of an encoded image, as bytes, and its label, a whole number or a name. TFDS gives encoded
        images with `decoders={"image": tfds.decode.SkipDecoding()}`.
      image, label: the keys of the image and the label in a mapping. In a tuple they are 0 and 1.
      labels: the labels of all items, if they are known. None reads all items once to find them.
      class_names: all classes in order; None for those that occur.

    Raises:
      UserError: the object has no items, or an item is of another form.
    """
    if not (hasattr(items, "__len__") and hasattr(items, "__getitem__")):
        raise UserError(
            f"{type(items).__name__} has no length and items; expected an object with __len__ and "
            "__getitem__, such as grain.python.ArrayRecordDataSource with a map of its records"
        )
    if len(items) == 0:
        raise UserError(f"{type(items).__name__} has no items; expected at least one")
    reader = Items(items, image, label)
    reader.read(0, 0, 0)  # a wrong key, or an array, is said at once
    if labels is None:
        summary("data: reading the %d items of %s for their labels", len(items), reader.title)
        labels = reader.labels()
    if len(labels) != len(items):
        raise UserError(f"{len(labels)} labels for {len(items)} items; give one for each")
    every = np.arange(len(items), dtype=np.int64)
    zeros = np.zeros_like(every)
    blobs = Blobs(reader.names, zeros.astype(np.int32), every, zeros, reader=reader)
    settings = {"name_of": blobs.name, "class_names": class_names}
    if isinstance(labels[0], str | bytes):
        texts = [each.decode() if isinstance(each, bytes) else each for each in labels]
        return ImageSource(blobs, *named(texts, **settings))
    return ImageSource(blobs, *numbered(np.asarray(labels, np.int64), **settings))


class Items:
    """Reads the images of an object's items. It is a `source.Reader`.

    Attributes:
      title: what the object is called in messages.
    """

    fit, unit_name = False, "item"

    def __init__(self, items: Any, image: str | int, label: str | int):
        """Takes the object, and the keys of the image and the label."""
        self.title = type(items).__name__
        self.names = FileNames.of([f"/{self.title}"])
        self._items, self._image, self._label = items, image, label
        # Nobody knows whether another object has the same images, so no result is kept for it.
        self._state = uuid.uuid4().bytes

    def read(self, number: int, offset: int, size: int) -> bytes:
        """Returns the encoded image of an item.

        Raises:
          UserError: the item has no encoded image.
        """
        found = self._part(self._items[offset], self._image, 0, offset)
        if isinstance(found, np.ndarray) and found.dtype.kind in "SO" and found.ndim == 0:
            found = found.item()
        if isinstance(found, bytes | bytearray | memoryview):
            return bytes(found)
        raise UserError(
            f"the image of item {offset} of {self.title} is of type {type(found).__name__}; "
            "expected the bytes of an encoded image. For arrays that are ready for the model use "
            "run.examples; TFDS gives bytes with "
            "decoders={'image': tfds.decode.SkipDecoding()}"
        )

    def labels(self) -> list[int] | list[str]:
        """Returns the labels of all items, which are read for it.

        Raises:
          UserError: a label is no whole number and no name, or some are numbers and others names.
        """
        starts = range(0, len(self._items), BLOCK)
        blocks = mapped(self._labels_from, starts, num_threads=NUM_THREADS)
        found = [label for block in blocks for label in block]
        if len({type(each) for each in found}) > 1:
            raise UserError(f"some labels of {self.title} are numbers and others names")
        return found

    def _labels_from(self, start: int) -> list[int | str]:
        stop = min(start + BLOCK, len(self._items))
        return [self._label_of(index) for index in range(start, stop)]

    def _label_of(self, index: int) -> int | str:
        found = self._part(self._items[index], self._label, 1, index)
        if isinstance(found, str | bytes):
            return found.decode() if isinstance(found, bytes) else found
        try:
            return operator.index(found.item() if isinstance(found, np.ndarray) else found)
        except (TypeError, ValueError):
            raise UserError(
                f"the label of item {index} of {self.title} is {found!r:.100}; expected a whole "
                "number or a name"
            ) from None

    def _part(self, item: Any, key: str | int, place: int, index: int) -> Any:
        if isinstance(item, Mapping):
            if key not in item:
                raise UserError(
                    f"item {index} of {self.title} has no {key!r}, only "
                    f"{', '.join(map(str, item))}; give the keys as image= and label="
                )
            return item[key]
        if isinstance(item, tuple | list) and len(item) == 2:
            return item[place]
        raise UserError(
            f"item {index} of {self.title} is of type {type(item).__name__}; expected a mapping or "
            "a tuple of an encoded image and a label"
        )

    def ahead(self, units: Iterable[Unit]) -> None:
        """Does nothing."""

    def states(self) -> np.ndarray:
        """Returns [1, 2] int64: the number of items."""
        return np.array([[len(self._items), 0]], np.int64)

    def state(self, number: int) -> bytes:
        """Returns what no other object has."""
        return self._state

    def learn(self) -> None:
        """Does nothing."""
