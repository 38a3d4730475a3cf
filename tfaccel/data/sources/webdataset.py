"""Finds the images in WebDataset tar shards.

    000000.jpg 000000.cls 000001.jpg 000001.cls ...

Beside each shard `x.tar` is its index, `x.idx`, in the form of DALI's `wds2idx`. A missing or wrong
index is written again.

    source = webdataset("imagenet/train-*.tar")
"""

import functools
import json
import os
from collections.abc import Iterator, Sequence
from typing import BinaryIO

from tfaccel.common.checks import check_choice
from tfaccel.common.errors import UserError
from tfaccel.data.source import TASKS, ImageSource
from tfaccel.data.sources import several_labels
from tfaccel.data.sources.index import Keeper, Pattern, examples, list_shards
from tfaccel.data.sources.labels import WHOLE_NUMBER, numbered
from tfaccel.data.sources.tar import Sample, index
from tfaccel.data.stores.files import DEFAULT_CACHE_GIB

LONGEST_LABEL = 2**20  # bytes in a file of a label; longer files are no labels


def webdataset(
    pattern: Pattern,
    *,
    image_ext: str = "jpg;jpeg;png;webp",
    label_ext: str = "cls",
    target_ext: str | None = None,
    index_dir: str | os.PathLike | None = None,
    class_names: Sequence[str] | None = None,
    task: str = "classes",
    cache_gib: float = DEFAULT_CACHE_GIB,
) -> ImageSource:
    """Finds the images in tar shards, in the order of the shards' names and the files.

    The files of a sample are adjacent and have the same name up to the first dot. The extension is
    the rest of the name. Names that start with a dot or have no dot are skipped.

    The source has ranges of bytes, and labels [num_examples] int32, with the class names "0", "1",
    ... up to the largest. With `target_ext` it has pairs, and its `labels` is None. The images may
    have any size and 1 or 3 channels.

    Args:
      pattern: the shards: a path, a pattern with * ? or [], or a sequence of these; or URLs of a
        store, such as "s3://bucket/train-*.tar". Shards must not be compressed.
      image_ext: extensions of the image, in any case, separated by semicolons. The first file of a
        sample with one of them is used.
      label_ext: extensions of the label: a file of digits, or "json" for a file with {"label": n}.
        It is not read for pairs.
      target_ext: for pairs: extensions of the target image.
      index_dir: the folder of the shards' indexes; None for the folders of the shards.
      class_names: all classes in order, which labels are indices into, for a test set that lacks
        some: `train.class_names`. The default is "0", "1", ... up to the largest label.
      task: "classes", or "multilabel" or "regression", whose labels are [num_examples, classes or
        numbers] float32. A file of a label then has any number of values with blanks or line ends
        between them, or {"label": [...]}: for "multilabel" the numbers or names of an image's
        classes, for "regression" numbers. A JSON file may also have 0.0 or 1.0 for each class.
      cache_gib: for URLs: the most that fetched files of all stores may take on this host, in GiB.

    Raises:
      UserError: a shard is missing, cut short, compressed or not a tar file; or a sample lacks a
        file, occurs twice, or has a label that is not a number or not among `class_names`.
    """
    extensions = {"image": image_ext} | (
        {"target": target_ext} if target_ext is not None else {"label": label_ext}
    )
    check_choice("task", task, TASKS)
    task = "classes" if target_ext is not None else task
    found = examples(
        list_shards(pattern, cache_gib=cache_gib),
        key=f"webdataset {extensions}" + ("" if task == "classes" else f" {task}"),
        index_dir=index_dir,
        rows=functools.partial(_rows, extensions=extensions, task=task),
    )
    if found.labels is None:
        return ImageSource(found.images, labels=None, targets=found.targets)
    if task != "classes":
        return several_labels.source_of(found, task=task, name="label", class_names=class_names)
    labels, class_names = numbered(found.labels, name_of=found.images.name, class_names=class_names)
    return ImageSource(found.images, labels, class_names)


def _rows(file: BinaryIO, keeper: Keeper, extensions: dict[str, str], task: str) -> Iterator[dict]:
    """Yields the place of each sample's image, and its label or the place of its target."""
    seen = {}
    for number, sample in enumerate(index(file, keeper)):
        name = _name(sample)
        before = seen.setdefault(name, number)
        if before != number:
            raise UserError(
                f"shard {file.name}: samples {before} and {number}, counted from 0, are both "
                f"'{name}'; expected each name once, with its files one after another: pack the "
                "shard again (tar -r appends files that are there already)"
            )
        extensions_there = [each[0].lower() for each in sample]
        if len(set(extensions_there)) < len(extensions_there):
            twice = next(each for each in extensions_there if extensions_there.count(each) > 1)
            raise UserError(
                f"shard {file.name}: sample '{name}' has two files '{twice}'; expected one of each "
                "extension: pack the shard again"
            )
        yield _row(file, sample, extensions, task)


def _name(sample: Sample) -> str:
    return sample[0][3].removesuffix("." + sample[0][0])


def _row(file: BinaryIO, sample: Sample, extensions: dict[str, str], task: str) -> dict:
    row = {}
    for column, wanted in extensions.items():
        wanted = wanted.lower().split(";")
        there = [each for each in sample if each[0].lower() in wanted]
        if not there:
            raise UserError(
                f"shard {file.name}: sample '{_name(sample)}' has no file {' or '.join(wanted)}, "
                f"only {', '.join(each[0] for each in sample)}; expected a file with an extension "
                f"of {column}_ext beside the other files of the sample"
            )
        extension, offset, size, name = there[0]
        if column == "label":
            read = _label if task == "classes" else functools.partial(_list, task=task)
            row[column] = read(file, name, extension, offset, size)
        else:
            row[f"{column}_offset"], row[f"{column}_size"] = offset, size
    return row


def _list(file: BinaryIO, name: str, extension: str, offset: int, size: int, *, task: str) -> bytes:
    """Returns the values of a label as a list of JSON."""
    data = os.pread(file.fileno(), min(size, LONGEST_LABEL + 1), offset)
    is_json = extension.lower() == "json"
    try:
        if len(data) > LONGEST_LABEL:
            raise ValueError("too long for a label")
        values = json.loads(data)["label"] if is_json else data.decode().split()
        values = values if isinstance(values, list) else [values]
        if not is_json and (task == "regression" or all(map(WHOLE_NUMBER.fullmatch, values))):
            values = [float(each) if task == "regression" else int(each) for each in values]
        if not all(type(each) in (str, int, float) for each in values):
            raise ValueError("of another type")
        return json.dumps(values).encode()
    except (ValueError, KeyError, TypeError, RecursionError):
        expected = '{"label": [...]}' if is_json else "with blanks between them"
        what = "numbers" if task == "regression" else "names or numbers of classes"
        raise UserError(
            f"shard {file.name}: '{name}' holds {data[:40]!r}; expected {what}, {expected}"
        ) from None


def _label(file: BinaryIO, name: str, extension: str, offset: int, size: int) -> int:
    data = os.pread(file.fileno(), min(size, LONGEST_LABEL + 1), offset)
    is_json = extension.lower() == "json"
    try:
        if len(data) > LONGEST_LABEL:
            raise ValueError("too long for a label")
        label = json.loads(data)["label"] if is_json else data.decode("ascii")
        label = label if type(label) is int else int(str(label))
        if abs(label) >= 2**63:
            raise ValueError("too large for a class")
        return label
    except (ValueError, KeyError, TypeError, RecursionError):
        expected = '{"label": n}' if is_json else "only digits"

        raise UserError(
            f"shard {file.name}: '{name}' holds {data[:40]!r}; expected the number of a class, "
            f"{expected}"
        ) from None
