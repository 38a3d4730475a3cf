"""Finds, at the start of training, the reasons why an export at the end would be refused.

`check_at_start` takes the compiled model and the loaders, and raises or logs what it checked. It
uses the export's own checks and writers (asked.py). It also compares the pixels of the test images
that the export will use and of some training images, with each kind of file among them.

    with check_at_start(model, path, runtime=run.runtime, loader=test) as rehearsal: ...
    warn_at_start(model, train, test, run.runtime)       # for a script, which may never export

Faults that only trained weights show are found at the end.
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

from tfaccel.common.disk_errors import check_free, existing, free_bytes
from tfaccel.common.errors import RunError, UserError
from tfaccel.common.tables import in_figures
from tfaccel.config import AugmentConfig, ExportConfig
from tfaccel.data import draws
from tfaccel.data.distribute import Loader
from tfaccel.data.images import ImageData
from tfaccel.data.loaders.memory import decode_all
from tfaccel.data.source import ArraySource, ImageSource, spread
from tfaccel.export.asked import affordable, ask, check_model, new_path, why_no_keras
from tfaccel.export.kinds import of_each_kind
from tfaccel.export.parity import DISAGREEMENT_LIMIT, PIXEL_LIMIT
from tfaccel.export.parting import where_pixels_differ
from tfaccel.export.preprocessing import Preprocessing, how_read
from tfaccel.export.rehearsal import Rehearsal
from tfaccel.export.samples import Samples, take_samples
from tfaccel.export.unfinished import check_can_be_made
from tfaccel.keras_internals.copies import check_config
from tfaccel.keras_internals.seeds import draws_kept
from tfaccel.process import waits
from tfaccel.runtime.devices import Runtime

log = logging.getLogger("tfaccel")

NUM_IMAGES = 32  # training images to compare, and test images of a script
ROWS = 32  # images that are decoded together
COPIES = 2.5  # an export has the weights twice, and the rest is small compared to them

_checked = weakref.WeakSet()  # models that need no further check or warning


def check_at_start(
    model: keras.Model,
    path: str | os.PathLike,
    *,
    runtime: Runtime,
    config: ExportConfig | None = None,
    loader: Loader | None = None,
    images=None,
    train: Loader | None = None,
    beside_training: bool = False,
) -> Rehearsal:
    """Raises if an export at the end of training would be refused.

    Args:
      model: the model before training; its weights do not matter. With a loader, it is compiled.
      path: the path of the export.
      runtime: devices, threads and seed.
      config: how it will be exported; None for the defaults.
      loader: as for `Run.export`.
      images: as for `Run.export`.
      train: the loader of training images, some of which are compared too; or None.
      beside_training: whether what takes seconds, the comparison of pixels and the trial export,
        waits for the second execution of `fit`. The first step is then done that much earlier.

    Returns:
      The rehearsal, which is still running, or which its callback begins. Give its callback to
      `fit`, and close it.

    Raises:
      UserError: as for `Run.export`; or the disks have too little room, or the export would turn an
        image into other pixels than the loader. With `beside_training`, the callback may raise it.
      RunError: the rehearsal's export cannot be written. With `beside_training`, likewise.
    """
    path, config = new_path(path), config or ExportConfig()
    with waits.on("checking that the model can be exported"):
        check_can_be_made(path)
        asked = ask(model, config, loader=loader, images=images)
        _checked.add(model)
        _check_room(model, path.parent)

    def compare() -> Samples | None:
        """Compares pixels, and returns the samples for the trial export."""
        began, samples, num = time.monotonic(), None, 0
        if loader is not None:
            most = affordable(config.samples, asked.model, loader.data.images)
            also = _of_each_kind(loader.data, runtime)
            samples = take_samples(loader.data, runtime, most, also=also)
            _check_room_for(samples)
            at_end, how = len(spread(len(loader.data.source), most)), asked.images.preprocessing
            _check_pixels(samples, loader.data, how, runtime, of="test", num_at_end=at_end)
            num = len(samples.encoded)
        if train is not None:
            num += _check_training(train.data, loader.data, runtime)
        seconds = time.monotonic() - began
        if num:
            log.info("export: its pixels match the loader's in %d images (%.1f s)", num, seconds)
        return samples

    fits = free_bytes(pathlib.Path(tempfile.gettempdir())) >= _needed(model)
    rehearsal = Rehearsal(asked, compare, parent=None if fits else existing(path.parent))
    if not beside_training:
        rehearsal.begin()
    return rehearsal


def warn_at_start(
    model: keras.Model, train: Loader | None, test: Loader | None, runtime: Runtime
) -> None:
    """Warns, once for each model, if `Run.export` would refuse it. A script may never export it.

    Args:
      model: compiled and, if possible, built.
      train: the loader that `fit` reads; None if it reads something else.
      test: the loader for validation; None if there is none or it is something else.
      runtime: devices, threads and seed.
    """
    if model in _checked:
        return
    _checked.add(model)
    began = time.monotonic()
    try:
        with draws_kept():
            num = _check_quickly(model, train, test, runtime)
    except (UserError, RunError) as error:
        log.warning("export: run.export would refuse this model after training: %s", error)
    except Exception as error:
        log.warning("export: could not check whether run.export takes this model (%s)", error)
    else:
        if num:
            log.info(
                "export: an export's pixels match the loader's in %d images (%.1f s)",
                num,
                time.monotonic() - began,
            )


def _check_quickly(model, train: Loader | None, test: Loader | None, runtime: Runtime) -> int:
    """Makes the quick checks of `Run.export`; returns the number of images it compared."""
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
        num += len(samples.encoded)
    if train in known and train not in evaluating[:1]:
        num += _check_training(train.data, known[0].data, runtime)
    return num


def _check_training(train: ImageData, test: ImageData, runtime: Runtime) -> int:
    """Checks the pixels of some training images, and returns the number of these images."""
    data, how = _plain(train, test, runtime)
    samples = take_samples(data, runtime, len(data.source))
    _check_pixels(samples, data, how, runtime, of="training")
    return len(samples.encoded)


def _needed(model: keras.Model) -> float:
    """Returns about how many bytes an export needs."""
    return COPIES * sum(
        each.value.dtype.size * each.value.shape.num_elements() for each in model.variables
    )


def _check_room(model: keras.Model, folder: pathlib.Path) -> None:
    what = "the export at the end of training needs about"
    check_free(folder, _needed(model), what=what, fix="use another folder (--workdir)")


def _check_room_for(samples: Samples) -> None:
    """Raises UserError if there is too little room for the samples and the export's answers."""
    check_free(
        pathlib.Path(tempfile.gettempdir()),
        2 * samples.inputs.size + sum(map(len, samples.encoded)),
        what="the samples for the check of the export at the end of training need",
        fix="set TMPDIR to another folder",
    )


def _of_each_kind(data: ImageData, runtime: Runtime) -> np.ndarray:
    """Returns the indices of images of each kind of file; none if the files are not known."""
    if isinstance(data.found, ImageSource) and len(data.found) == len(data.source):
        return of_each_kind(data.found.images, num_threads=runtime.loader_threads)
    return np.array([], np.int64)


def _plain(train: ImageData, test: ImageData, runtime: Runtime) -> tuple[ImageData, Preprocessing]:
    """Returns some training images with the test loader's settings, and the export's preprocessing.

    It compares the whole image, because the training loader's own windows are random.
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
    return data, Preprocessing(images, augment, **how_read(train))


def _check_pixels(
    samples: Samples,
    data: ImageData,
    preprocessing: Preprocessing,
    runtime: Runtime,
    *,
    of: str,
    num_at_end: int | None = None,
) -> None:
    """Raises UserError if pixels differ, or if the export cannot decode too many of the files.

    Args:
      samples: images from the data's own loader.
      data: the data that the samples are from.
      preprocessing: the export's preprocessing.
      runtime: devices, threads and seed.
      of: the name of the images in messages.
      num_at_end: how many samples the end of training compares; None for all of them.
    """
    mean, std = (np.array(each, np.float32) for each in (data.images.mean, data.images.std))
    failed, most = [], max(1, DISAGREEMENT_LIMIT * (num_at_end or len(samples)))
    for index, ours in enumerate(_made(samples.encoded, preprocessing)):
        name, encoded = samples.names[index], samples.encoded[index]
        if isinstance(ours, Exception):
            failed.append(name)
            why = ours.message.splitlines()[0]
            log.warning("export: it cannot decode the %s image %s (%s)", of, name, why)
            if len(failed) > most:
                raise UserError(
                    f"the loader reads the {of} images {failed[0]} and {name}, but an export "
                    f"cannot decode them ({why}); convert them to JPEG or PNG with 8 bits"
                ) from ours
            continue
        levels = 255 * (samples.inputs[index].astype(np.float32) * std + mean)
        apart = float(np.abs(ours * (255 / data.images.pixel_scale) - levels).mean())
        if apart <= PIXEL_LIMIT:
            continue
        step = "pixels"
        if samples.source is not None:
            one = samples.source.taken(np.array([index]))
            step = where_pixels_differ(one, encoded, data, preprocessing, runtime)
        raise UserError(
            f"the export would turn the {of} image {name} into other pixels than the loader: they "
            f"differ by {apart:.1f} of 255 grey levels on average (limit {in_figures(PIXEL_LIMIT)}"
            f"), from the {step} on; convert it to a plain PNG or JPEG, or use another loader "
            "(data.loader)"
        )


def _made(encoded: Sequence[bytes], preprocessing: Preprocessing) -> Iterator:
    """Yields the pixels that the export makes from each file, or the error that it raises."""
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
