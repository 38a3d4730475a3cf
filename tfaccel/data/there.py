"""Checks in milliseconds whether the data that a config names exists. No file is listed or read.

A store is asked once, which takes as long as its answer.

The check raises the same errors as opening the data would. Needs no TensorFlow.

    check_there(config.data, "train")
"""

import pathlib

from tfaccel.common.errors import UserError
from tfaccel.config import DataConfig
from tfaccel.data.digits import ensure_digits
from tfaccel.data.sources import stored
from tfaccel.data.sources.arrays import find_arrays
from tfaccel.data.sources.arrow_files import find_arrow
from tfaccel.data.sources.folders import find_classes
from tfaccel.data.sources.index import find_shards
from tfaccel.data.sources.list_rows import find_list
from tfaccel.data.sources.pairs import find_images
from tfaccel.data.sources.paths import absolute
from tfaccel.data.sources.tfds import find_tfds
from tfaccel.data.stores.urls import below, check_spelled, is_url

_FIND = {
    "arrow": find_arrow,
    "arrays": find_arrays,
    "csv": find_list,
    "folders": find_classes,
    "pairs": find_images,
    "array_record": find_shards,
    "tfds": lambda place: find_tfds(place.parent, place.name),
    "tfrecord": find_shards,
    "webdataset": find_shards,
}


# The sources that may be in a store.
STORED = ("csv", "folders", "tfrecord", "webdataset")


def places(data: DataConfig, split: str) -> tuple[pathlib.Path | str, ...]:
    """Returns the path of the images of "train" or "test", and for pairs that of their targets.

    If root is a URL, so is the path, a str.

    If the test images are a part of the training images, both have the same path.
    """
    split = "train" if data.splits else split
    names = (split, f"{split}_targets") if data.source == "pairs" else (split,)
    check_spelled(data.root, "data.root")
    if is_url(data.root):
        if data.source not in STORED:
            raise UserError(
                f"data.root={data.root} with data.source={data.source!r}; a URL is for the sources "
                f"{', '.join(STORED)}: copy the files to this machine"
            )
        return tuple(below(data.root, getattr(data, each)) for each in names)
    root = pathlib.Path(data.root) if data.root else ensure_digits()
    return tuple(root / getattr(data, each) for each in names)


def check_there(data: DataConfig, split: str) -> None:
    """Checks that the folders or files of a split exist, but not what they contain.

    Args:
      data: where the images are.
      split: "train" or "test".

    Raises:
      UserError: a path does not exist, or is a file and not a folder, or the reverse.
    """
    for place in places(data, split):
        if is_url(place):
            stored.check_there(place, is_folder=data.source == "folders")
        else:
            _FIND[data.source](absolute(place))
