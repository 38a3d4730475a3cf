"""Opens the source and the loader that a config describes.

train, test = open_sources(config.data)
loader = open_loader(run, config, "train", source=train)
"""

import dataclasses
import pathlib
from collections.abc import Sequence

from tfaccel.common.errors import UserError
from tfaccel.config import SOURCE_ARGUMENTS, Config, DataConfig, ImageConfig
from tfaccel.data import sources
from tfaccel.data.distribute import Loader
from tfaccel.data.source import ArraySource, ImageSource
from tfaccel.data.stores.urls import below, is_url
from tfaccel.data.there import places

_BY_NAME = {
    "csv": sources.image_list,
    "tfrecord": sources.tfrecord,
    "webdataset": sources.webdataset,
    "array_record": sources.array_record,
    "arrow": sources.arrow,
    "arrays": sources.arrays,
}


def open_source(
    data: DataConfig, split: str, *, class_names: Sequence[str] | None = None
) -> ImageSource | ArraySource:
    """Returns the source of the "train" or "test" images.

    Args:
      data: where the images are.
      split: "train" or "test".
      class_names: the names of all classes, in order, for images of their own that may lack some;
        None for the classes that are found.

    Raises:
      UserError: the data do not exist, or have another layout.
    """
    if data.splits:
        train, test = _divided(data, _whole(data, split))
        return train if split == "train" else test
    if split == "test" and data.source == "csv" and data.task == "auto" and class_names is None:
        return open_sources(data)[1]  # the training labels decide on the task
    return _whole(data, split, class_names)


def open_sources(data: DataConfig) -> tuple[ImageSource | ArraySource, ImageSource | ArraySource]:
    """Returns the sources of the training and the test images, with the classes of the former.

    Raises:
      UserError: as for `open_source`.
    """
    if data.splits:
        return _divided(data, _whole(data, "train"))
    train = _whole(data, "train")
    test = _whole(data, "test", train.class_names, task=train.task)
    check_same_numbers(train.target_names, test.target_names)
    return train, test


def check_same_numbers(ours: Sequence[str], theirs: Sequence[str]) -> None:
    """Raises UserError unless training and test images have the same numbers, in the same order.

    A single number may have another name, because lists name it "label", "target" and so on.

    Args:
      ours: the names of the numbers of the training images; empty if there are none.
      theirs: those of the test images.
    """
    if tuple(ours) != tuple(theirs) and not len(ours) == len(theirs) == 1:
        raise UserError(
            f"the numbers of the test images are {', '.join(theirs[:5]) or 'none'} "
            f"({len(theirs)}), but those of the training are {', '.join(ours[:5]) or 'none'} "
            f"({len(ours)}); give both the same columns in the same order, for example by their "
            "names in data.label_columns"
        )


def _divided(data: DataConfig, source) -> tuple:
    settings = {"seed": data.split_seed, "group_pattern": data.group_pattern}
    if data.num_folds is not None:
        return sources.fold(source, data.fold, num_folds=data.num_folds, **settings)
    return sources.split(source, data.validation_split, **settings)


def _whole(
    data: DataConfig, split: str, class_names: Sequence[str] | None = None, task: str | None = None
):
    if data.classes is None or data.source == "pairs":
        return _found(data, split, class_names, task)
    # A test set may lack classes of the list. The training images show whether a name is right.
    of, may_lack = ("training", False) if split == "train" or data.splits else ("test", True)
    source = _found(data, split, None, task)
    return sources.select_classes(source, data.classes, may_lack=may_lack, of=of)


def _found(data: DataConfig, split: str, class_names: Sequence[str] | None, task: str | None):
    # The training classes are those of a test set, which may lack some. None: those that are found.
    # A test set has the task of the training labels, too, whatever its own labels look like.
    where, *targets = places(data, split)
    if data.source == "pairs":
        return sources.image_pairs(where, *targets, class_names=data.classes or ())
    cache = {"cache_gib": data.store_cache_gib} if is_url(where) else {}
    if data.source == "folders":
        return sources.class_folders(where, class_names=class_names, **cache)
    arguments = cache | {
        name: getattr(data, name) for name in SOURCE_ARGUMENTS.get(data.source, ())
    }
    if class_names:
        arguments["class_names"] = class_names
    if data.source == "csv":
        columns = ("path_column", "label_column", "label_columns", "group_column")
        arguments |= {name: getattr(data, name) for name in (*columns, "label_separator")}
        arguments["task"] = task or data.task
        arguments["root"] = _joined(data.root, data.images) if data.images else None
    elif data.source in ("tfrecord", "webdataset", "array_record", "arrow"):
        arguments["task"] = "classes" if data.task == "auto" else data.task
    elif data.source == "tfds":
        return sources.tfds(where.parent, where.name, **arguments)
    return _BY_NAME[data.source](where, **arguments)


def _joined(root: str, images: str) -> str | pathlib.Path:
    return below(root, images) if is_url(root) else pathlib.Path(root) / images


def open_loader(run, config: Config, split: str, *, source=None, **changes) -> Loader:
    """Returns the loader of "train", shuffled and augmented, or of "test".

    Args:
      run: the `tfaccel.Run`.
      config: the experiment.
      split: "train" or "test".
      source: a source to use in place of the config's.
      **changes: fields of ImageConfig, or `sampling`, that differ from the config's.

    Raises:
      UserError: as for `open_source`.
    """
    images = {
        each.name: getattr(config.data, each.name) for each in dataclasses.fields(ImageConfig)
    }
    images["sampling"] = config.data.sampling if split == "train" else "uniform"
    return run.loader(
        open_source(config.data, split) if source is None else source,
        shuffle=split == "train",
        augment=config.train_images if split == "train" else config.test_images,
        dali=config.dali,
        **{**images, **changes},
    )
