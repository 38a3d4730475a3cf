"""Finds the images in TFRecord shards of `tf.train.Example`, without TensorFlow.

Beside each shard is its index, `train-00000-of-01024.idx`, in the form of DALI's `tfrecord2idx`: a
line "offset length" for each record. A missing index is written.

    source = tfrecord("imagenet/train-*", first_label=1)
"""

import contextlib
import functools
import json
import logging
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, BinaryIO

import numpy as np

from tfaccel.common.checks import check_choice, check_int
from tfaccel.common.errors import UserError, did_you_mean, nearest
from tfaccel.data.source import TASKS, ImageSource
from tfaccel.data.sources import several_labels
from tfaccel.data.sources.example import FeatureError, features, value, values
from tfaccel.data.sources.index import Found, Keeper, Pattern, examples, list_shards
from tfaccel.data.sources.labels import named, numbered
from tfaccel.data.sources.records import Pieces, index, payload
from tfaccel.data.stores.files import DEFAULT_CACHE_GIB

LONGEST_NAME = 1000  # bytes in the name of a class; longer values are no names

log = logging.getLogger("tfaccel")


def tfrecord(
    pattern: Pattern,
    *,
    image_key: str = "image/encoded",
    label_key: str = "image/class/label",
    first_label: int = 0,
    index_dir: str | os.PathLike | None = None,
    target_key: str | None = None,
    class_names: Sequence[str] | None = None,
    task: str = "classes",
    cache_gib: float = DEFAULT_CACHE_GIB,
) -> ImageSource:
    """Finds the images in TFRecord shards, in the order of the shards' names and the records.

    The source has ranges of bytes, and labels [num_examples] int32. Labels are numbers minus
    `first_label`, with the class names "0", "1", ... up to the largest, or names, sorted as text.
    With `target_key` the source has pairs, and its `labels` is None. The images may have any size
    and 1 or 3 channels.

    Args:
      pattern: the shards: a path, a pattern with * ? or [], or a sequence of these; or URLs of a
        store, such as "s3://bucket/train-*". Each shard has
        uncompressed records of `tf.train.Example`. When an index is written, the checksums of the
        lengths are verified. The checksums of the data are not, because that would read all bytes
        and not only the headers (70 us for a record of 110 KB in memory, compared with 4 us; CPU,
        2026-11-22). `tfaccel audit` decodes each image.
      image_key: a feature with one value, an encoded image.
      label_key: a feature with one value, a whole number or a name. It is not read for pairs.
      first_label: the number of the first class. It is 1 for the ImageNet shards of the TensorFlow
        models' scripts.
      index_dir: the folder of the shards' indexes; None for the folders of the shards.
      target_key: for pairs: a feature with one value, an encoded image.
      class_names: all classes in order, for a test set that lacks some: `train.class_names`.
        Numbers minus `first_label` are indices into it. The default is the classes that occur.
      task: "classes", or "multilabel" or "regression", whose labels are [num_examples, classes or
        numbers] float32. The label is then a feature with any number of values: for "multilabel"
        the numbers or names of an image's classes, or a float of 0 or 1 for each class; for
        "regression" the numbers.
      cache_gib: for URLs: the most that fetched files of all stores may take on this host, in GiB.

    Raises:
      UserError: a shard is missing, cut short, compressed or not a TFRecord file; a record is not
        an Example or lacks a feature; or a label is below `first_label` or not among `class_names`.
    """
    check_int("first_label", first_label, at_least=0)
    check_choice("task", task, TASKS)
    several = task != "classes" and target_key is None
    keys = {"image": image_key} | (
        {"target": target_key} if target_key is not None else {"label": label_key}
    )
    found = examples(
        list_shards(pattern, cache_gib=cache_gib),
        key=f"tfrecord {keys}" + (" lists" if several else ""),
        index_dir=index_dir,
        rows=functools.partial(_rows, keys=keys, lists=several),
    )
    if found.labels is None:
        return ImageSource(found.images, labels=None, targets=found.targets)
    settings = {"first_label": first_label, "class_names": class_names, "label_key": label_key}
    return source_of(found, task=task, **settings)


def source_of(
    found: Found, *, task: str, first_label: int, class_names: Sequence[str] | None, label_key: str
) -> ImageSource:
    """Returns the source of examples that are found: see `tfrecord` for the arguments.

    Raises:
      UserError: a label is wrong.
    """
    if task != "classes":
        names = {"name": label_key.rpartition("/")[2], "class_names": class_names}
        return several_labels.source_of(found, task=task, first_label=first_label, **names)
    labels, class_names = _labels(
        found.labels, first_label, name_of=found.images.name, class_names=class_names
    )
    return ImageSource(found.images, labels, class_names)


def _labels(
    labels: np.ndarray, first_label: int, *, name_of, class_names
) -> tuple[np.ndarray, tuple[str, ...]]:
    if labels.dtype.kind == "S":
        names = np.char.decode(labels, "utf-8").tolist()
        return named(names, name_of=name_of, class_names=class_names)
    if labels.min() < first_label:
        raise UserError(
            f"{name_of(int(labels.argmin()))}: the label is {labels.min()}; expected at least "
            f"first_label={first_label}"
        )
    if labels.min() == 1 and first_label == 0:
        log.warning("data: the least label is 1; if classes count from 1, give first_label=1")
    return numbered(labels - first_label, name_of=name_of, class_names=class_names)


def _rows(
    file: BinaryIO, keeper: Keeper, keys: dict[str, str], *, lists: bool = False
) -> Iterator[dict]:
    """Yields the place of each record's image, and its label or the place of its target."""
    data, records = Pieces(file), enumerate(index(file, keeper).tolist())
    of = {"keys": keys, "lists": lists}
    rows = (row_of(file.name, n, data, *payload(*record), **of) for n, record in records)
    yield from alike(rows, file.name)


def alike(rows: Iterable[dict], shard: str) -> Iterator[dict]:
    """Yields rows whose labels are all numbers, or all names; else raises UserError."""
    kind = None
    for number, row in enumerate(rows):
        kind = kind or type(row.get("label"))
        if not isinstance(row.get("label"), kind):
            raise UserError(
                f"shard {shard}, record {number}: its label is a number but others are names, or "
                "the reverse"
            )
        yield row


def row_of(
    shard: str,
    number: int,
    data: Callable[[int, int], bytes],
    start: int,
    end: int,
    *,
    keys: dict[str, str],
    lists: bool,
) -> dict[str, Any]:
    """Returns the cells of one record: "image_offset" in the data, "image_size" and "label".

    Args:
      shard: the path of the record's file, for errors.
      number: the number of the record in it.
      data: returns a range of bytes.
      start, end: where the serialised Example begins and ends.
      keys: the keys of the features of "image" and "label", or "target".
      lists: whether the label is a list.

    Raises:
      UserError: the record is no Example, or lacks a feature.
    """
    try:
        return _row(data, features(data, start, end), keys, lists=lists)
    except FeatureError as error:
        raise UserError(f"shard {shard}, record {number}: {error}") from None
    except ValueError as error:
        raise UserError(
            f"shard {shard}, record {number} is not a tf.train.Example; expected an Example in "
            "each record"
        ) from error


def _row(data, found, keys, *, lists: bool) -> dict:
    row = {}
    for column, key in keys.items():
        if key.encode() not in found:
            there = [each.decode(errors="replace") for each in found]
            hint = did_you_mean(key, there).removesuffix("?")
            name = column if column in there else nearest(key, there) or "NAME"
            flag = f"--config.data.{column}_key={name}, in a script "
            flag = "" if column == "target" else flag  # no config has pairs of records
            raise FeatureError(
                f"there is no {column}_key='{key}'{hint} (set {flag}{column}_key='{name}')"
            )
        place = found[key.encode()]
        try:
            if lists and column == "label":
                row[column] = _list(data, values(data, *place))
            else:
                row |= _cells(data, column, value(data, *place))
        except FeatureError as error:
            raise FeatureError(f"{column}_key='{key}' {error}") from None
    return row


def _cells(data, column, found) -> dict:
    """Returns the cells of a row that one feature's value gives."""
    if column == "label":
        return {column: found if isinstance(found, int) else _name(data, *found)}
    if isinstance(found, int):
        raise FeatureError("is a number; expected an encoded image")
    return {f"{column}_offset": found[0], f"{column}_size": found[1] - found[0]}


def _list(data, found: list) -> bytes:
    """Returns the values of a label as a list of JSON."""
    values = [_name(data, *each).decode() if isinstance(each, tuple) else each for each in found]
    return json.dumps(values).encode()


def _name(data, start, end) -> bytes:
    """Returns the name of a class, in UTF-8."""
    if end - start <= LONGEST_NAME:
        with contextlib.suppress(UnicodeDecodeError):
            return data(start, end).decode().encode()
    raise FeatureError(f"has {end - start} bytes that are not the name of a class")
