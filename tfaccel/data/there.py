"""Whether the data that a config names are there, told in milliseconds: no file is listed or read.

Takes the config's part about data; raises the sentence that opening them would raise.

    check_there(config.data, "train")

Needs no TensorFlow.
"""

import pathlib

from tfaccel.config import DataConfig
from tfaccel.data.digits import ensure_digits
from tfaccel.data.sources.arrays import find_arrays
from tfaccel.data.sources.folders import find_classes
from tfaccel.data.sources.image_list import find_list
from tfaccel.data.sources.index import find_shards
from tfaccel.data.sources.pairs import find_images
from tfaccel.data.sources.paths import absolute

_FIND = {
    "arrays": find_arrays,
    "csv": find_list,
    "folders": find_classes,
    "pairs": find_images,
    "tfrecord": find_shards,
    "webdataset": find_shards,
}


def places(data: DataConfig, split: str) -> tuple[pathlib.Path, ...]:
    """Returns where the images of "train" or "test" are, and of pairs where their targets are."""
    root = pathlib.Path(data.root) if data.root else ensure_digits()
    names = (split, f"{split}_targets") if data.source == "pairs" else (split,)
    return tuple(root / getattr(data, each) for each in names)


def check_there(data: DataConfig, split: str) -> None:
    """Looks for the folders or files themselves, and not for what is in them.

    Args:
      data: where the images are.
      split: "train" or "test".

    Raises:
      UserError: one is not there, or a file is where a folder should be, or the reverse.
    """
    for place in map(absolute, places(data, split)):
        _FIND[data.source](place)
