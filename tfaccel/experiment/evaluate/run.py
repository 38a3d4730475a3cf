"""Evaluates a run's model image by image, and writes a report into the run's workdir.

    report, folder = evaluate(pathlib.Path("runs/a"), Asked(split="test"))
    print(report)

The network runs over the images with the run's loader and strategy, and each image counts once on
any number of replicas. The report is written to `evaluation/1`, `evaluation/2` and so on.
"""

import contextlib
import dataclasses
import os
import pathlib
import shutil
import tempfile
from collections.abc import Callable, Iterator

import keras
import numpy as np

from tfaccel.common.disk_errors import not_written
from tfaccel.common.errors import RunError, UserError
from tfaccel.common.redact import shown
from tfaccel.common.run_log import summary
from tfaccel.common.tables import counted
from tfaccel.config import Config
from tfaccel.data.distribute import Loader
from tfaccel.data.source import ArraySource, ImageSource
from tfaccel.data.there import places
from tfaccel.experiment.evaluate import scores as scores_lib
from tfaccel.experiment.evaluate.asked import Asked
from tfaccel.experiment.evaluate.class_report import ClassReport
from tfaccel.experiment.evaluate.mask_report import MaskReport
from tfaccel.experiment.evaluate.multilabel_report import MultilabelReport
from tfaccel.experiment.evaluate.opened import (
    Known,
    checkpoint_of,
    known_of_run,
    model_of_checkpoint,
    model_of_export,
    names_of,
    source_of,
)
from tfaccel.experiment.evaluate.page import About, Evaluated
from tfaccel.experiment.evaluate.regression_report import RegressionReport
from tfaccel.experiment.evaluate.restored_report import RestoredReport
from tfaccel.experiment.open_data import open_loader
from tfaccel.experiment.scored import read_of, scored
from tfaccel.experiment.train import steps_in_execution
from tfaccel.export import card
from tfaccel.process import waits
from tfaccel.run import Run
from tfaccel.runtime.cluster import check_one_process, find
from tfaccel.training.callbacks.ema import averages_of
from tfaccel.training.logs import contact_sheet
from tfaccel.training.workdir import next_version, read_config

NUM_NAMED = 5  # the likeliest classes of each image
NUM_PICTURED = 24  # images in worst.png


def evaluate(
    workdir: pathlib.Path, asked: Asked, *, out: pathlib.Path | None = None
) -> tuple[Evaluated, pathlib.Path]:
    """Evaluates a run and returns the report and its folder.

    Args:
      workdir: the workdir of a run of `tfaccel train`, which may still be training.
      asked: which images, which weights, and how to compute.
      out: the folder for versions 1, 2, 3 and so on; None for `evaluation` in the workdir.

    Raises:
      UserError: the workdir has no run or no checkpoint, the data are gone or have other classes,
        or a file cannot be read.
      RunError: the report cannot be written.
    """
    config = asked.applied_to(read_config(workdir))
    cluster = find(os.environ)
    check_one_process(cluster, "evaluate")
    if asked.export is not None:
        known, words = Known.of_export(asked.export), f"the export in {asked.export}"
    else:
        known = known_of_run(workdir)
        snapshot, words = checkpoint_of(workdir, config, asked)
    run = Run(config.runtime, cluster)
    source = source_of(config, asked, known)
    loader = open_loader(run, config, "test", source=source)
    with contextlib.ExitStack() as stack:
        if asked.export is not None:
            model = model_of_export(run, config, loader.data, asked.export)
        else:
            model = model_of_checkpoint(run, config, loader.data, snapshot)
            if config.train.ema_momentum is not None and asked.weights != "trained":
                stack.enter_context(averages_of(model))
                words += ", with the average of the weights"
        summary("evaluate: %s", words)
        opened = _Opened(run, config, source, loader, model)
        about = {
            "workdir": str(workdir),
            "weights": words,
            "data": _data_in_words(config, asked),
            "loader": loader.data.loader,
            "num_replicas": run.strategy.num_replicas_in_sync,
        }
        report = _report(opened, about)
        report = report.with_notes(_notes(workdir, report))
        folder = (out or workdir / "evaluation").absolute()
        return report, _written(report, folder, lambda path: _write_worst(opened, report, path))


@dataclasses.dataclass(frozen=True)
class _Opened:
    """What an evaluation computes with: the images as they were found, and their loader."""

    run: Run
    config: Config
    source: ImageSource | ArraySource
    loader: Loader
    model: keras.Model

    @property
    def is_mask(self) -> bool:
        """Whether the targets are masks."""
        data = self.loader.data
        return data.source.targets is not None and data.images.targets == "mask"

    @property
    def num_outputs(self) -> int:
        """The classes or numbers of the model, or the values of a pixel."""
        return self.model.output_shape[-1]


def _report(opened: _Opened, about: dict[str, object]) -> Evaluated:
    """Returns the report from the scores of all images; `about` has the facts of an `About`."""
    loader = opened.loader
    per_execution = steps_in_execution(
        opened.config.train, opened.run.runtime.devices[0], num_steps=loader.num_batches
    )
    with waits.on("evaluating the images"):
        function = _function(opened)
        model = scored(opened.run, opened.model, function, per_execution=per_execution)
        scores = model.predict(loader, verbose=0)
    names = names_of(loader.data.found)
    names = [names[each] for each in read_of(opened.loader).tolist()]
    unread = tuple(_left_out(names_of(opened.source), names))
    return _of_scores(opened, About(**about, num_images=len(names), unread=unread), names, scores)


def _function(opened: _Opened) -> Callable:
    """Returns what is computed for each image, according to the task of the data."""
    images = opened.loader.data.images
    if opened.is_mask:
        return scores_lib.Masks(opened.num_outputs, images.ignore_class)
    return {
        None: scores_lib.Restored(images.std),
        "classes": scores_lib.Classes(min(NUM_NAMED, opened.num_outputs)),
        "multilabel": scores_lib.several,
        "regression": scores_lib.numbers,
    }[opened.loader.data.source.task]


def _of_scores(opened: _Opened, about: About, image_names: list[str], scores: dict) -> Evaluated:
    """Returns the report according to the task of the data."""
    source = opened.loader.data.source
    if opened.is_mask:
        _check_values(scores["num_beyond"], image_names, opened.num_outputs)
        known = source.target_names or ("0",)
        names = card.completed(known, opened.num_outputs)
        return MaskReport(about, names, image_names, scores)
    if source.task is None:
        return RestoredReport(about, image_names, scores)
    labels = source.labels[read_of(opened.loader)]
    if source.task == "regression":
        return RegressionReport(about, source.target_names, image_names, labels, scores)
    names = card.completed(opened.loader.class_names, opened.num_outputs)
    if source.task == "multilabel":
        return MultilabelReport(about, names, image_names, labels > 0.5, scores)
    return ClassReport(about, names, image_names, labels, scores)


def _check_values(num_beyond: np.ndarray, names: list[str], num_classes: int) -> None:
    """Raises UserError if masks have values that are no class."""
    bad = np.flatnonzero(num_beyond)
    if len(bad):
        raise UserError(
            f"the masks of {counted(len(bad), 'image')} have values above {num_classes - 1}, the "
            f"largest class of the model, first that of {names[bad[0]]} ({num_beyond[bad[0]]:,} "
            "pixels); number the classes from 0, or train with data.ignore_class for pixels "
            "without a class"
        )


def _left_out(names: list[str], read: list[str]) -> list[str]:
    """Returns the names that are missing in `read`, which has the others in the same order."""
    if len(names) == len(read):
        return []
    missing, others = [], iter(read)
    following = next(others, None)
    for name in names:
        if name == following:
            following = next(others, None)
        else:
            missing.append(name)
    return missing


def _data_in_words(config: Config, asked: Asked) -> str:
    where = shown(str(places(config.data, asked.split)[0]))
    if asked.data is not None:
        return f"in {where}"
    of = f"the {'training' if asked.split == 'train' else 'test'} images of the run"
    return f"{of}, a part of {where}" if config.data.splits else f"{of}, in {where}"


def _notes(workdir: pathlib.Path, report: Evaluated) -> Iterator[str]:
    """Yields sentences on what a reader of the figures has to know."""
    if not (workdir / "result.json").is_file():
        yield (
            "The run has not finished, or was stopped: there is no result.json in its workdir. "
            "These are the figures of the weights that it has saved so far."
        )
    if unread := report.about.unread:
        yield (
            f"{counted(len(unread), 'image')} cannot be read and count in no figure, e.g. "
            f"{unread[0]}. The last rows of images.csv name them."
        )
    if num := int((~report.scores["is_finite"]).sum()):
        yield (
            f"The outputs for {counted(num, 'image')} are infinite or NaN. {report.if_not_finite} "
            "Look at their pixels, and at the loss of the training."
        )
    yield from report.remarks()


def _write_worst(opened: _Opened, report: Evaluated, path: pathlib.Path) -> None:
    """Writes a sheet of the worst images, of pairs with target and answer beside each."""
    places_of_worst = report.worst[:NUM_PICTURED]
    data = opened.loader.data
    few = open_loader(
        opened.run,
        opened.config,
        "test",
        source=data.source.taken(
            read_of(opened.loader)[places_of_worst]
        ),  # decoded, if images are kept
        loader=data.loader,
        stored_size=None,
        bad_files="error",
    )
    function = scores_lib.shown_masks if opened.is_mask else scores_lib.shown
    found = scored(opened.run, opened.model, function).predict(few, verbose=0)
    pixels = contact_sheet.in_unit_range(found["inputs"], data.images)
    others = {}
    if data.source.targets is not None:
        both = found["targets"], found["outputs"]
        if opened.is_mask:
            both = (contact_sheet.colors_of(each[..., 0]) for each in both)
        else:
            both = (contact_sheet.in_unit_range(each, data.images) for each in both)
        others = dict(zip(("targets", "answers"), both, strict=True))
    contact_sheet.write(path, pixels, report.captions(places_of_worst.tolist()), **others)


def _written(report: Evaluated, folder: pathlib.Path, write_worst) -> pathlib.Path:
    """Writes the report as the folder's next version, completely or not at all; returns its path.

    Raises:
      RunError: it cannot be written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        unfinished = pathlib.Path(tempfile.mkdtemp(prefix=".unfinished-", dir=folder))
        try:
            unfinished.chmod(0o755)
            with waits.on("drawing and writing the report"):
                write_worst(unfinished / "worst.png")
                report.write(unfinished)
            return _named(unfinished, folder)
        finally:
            shutil.rmtree(unfinished, ignore_errors=True)  # after a success it no longer exists
    except OSError as error:
        raise RunError(
            f"the report in {shown(str(folder))} {not_written(error, folder)}, or give another "
            "folder by --out"
        ) from error


def _named(unfinished: pathlib.Path, folder: pathlib.Path) -> pathlib.Path:
    while True:
        version = next_version(folder)
        try:
            unfinished.rename(version)
            return version
        except OSError:
            if not version.exists():  # else another process has just taken the number
                raise
