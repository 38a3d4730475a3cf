"""Finds the images in Arrow and Parquet files, such as datasets of Hugging Face.

    source = arrow("cats/train")                     # a folder of `dataset.save_to_disk`
    source = arrow("cats/data/train-*.parquet")      # as the Hub keeps datasets

The images stay where they are: an encoded image is a range of bytes in an Arrow file. Needs pyarrow
(the extra `parquet`), and no library of Hugging Face.
"""

import functools
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import BinaryIO

import numpy as np

from tfaccel.common.checks import check_choice
from tfaccel.common.errors import UserError
from tfaccel.data.source import TASKS, ImageSource
from tfaccel.data.sources import several_labels
from tfaccel.data.sources.arrow_files import (
    KIND,
    Tables,
    batches,
    chosen,
    find_tables,
    holds_images,
    ranges,
)
from tfaccel.data.sources.index import Keeper, Pattern, examples
from tfaccel.data.sources.labels import named, numbered

# Columns that hold labels, if the files do not say it and no other column does.
LABELS = ("label", "labels", "class", "target")


def arrow(
    pattern: Pattern,
    *,
    image_column: str | None = None,
    label_column: str | None = None,
    target_column: str | None = None,
    index_dir: str | os.PathLike | None = None,
    class_names: Sequence[str] | None = None,
    task: str = "classes",
) -> ImageSource:
    """Finds the images in Arrow or Parquet files, in the order of the files' names and the rows.

    The source has ranges of bytes, and labels [num_examples] int32. Names of classes are those that
    Hugging Face's library notes in the files (`ClassLabel`). Else they are "0", "1", ... up to the
    largest label, or the names in the column, sorted as text. With `target_column` the source has
    pairs, and its `labels` is None. The images may have any size and 1 or 3 channels.

    Args:
      pattern: a folder that `dataset.save_to_disk` wrote, of one split; or files: a path, a pattern
        with * ? or [], or a sequence of these. Parquet files are unpacked once into the user's
        cache folder (XDG_CACHE_HOME, or ~/.cache), which takes as many bytes again.
      image_column: the column with the encoded images: binary values, or Hugging Face's `Image`.
        None for the only one.
      label_column: the column with the labels: whole numbers, names, or, according to `task`, lists
        of numbers or names. None for the only `ClassLabel`, else for "label", "labels", "class" or
        "target".
      target_column: for pairs: the column with the encoded target images.
      index_dir: the folder of the files' indexes; None for the folders of the files.
      class_names: all classes in order, for a test set that lacks some: `train.class_names`.
      task: "classes", or "multilabel" or "regression", whose labels are [num_examples, classes or
        numbers] float32: see `tfaccel.sources.tfrecord`.

    Raises:
      UserError: pyarrow is not installed; a file is missing, damaged or of another kind; there is
        no such column; or a row has no image or no label.
    """
    check_choice("task", task, TASKS)
    tables = find_tables(pattern)
    columns = _columns(tables, image_column, label_column, target_column)
    several = task != "classes" and target_column is None
    shown = dict(zip(tables.files, tables.names, strict=True))
    found = examples(
        tables.files,
        key=f"arrow {columns}" + (" lists" if several else ""),
        index_dir=index_dir,
        rows=functools.partial(_rows, columns=columns, lists=several, names=shown),
    )
    if found.labels is None:
        return ImageSource(found.images, None, targets=found.targets)
    name = columns["label"]
    known = tables.features.get(name, {})
    names = (known.get("feature") or known).get("names")  # of a list's values, or of one value
    class_names = tuple(names) if class_names is None and names else class_names
    if several:
        return several_labels.source_of(found, task=task, name=name, class_names=class_names)

    def name_of(index: int) -> str:
        file = found.images.files[found.images.file_of[index]]
        return found.images.name(index).replace(file, shown.get(file, file), 1)

    if found.labels.dtype.kind == "S":
        texts = np.char.decode(found.labels, "utf-8").tolist()
        labels, class_names = named(texts, name_of=name_of, class_names=class_names)
    else:
        labels, class_names = numbered(found.labels, name_of=name_of, class_names=class_names)
    return ImageSource(found.images, labels, class_names)


def _columns(
    tables: Tables, image: str | None, label: str | None, target: str | None
) -> dict[str, str]:
    """Returns the names of the columns: "image", and "label" or "target"."""
    of_images = [name for name, each in tables.types.items() if holds_images(each)]
    fits = [each for each in of_images if each != target]
    columns = {
        "image": chosen(tables, image, fits, argument="image_column", kind="encoded images"),
    }
    if target is not None:
        given = {"argument": "target_column", "kind": "encoded images"}
        columns["target"] = chosen(tables, target, [], **given)
    else:
        known = tables.features.items()
        fits = [name for name, each in known if each.get(KIND) == "ClassLabel"]
        fits = [each for each in fits if each in tables.types]
        fits = fits or [each for each in LABELS if each in tables.types][:1]
        columns["label"] = chosen(tables, label, fits, argument="label_column", kind="labels")
    for part in ("image", "target"):
        if part in columns and columns[part] not in of_images:
            type_ = tables.types[columns[part]]
            raise UserError(
                f"{part}_column='{columns[part]}' of {tables.names[0]} has values of type {type_}; "
                "expected encoded images: binary, or Hugging Face's Image"
            )
    return columns


def _rows(
    file: BinaryIO,
    keeper: Keeper,
    columns: dict[str, str],
    *,
    lists: bool,
    names: Mapping[str, str],
) -> Iterator[dict]:
    """Yields the place of each row's image, and its label or the place of its target."""
    size, number = os.fstat(file.fileno()).st_size, 0
    shown = names.get(file.name, file.name)
    for batch, base in batches(file.name):
        cells = {}
        for part in columns.keys() & {"image", "target"}:
            what = f"column '{columns[part]}' of {shown}"
            found = ranges(batch.column(columns[part]), base, size, what=what)
            cells[f"{part}_offset"], cells[f"{part}_size"] = (each.tolist() for each in found)
        if "label" in columns:
            values = batch.column(columns["label"]).to_pylist()
            cells["label"] = [
                _label(value, lists, f"{shown}, row {number + index}, '{columns['label']}'")
                for index, value in enumerate(values)
            ]
        for row in zip(*cells.values(), strict=True):
            yield dict(zip(cells, row, strict=True))
        number += batch.num_rows
    if not number:
        raise UserError(f"{shown} has no rows; write it again, or leave it out")


def _label(value: object, lists: bool, where: str) -> int | bytes:
    """Returns a number or a name of a class; or the values of a label as a list of JSON."""
    if lists:
        values = value if isinstance(value, list) else [value]
        if all(type(each) in (str, int, float) for each in values):
            return json.dumps(values).encode()
        raise UserError(f"{where}: the label is {value!r}; expected numbers, or names of classes")
    if type(value) is int and value >= 0:
        return value
    if isinstance(value, str):
        return value.encode()
    hidden = "; -1 stands for a label that is kept secret in a test set" if value == -1 else ""
    raise UserError(
        f"{where}: the label is {value!r}; expected the number or the name of a class{hidden}"
    )
