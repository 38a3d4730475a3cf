"""What an export would refuse at the end of training, looked for before training begins.

Takes the compiled model and the loaders; raises in one sentence, or says what was tried. What is
asked for, and what is written, is checked by the export's own functions: asked.py. Pixels too: of
the test images that the end will look at, and of some training images, with each kind of file.

    with check_at_start(model, path, runtime=run.runtime, loader=test) as rehearsal: ...
    warn_at_start(model, train, test, run.runtime)       # of a script, which may never export

What only trained weights show is left to the end.
"""

import dataclasses
import logging
import os
import pathlib
import tempfile
import time
import weakref
from collections.abc import Iterator, Sequence

import keras
import numpy as np
import tensorflow as tf

from tfaccel.common.disk_errors import existing, free_bytes, mib
from tfaccel.common.errors import RunError, UserError
from tfaccel.common.tables import in_figures
from tfaccel.config import AugmentConfig, ExportConfig
from tfaccel.data import draws
from tfaccel.data.distribute import Loader
from tfaccel.data.images import ImageData
from tfaccel.data.loaders.memory import decode_all
from tfaccel.data.source import ArraySource, ImageSource
from tfaccel.export.asked import affordable, ask, check_model, new_path, why_no_keras
from tfaccel.export.kinds import of_each_kind
from tfaccel.export.parity import DISAGREEMENT_LIMIT, PIXEL_LIMIT
from tfaccel.export.parting import where_pixels_part
from tfaccel.export.preprocessing import Preprocessing
from tfaccel.export.rehearsal import Rehearsal
from tfaccel.export.samples import Samples, spread, take_samples
from tfaccel.export.unfinished import check_can_be_made
from tfaccel.keras_internals.copies import check_config
from tfaccel.keras_internals.seeds import draws_kept
from tfaccel.runtime.devices import Runtime

log = logging.getLogger("tfaccel")

NUM_IMAGES = 32  # of the training images, and of a script's test images
ROWS = 32  # that are decoded at a time
COPIES = 2.5  # an export holds the weights twice, and the rest is small beside them

_looked_at = weakref.WeakSet()  # models of which all has been said


def check_at_start(
    model: keras.Model,
    path: str | os.PathLike,
    *,
    runtime: Runtime,
    config: ExportConfig | None = None,
    loader: Loader | None = None,
    images=None,
    train: Loader | None = None,
) -> Rehearsal:
    """Raises where an export at the end of training would be refused.

    Args:
      model: as it will be trained; its weights do not matter. With a loader, compiled.
      path: of the export.
      runtime: devices, threads and seed.
      config: how it will be exported; None for the defaults.
      loader: as for `Run.export`.
      images: likewise.
      train: the loader of images that training reads, some of which are compared, too; or None.

    Returns:
      The rehearsal, which goes on: give `fit` its callback, and close it.

    Raises:
      UserError: as `Run.export`; or the disks have too little room, or the export would make other
        pixels of an image than the loader does.
      RunError: the export that is tried cannot be written.
    """
    began = time.monotonic()
    path, config = new_path(path), config or ExportConfig()
    check_can_be_made(path)
    asked = ask(model, config, loader=loader, images=images)
    _looked_at.add(model)
    _check_room(model, path.parent)
    samples, num = None, 0
    if loader is not None:
        most = affordable(config.samples, asked.model, loader.data.images)
        also = _of_each_kind(loader.data, runtime)
        samples = take_samples(loader.data, runtime, most, also=also)
        _check_room_for(samples)
        at_end, how = len(spread(len(loader.data.source), most)), asked.images.preprocessing
        _check_pixels(samples, loader.data, how, runtime, of="test", num_at_end=at_end)
        num = len(samples)
    if train is not None:
        num += _check_training(train.data, loader.data, runtime)
    temp = pathlib.Path(tempfile.gettempdir())
    fits = free_bytes(temp) >= _needed(model)
    rehearsal = Rehearsal(asked, samples, parent=None if fits else existing(path.parent))
    log.info(
        "export: it can be written, and of %d images it will make the pixels that the loader makes "
        "(%.1f s)",
        num,
        time.monotonic() - began,
    )
    return rehearsal


def warn_at_start(
    model: keras.Model, train: Loader | None, test: Loader | None, runtime: Runtime
) -> None:
    """Says once of a model what `Run.export` would refuse: a script may export it, or may not.

    Args:
      model: compiled and, if it can be, built.
      train: the loader that `fit` reads; None where it reads something else.
      test: the loader that it evaluates; None for none, or for something else.
      runtime: devices, threads and seed.
    """
    if model in _looked_at:
        return
    _looked_at.add(model)
    began = time.monotonic()
    try:
        with draws_kept():
            num = _look(model, train, test, runtime)
    except (UserError, RunError) as error:
        log.warning("export: run.export would refuse this model after its training: %s", error)
    except Exception as error:
        log.warning("export: whether run.export takes this model could not be tried (%s)", error)
    else:
        if num:
            log.info(
                "export: of %d images an export makes the pixels that the loader makes (%.1f s)",
                num,
                time.monotonic() - began,
            )


def _look(model, train: Loader | None, test: Loader | None, runtime: Runtime) -> int:
    """Raises what `Run.export` would, as far as seconds tell; returns how many images it made."""
    known_model, _ = check_model(model, loader=test or train)
    if known_model is model:
        check_config(model)
    elif reason := why_no_keras(model, known_model):
        log.warning("export: %s", reason)
    known = [each for each in (test, train) if isinstance(getattr(each, "data", None), ImageData)]
    evaluating = [each for each in known if not draws.kinds(each.data.augment)]
    num = 0
    if evaluating:
        data, how = evaluating[0].data, ask(model, ExportConfig(), loader=evaluating[0]).images
        samples = take_samples(data, runtime, NUM_IMAGES, also=_of_each_kind(data, runtime))
        _check_pixels(samples, data, how.preprocessing, runtime, of="test")
        num += len(samples)
    if train in known and train not in evaluating[:1]:
        num += _check_training(train.data, known[0].data, runtime)
    return num


def _check_training(train: ImageData, test: ImageData, runtime: Runtime) -> int:
    """Checks the pixels of some training images, and returns of how many."""
    data, how = _plain(train, test, runtime)
    samples = take_samples(data, runtime, len(data.source))
    _check_pixels(samples, data, how, runtime, of="training")
    return len(samples)


def _needed(model: keras.Model) -> float:
    """Returns about how many bytes an export takes."""
    return COPIES * sum(
        each.value.dtype.size * each.value.shape.num_elements() for each in model.variables
    )


def _check_room(model: keras.Model, folder: pathlib.Path) -> None:
    needed, free = _needed(model), free_bytes(folder)
    if free < needed:
        raise UserError(
            f"the export at the end of training needs about {mib(needed)} below {folder}, where "
            f"{mib(free)} are free; make room, or give another folder (--workdir)"
        )


def _check_room_for(samples: Samples) -> None:
    """Raises UserError unless there is room for what the export is asked, and for its answers."""
    temp = pathlib.Path(tempfile.gettempdir())
    needed, free = 2 * samples.inputs.size + sum(map(len, samples.encoded)), free_bytes(temp)
    if free < needed:
        raise UserError(
            f"the samples that the export is asked at the end of training need {mib(needed)} in "
            f"{temp}, where {mib(free)} are free; make room, or set TMPDIR to another folder"
        )


def _of_each_kind(data: ImageData, runtime: Runtime) -> np.ndarray:
    """Returns the places of images of each kind of file, where they are known."""
    if isinstance(data.found, ImageSource) and len(data.found) == len(data.source):
        return of_each_kind(data.found.images, num_threads=runtime.loader_threads)
    return np.array([], np.int64)


def _plain(train: ImageData, test: ImageData, runtime: Runtime) -> tuple[ImageData, Preprocessing]:
    """Returns some training images as the test loader would read them, stretched, and the export's.

    Their own windows are random, so the whole image is compared.
    """
    images = dataclasses.replace(test.images, stored_size=None)
    found = train.found if len(train.found) == len(train.source) else train.source
    ids = np.union1d(spread(len(found), NUM_IMAGES), _of_each_kind(train, runtime))
    found = source = found.taken(ids)
    if isinstance(found, ImageSource) and isinstance(test.source, ArraySource):
        how = {"channels": images.channels, "targets": images.targets}
        source = decode_all(found, stored_size=images.image_size, num_threads=1, **how)
    augment = AugmentConfig()
    data = dataclasses.replace(test, source=source, found=found, images=images, augment=augment)
    return data, Preprocessing(images, augment)


def _check_pixels(
    samples: Samples,
    data: ImageData,
    preprocessing: Preprocessing,
    runtime: Runtime,
    *,
    of: str,
    num_at_end: int | None = None,
) -> None:
    """Raises UserError where pixels part, or where too many files cannot be decoded.

    Args:
      samples: as the data's own loader makes them.
      data: what they are of.
      preprocessing: how the export makes them.
      runtime: devices, threads and seed.
      of: what they are called.
      num_at_end: how many of them the end looks at; None for as many.
    """
    mean, std = (np.array(each, np.float32) for each in (data.images.mean, data.images.std))
    failed, most = [], max(1, DISAGREEMENT_LIMIT * (num_at_end or len(samples)))
    for index, ours in enumerate(_made(samples.encoded, preprocessing)):
        name, encoded = samples.names[index], samples.encoded[index]
        if isinstance(ours, Exception):
            failed.append(name)
            why = ours.message.splitlines()[0]
            log.warning("export: it will not decode the %s image %s (%s)", of, name, why)
            if len(failed) > most:
                raise UserError(
                    f"the {of} images {failed[0]} and {name} are read by the loader, but an export "
                    f"cannot decode them ({why}); convert them to JPEG or PNG of 8 bits"
                ) from ours
            continue
        levels = 255 * (samples.inputs[index].astype(np.float32) * std + mean)
        apart = float(np.abs(ours - levels).mean())
        if apart <= PIXEL_LIMIT:
            continue
        step = "pixels"
        if samples.source is not None:
            one = samples.source.taken(np.array([index]))
            step = where_pixels_part(one, encoded, data, preprocessing, runtime)
        raise UserError(
            f"the {of} image {name} would be another in the export: {apart:.1f} of 255 grey levels "
            f"apart in the mean (limit {in_figures(PIXEL_LIMIT)}), which part in the {step}; "
            "convert it to a plain PNG or JPEG, or use another loader (data.loader)"
        )


def _made(encoded: Sequence[bytes], preprocessing: Preprocessing) -> Iterator:
    """Yields the pixels that the export makes of each file, or the error that it makes instead."""
    pixels = tf.function(
        lambda files: preprocessing.pixels(files),
        input_signature=[tf.TensorSpec((None,), tf.string)],
        autograph=False,
    )
    for start in range(0, len(encoded), ROWS):
        rows = encoded[start : start + ROWS]
        try:
            yield from pixels(tf.constant(rows)).numpy()
        except tf.errors.InvalidArgumentError:
            for each in rows:
                try:
                    yield pixels(tf.constant([each]))[0].numpy()
                except tf.errors.InvalidArgumentError as error:
                    yield error
