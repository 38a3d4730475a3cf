"""Checks in milliseconds whether the data that a config names exists. No file is listed or read.

The check raises the same errors as opening the data would. Needs no TensorFlow.

    check_there(config.data, "train")
"""

import pathlib

from tfaccel.config import DataConfig
from tfaccel.data.digits import ensure_digits
from tfaccel.data.sources.arrays import find_arrays
from tfaccel.data.sources.arrow_files import find_arrow
from tfaccel.data.sources.folders import find_classes
from tfaccel.data.sources.index import find_shards
from tfaccel.data.sources.list_rows import find_list
from tfaccel.data.sources.pairs import find_images
from tfaccel.data.sources.paths import absolute

_FIND = {
    "arrow": find_arrow,
    "arrays": find_arrays,
    "csv": find_list,
    "folders": find_classes,
    "pairs": find_images,
    "tfrecord": find_shards,
    "webdataset": find_shards,
}


def places(data: DataConfig, split: str) -> tuple[pathlib.Path, ...]:
    """Returns the path of the images of "train" or "test", and for pairs that of their targets.

    If the test images are a part of the training images, both have the same path.
    """
    root = pathlib.Path(data.root) if data.root else ensure_digits()
    split = "train" if data.splits else split
    names = (split, f"{split}_targets") if data.source == "pairs" else (split,)
    return tuple(root / getattr(data, each) for each in names)


def check_there(data: DataConfig, split: str) -> None:
    """Checks that the folders or files of a split exist, but not what they contain.

    Args:
      data: where the images are.
      split: "train" or "test".

    Raises:
      UserError: a path does not exist, or is a file and not a folder, or the reverse.
    """
    for place in map(absolute, places(data, split)):
        _FIND[data.source](place)
