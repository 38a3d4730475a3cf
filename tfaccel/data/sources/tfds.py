"""Finds the images of a dataset that TensorFlow Datasets has written, without that library.

    flowers/3.0.1/dataset_info.json, features.json, flowers-train.tfrecord-00000-of-00002, ...

    source = tfds("flowers/3.0.1", "train")

The files are TFRecords or ArrayRecords. What the features are called and which classes there are is
read from the files beside them.
"""

import json
import os
import pathlib
from typing import Any

from tfaccel.common.errors import UserError, did_you_mean
from tfaccel.common.regular_file import read_regular
from tfaccel.common.tables import counted
from tfaccel.data.source import ImageSource
from tfaccel.data.sources.array_record import array_record
from tfaccel.data.sources.paths import absolute, nearest
from tfaccel.data.sources.tfrecord import tfrecord

INFO, FEATURES = "dataset_info.json", "features.json"
FORMATS = {"tfrecord": tfrecord, "array_record": array_record}


def tfds(
    folder: str | os.PathLike,
    split: str,
    *,
    image_column: str | None = None,
    label_column: str | None = None,
    class_names: tuple[str, ...] | None = None,
    index_dir: str | os.PathLike | None = None,
) -> ImageSource:
    """Finds the images of one split of a dataset, in the order of the files and the records.

    The source has labels [num_examples] int32, and the names of `ClassLabel` as class names, in
    their order. The images are encoded as they were written, and may have any size and 1 or 3
    channels.

    Args:
      folder: the folder of a version, such as "~/tensorflow_datasets/mnist/3.0.1".
      split: the name of a split, such as "train". There are no parts of splits, as "train[:10%]":
        use `sources.split`.
      image_column: the feature with the images; None for the only one.
      label_column: the feature with the labels; None for the only one.
      class_names: all classes in order; None for those of the dataset.
      index_dir: the folder of the files' indexes; None for the dataset's folder.

    Raises:
      UserError: the folder is no such dataset, or lacks a file; there is no such split or feature;
        or the files are in another format.
    """
    found = find_tfds(absolute(folder), split)
    features = _json(absolute(folder) / FEATURES)["featuresDict"]["features"]
    images = {name for name, each in features.items() if "image" in each}
    labels = {name for name, each in features.items() if "classLabel" in each}
    where = f"{folder} has the features {', '.join(features)}"
    image = _chosen(image_column, images, features, where, argument="image_column")
    label = _chosen(label_column, labels, features, where, argument="label_column")
    if class_names is None:
        class_names = _class_names(absolute(folder), label, features[label])
    source = FORMATS[found["format"]](
        found["files"],
        image_key=image,
        label_key=label,
        class_names=class_names,
        index_dir=index_dir,
    )
    if len(source) != found["length"]:
        raise UserError(
            f"the split {split} of {folder} has {counted(len(source), 'image')}, but {INFO} says "
            f"{found['length']:,}; copy or write the dataset again"
        )
    return source


def find_tfds(folder: pathlib.Path, split: str) -> dict[str, Any]:
    """Returns the "files" of a split, their "format", and the "length", the number of examples.

    Raises:
      UserError: as for `tfds`.
    """
    if not folder.is_dir():
        hint = nearest(folder, kind="folder", wanted="a version of a dataset")
        raise UserError(f"{folder} does not exist{hint}")
    if not (folder / INFO).exists():
        raise UserError(
            f"{folder} has no {INFO}; expected the folder of one version of a dataset of TFDS, "
            "such as ~/tensorflow_datasets/mnist/3.0.1"
        )
    info = _json(folder / INFO)
    try:
        splits = {each["name"]: list(map(int, each["shardLengths"])) for each in info["splits"]}
        name, kind = info["name"], info.get("fileFormat", "tfrecord")
    except (KeyError, TypeError, ValueError) as error:
        raise UserError(f"{folder / INFO} lacks {error}; write the dataset again") from None
    if split not in splits:
        raise UserError(f"{folder} has no split '{split}'{did_you_mean(split, splits)}")
    if kind not in FORMATS:
        raise UserError(
            f"{folder} has files of the format {kind}; expected {' or '.join(FORMATS)}: write the "
            "dataset again with file_format='array_record'"
        )
    count = len(splits[split])
    begin = folder / f"{name}-{split}.{kind}"
    files = [f"{begin}-{number:05d}-of-{count:05d}" for number in range(count)]
    missing = [each for each in files if not os.path.isfile(each)]
    if missing:
        raise UserError(
            f"{missing[0]} does not exist, one of {len(missing)} missing files; copy or write the "
            "dataset again"
        )
    return {"files": files, "format": kind, "length": sum(splits[split])}


def _chosen(asked, fits, features, where: str, *, argument: str) -> str:
    if asked is not None:
        if asked not in features:
            raise UserError(f"{argument}={asked!r}, but {where}; give one of them")
        return asked
    if len(fits) != 1:
        found = f"several could be it ({', '.join(sorted(fits))})" if fits else "none fits"
        raise UserError(f"{where}, of which {found}; give {argument}")
    return next(iter(fits))


def _class_names(folder: pathlib.Path, label: str, feature: dict) -> tuple[str, ...] | None:
    """Returns the names of the classes; None if the dataset does not name them."""
    names = folder / f"{label}.labels.txt"
    if names.exists():
        return tuple(read_regular(names).decode().splitlines())
    if "classLabel" in feature:
        return tuple(map(str, range(int(feature["classLabel"]["numClasses"]))))
    return None


def _json(file: pathlib.Path) -> dict:
    try:
        return json.loads(read_regular(file))
    except (OSError, ValueError) as error:
        raise UserError(f"{file} cannot be read ({error}); write the dataset again") from None
