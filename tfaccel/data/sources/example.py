"""Finds the features of a serialized `tf.train.Example` without TensorFlow.

The functions read through `data(start, end)`, which returns a range of a file's bytes. They return
the range of each feature and of its value. So images are found without reading them.

    Example {Features features = 1}        Features {map<string, Feature> feature = 1}
    Feature {BytesList = 1 | FloatList = 2 | Int64List = 3}, each a list {repeated value = 1}

    found = features(data, 12, 5012)    # {b"image/encoded": (20, 4900), ...}
    value(data, *found[b"image/class/label"])
"""

from collections.abc import Callable, Iterator

import numpy as np

Data = Callable[[int, int], bytes]


class FeatureError(Exception):
    """A feature is missing, or has an unexpected value."""


def features(data: Data, start: int, end: int) -> dict[bytes, tuple[int, int]]:
    """Returns the range (start, end) of each feature of an Example, by key, for `value`.

    Raises:
      ValueError: the bytes are not a message.
    """
    found = {}
    for features_range in _only(1, data, start, end):
        for entry in _only(1, data, *features_range):
            # An entry of a map is a message: {key = 1, value = 2}.
            for key_range in _only(1, data, *entry):
                found[data(*key_range)] = entry
                break  # the value is read only for the features that are used
    return found


def value(data: Data, start: int, end: int) -> int | tuple[int, int]:
    """Returns a feature's only value: a number, or the range (start, end) of its bytes.

    Raises:
      FeatureError: the value is a float, or there are several values or none.
      ValueError: the bytes are not a message.
    """
    values = []
    for feature in _only(2, data, start, end):
        for kind, *list_range in _fields(data, *feature):
            if kind == 2:
                raise FeatureError(
                    "is float; expected bytes, or whole numbers for labels. For a regression, use "
                    "task='regression'"
                )
            for value_range in _only(1, data, *list_range):
                values += [value_range] if kind == 1 else _int64s(data, *value_range)
    if len(values) != 1:
        raise FeatureError(
            f"has {len(values)} values; expected one. For several classes an image, use "
            "task='multilabel'"
        )
    return values[0]


def values(data: Data, start: int, end: int) -> list[int] | list[float] | list[tuple[int, int]]:
    """Returns a feature's values, of which there may be none: see `value`. Floats are float32.

    Raises:
      FeatureError: the feature has lists of several kinds.
      ValueError: the bytes are not a message.
    """
    found, kinds = [], set()
    for feature in _only(2, data, start, end):
        for kind, *list_range in _fields(data, *feature):
            kinds.add(kind)
            for value_range in _only(1, data, *list_range):
                if kind == 1:
                    found.append(value_range)
                elif kind == 2:
                    found += np.frombuffer(data(*value_range), "<f4").tolist()
                else:
                    found += _int64s(data, *value_range)
    if len(kinds) > 1:
        raise FeatureError("has values of several kinds; expected one list")
    return found


def _only(wanted, data, start, end) -> Iterator[tuple[int, int]]:
    return ((start, end) for number, start, end in _fields(data, start, end) if number == wanted)


def _fields(data, position, end) -> Iterator[tuple[int, int, int]]:
    """Yields (number, start, end) for each field of a message, with the range of its value."""
    while position < end:
        tag, position = _varint(data, position)
        wire_type = tag & 7
        if wire_type == 2:
            size, position = _varint(data, position)
        elif wire_type == 0:
            size = _varint(data, position)[1] - position
        elif wire_type in (1, 5):
            size = 8 if wire_type == 1 else 4
        else:
            raise ValueError("a field has an unknown type")
        if position + size > end:
            raise ValueError("a field ends outside its message")
        yield tag >> 3, position, position + size
        position += size


def _varint(data, position) -> tuple[int, int]:
    """Returns an integer and its end. Each byte has seven bits, the lowest bits first."""
    value = 0
    for index, byte in enumerate(data(position, position + 10)):
        value |= (byte & 0x7F) << 7 * index
        if byte < 0x80:
            return value, position + index + 1
    raise ValueError("an integer has no end")


def _int64s(data, position, end) -> list[int]:
    values = []
    while position < end:
        value, position = _varint(data, position)
        values.append(value - 2**64 if value >= 2**63 else value)
    return values
