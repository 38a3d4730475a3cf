"""The data and the model that `tfaccel evaluate` is asked for.

source = source_of(config, asked, known_of_run(workdir))
snapshot, words = checkpoint_of(workdir, config, asked)
model = model_of_checkpoint(run, config, loader.data, snapshot)
"""

import dataclasses
import pathlib
from collections.abc import Sequence

import keras

from tfaccel.common.errors import UserError
from tfaccel.config import Config, DataConfig
from tfaccel.data.images import ImageData
from tfaccel.data.source import ArraySource, Blobs, ImageSource
from tfaccel.experiment import tasks
from tfaccel.experiment.evaluate.asked import NEEDS_LIST, SEVERAL, Asked
from tfaccel.experiment.open_data import check_same_numbers, open_source, open_sources
from tfaccel.experiment.trained import model_of, snapshot_of, store_of
from tfaccel.export import card
from tfaccel.run import Run
from tfaccel.training.checkpoint.store import Snapshot
from tfaccel.training.workdir import versions


@dataclasses.dataclass(frozen=True)
class Known:
    """What the labels of the training were, as far as an export says it.

    Attributes:
      class_names: the names of all classes, in order; () if they are not known, or there are none.
      target_names: the names of the numbers of a regression, in order; () likewise.
      task: see `data.source.TASKS`; None if it is not known.
    """

    class_names: tuple[str, ...] = ()
    target_names: tuple[str, ...] = ()
    task: str | None = None

    @classmethod
    def of_export(cls, folder: pathlib.Path) -> "Known":
        """Returns what an export says.

        Raises:
          UserError: the folder is not an export.
        """
        facts = card.read(folder)
        classes, targets = (facts.get(each, ()) for each in ("class_names", "target_names"))
        if facts.get("answers") != "numbers":
            targets = ()  # names of a mask's values are in the config
        return cls(*(tuple(map(str, each)) for each in (classes, targets)), task=facts.get("task"))


def known_of_run(workdir: pathlib.Path) -> Known:
    """Returns what the newest export of the run says; nothing if there is no export yet."""
    for folder in reversed(versions(workdir / "export")):
        try:
            return Known.of_export(folder)
        except UserError:  # another folder with a number as its name
            continue
    return Known()


def source_of(config: Config, asked: Asked, known: Known) -> ImageSource | ArraySource:
    """Returns the images, with the classes of the training in their order.

    Args:
      config: the run's config with what was asked for.
      asked: the call.
      known: what the run's export says. Without it, the training images are listed, which must then
        be there.

    Raises:
      UserError: the data do not exist, or have other labels than the training.
    """
    if asked.data is not None:
        return _other_source(config.data, known)
    if config.data.splits or asked.split == "test":
        train, test = open_sources(config.data)
    else:
        train = test = open_source(config.data, "train")
    names = train.class_names
    if known.class_names and names:
        whole = card.completed(names, len(known.class_names))
        if whole != known.class_names:
            raise _changed("classes", known.class_names, names)
    if known.target_names and train.target_names != known.target_names:
        raise _changed("numbers", known.target_names, train.target_names)
    chosen = train if asked.split == "train" else test
    # The test images may lack classes that the model has.
    return dataclasses.replace(chosen, class_names=names) if names else chosen


def _other_source(data: DataConfig, known: Known) -> ImageSource | ArraySource:
    """Returns other images, whose labels are read as those of the training were."""
    names, targets, task = known.class_names, known.target_names, known.task
    if data.source == "folders" and task in SEVERAL:
        raise UserError(NEEDS_LIST.format(where=data.test, task=task))
    if not names and not targets and data.source != "pairs":
        train = open_source(data, "train")
        names, targets, task = train.class_names, train.target_names, train.task
    if data.source == "csv" and task in SEVERAL:
        data = dataclasses.replace(data, task=task)  # the labels of few images may look otherwise
    found = open_source(data, "test", class_names=names or None)
    if data.source != "pairs":
        check_same_numbers(targets, found.target_names)
    return found


def _changed(what: str, known: Sequence[str], found: Sequence[str]) -> UserError:
    return UserError(
        f"the {what} of the training images have changed since the run: they were "
        f"{_some(known)}, and are {_some(found)} now; restore the class folders or the labels, or "
        "give the images to evaluate by --data"
    )


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
    # Images with one class may lack classes that the model has.
    too_many = given[-1] > needed[-1] and data.source.task in SEVERAL
    if given[:-1] != needed[:-1] or given[-1] < needed[-1] or too_many:
        raise UserError(
            f"the model in {file} gives {given} for an image, but these data need {needed}; give "
            "the data that it was trained for"
        )
    return model
