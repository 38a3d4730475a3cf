"""The data and the model that `tfaccel evaluate` is asked for.

source = source_of(config, asked, trained_class_names(workdir))
snapshot, words = checkpoint_of(workdir, config, asked)
model = model_of_checkpoint(run, config, loader.data, snapshot)
"""

import dataclasses
import pathlib
from collections.abc import Sequence

import keras

from tfaccel.common.errors import UserError
from tfaccel.config import Config
from tfaccel.data.images import ImageData
from tfaccel.data.source import ArraySource, Blobs, ImageSource
from tfaccel.experiment import tasks
from tfaccel.experiment.evaluate.asked import Asked
from tfaccel.experiment.open_data import open_source, open_sources
from tfaccel.experiment.trained import model_of, snapshot_of, store_of
from tfaccel.export import card
from tfaccel.run import Run
from tfaccel.training.checkpoint.store import Snapshot
from tfaccel.training.workdir import versions


def trained_class_names(workdir: pathlib.Path) -> tuple[str, ...]:
    """Returns the class names in the newest export of the run; () if there is no export yet."""
    for folder in reversed(versions(workdir / "export")):
        try:
            return tuple(map(str, card.read(folder)["class_names"]))
        except UserError:  # another folder with a number as its name
            continue
    return ()


def source_of(
    config: Config, asked: Asked, known_names: Sequence[str]
) -> ImageSource | ArraySource:
    """Returns the images, with the classes of the training in their order.

    Args:
      config: the run's config with what was asked for.
      asked: the call.
      known_names: the class names in the run's export; () if they are not known. Without them, the
        training images are listed, which must then be there.

    Raises:
      UserError: the data do not exist, or have other classes than the training.
    """
    if asked.data is not None:
        names = known_names or open_source(config.data, "train").class_names
        return open_source(config.data, "test", class_names=names or None)
    if config.data.splits or asked.split == "test":
        train, test = open_sources(config.data)
    else:
        train = test = open_source(config.data, "train")
    names = train.class_names
    if known_names and names and card.completed(names, len(known_names)) != tuple(known_names):
        raise UserError(
            "the classes of the training images have changed since the run: they were "
            f"{_some(known_names)}, and are {_some(names)} now; restore the class folders or the "
            "labels, or give the images to evaluate by --data"
        )
    chosen = train if asked.split == "train" else test
    # The test images may lack classes that the model has.
    return dataclasses.replace(chosen, class_names=names) if names else chosen


def _some(names: Sequence[str]) -> str:
    return f"{', '.join(names[:5])}{', ...' if len(names) > 5 else ''} ({len(names)})"


def names_of(source: ImageSource | ArraySource) -> list[str]:
    """Returns the path of each image, its place in a shard, or its index in an array."""
    blobs = getattr(source, "images", None)
    if isinstance(blobs, Blobs):
        return [blobs.name(index) for index in range(len(blobs))]
    return [str(index) for index in range(len(source))]


def checkpoint_of(workdir: pathlib.Path, config: Config, asked: Asked) -> tuple[Snapshot, str]:
    """Returns the state in a checkpoint, and which one it is, in words.

    Raises:
      UserError: there is no such checkpoint.
      CheckpointError: it is damaged.
    """
    monitor = config.train.monitor
    if asked.checkpoint == "best":
        snapshot = store_of(workdir, config).best()
        if snapshot is not None:
            return snapshot, f"the checkpoint of step {snapshot.step}, the best by {monitor}"
        snapshot = snapshot_of(workdir, config, "newest")
        return snapshot, (
            f"the checkpoint of step {snapshot.step}, the newest, because none has a {monitor}"
        )
    if asked.checkpoint == "newest":
        snapshot = snapshot_of(workdir, config, "newest")
        return snapshot, f"the checkpoint of step {snapshot.step}, the newest"
    snapshot = store_of(workdir, config).of_step(int(asked.checkpoint))
    return snapshot, f"the checkpoint of step {snapshot.step}"


def model_of_checkpoint(
    run: Run, config: Config, data: ImageData, snapshot: Snapshot
) -> keras.Model:
    """Returns the run's model with a checkpoint's weights.

    Raises:
      UserError: as for `trained.model_of`; the number of classes may have changed.
    """
    try:
        return model_of(run, config, data, snapshot)
    except UserError as error:
        if not data.class_names:
            raise
        raise UserError(
            f"{error} (the data now have {len(data.class_names)} classes; if the training had "
            "others, restore its class folders or labels)"
        ) from error


def model_of_export(run: Run, config: Config, data: ImageData, folder: pathlib.Path) -> keras.Model:
    """Returns the Keras model in an export's folder, in the scope of the run.

    Raises:
      UserError: it has no model.keras, or does not suit the data.
    """
    file = folder / "model.keras"
    if not file.is_file():
        raise UserError(
            f"{folder} has no model.keras, because Keras cannot rebuild its model; use a "
            "checkpoint in place of --export"
        )
    try:
        with run.scope():
            model = keras.saving.load_model(file, compile=False)
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise UserError(f"{file} cannot be loaded ({error}); export the run again") from error
    task = tasks.task_of(data, config.model, config.step, config.train)
    given, needed = model.output_shape[1:], task.output_shape
    if given[:-1] != needed[:-1] or given[-1] < needed[-1]:
        raise UserError(
            f"the model in {file} gives {given} for an image, but these data need {needed}; give "
            "the data that it was trained for"
        )
    return model
