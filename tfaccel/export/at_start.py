"""What an export would refuse at the end of training, looked for before training begins.

Takes the compiled model and the loaders; raises in one sentence, or logs that nothing was found.

    check_at_start(model, train, test, run.runtime, folder=workdir)

The last check of an export needs the trained weights. What decides about files and pixels does not:
the export's own functions decode some images here, and the run's own loader does, too.
"""

import dataclasses
import logging
import pathlib
import shutil
import time

import keras
import numpy as np
import tensorflow as tf

from tfaccel.config import AugmentConfig
from tfaccel.data.distribute import Loader
from tfaccel.data.images import ImageData
from tfaccel.data.loaders.memory import decode_all
from tfaccel.data.source import ArraySource, ImageSource
from tfaccel.errors import UserError
from tfaccel.export.answers import answers_of
from tfaccel.export.parity import DISAGREEMENT_LIMIT, PIXEL_LIMIT
from tfaccel.export.parting import where_pixels_part
from tfaccel.export.preprocessing import Preprocessing
from tfaccel.export.samples import spread, take_samples
from tfaccel.export.saved_model import input_names
from tfaccel.runtime import Runtime
from tfaccel.table_text import in_figures

log = logging.getLogger("tfaccel")

NUM_IMAGES = 32  # of the test images, and as many of the training images
COPIES = 2.5  # an export holds the weights twice, and the rest is small beside them


def check_at_start(
    model: keras.Model, train: Loader, test: Loader, runtime: Runtime, *, folder: pathlib.Path
) -> None:
    """Raises where the export at the end of training would be refused.

    Args:
      model: compiled; its weights do not matter.
      train: the loader that training reads.
      test: the loader that evaluates, whose preprocessing goes into the export.
      runtime: devices, threads and seed.
      folder: on the disk that the export is written to; it exists.

    Raises:
      UserError: the model's inputs or outputs do not suit an export, the disk has too little room,
        or the export would make other pixels of an image than the loader does.
    """
    began = time.monotonic()
    input_names(model)
    answers_of(model, test.data)
    _check_room(model, folder)
    num = _check_pixels(test.data, Preprocessing.of(test.data), runtime, of="test")
    num += _check_pixels(*_plain(train.data, test.data), runtime, of="training")
    log.info(
        "export: of %d images the export will make the pixels that the loader makes (%.1f s)",
        num,
        time.monotonic() - began,
    )


def _check_room(model: keras.Model, folder: pathlib.Path) -> None:
    needed = COPIES * sum(
        each.value.dtype.size * each.value.shape.num_elements() for each in model.variables
    )
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise UserError(
            f"the export at the end of training needs about {needed / 2**20:,.0f} MiB below "
            f"{folder}, where {free / 2**20:,.0f} MiB are free; make room, or give another "
            "--workdir"
        )


def _plain(train: ImageData, test: ImageData) -> tuple[ImageData, Preprocessing]:
    """Returns some training images as the test loader would read them, stretched, and the export's.

    Their own windows are random, so the whole image is compared.
    """
    images = dataclasses.replace(test.images, stored_size=None)
    found = train.found if len(train.found) == len(train.source) else train.source
    found = source = found.taken(spread(len(found), NUM_IMAGES))
    if isinstance(found, ImageSource) and isinstance(test.source, ArraySource):
        how = {"channels": images.channels, "targets": images.targets}
        source = decode_all(found, stored_size=images.image_size, num_threads=1, **how)
    augment = AugmentConfig()
    data = dataclasses.replace(test, source=source, found=found, images=images, augment=augment)
    return data, Preprocessing(images, augment)


def _check_pixels(
    data: ImageData, preprocessing: Preprocessing, runtime: Runtime, *, of: str
) -> int:
    """Raises UserError where pixels part, and returns how many images were compared."""
    samples = take_samples(data, runtime, NUM_IMAGES)
    mean, std = (np.array(each, np.float32) for each in (data.images.mean, data.images.std))
    failed = []
    for index, encoded in enumerate(samples.encoded):
        name = samples.names[index]
        try:
            ours = preprocessing.pixels(tf.constant([encoded]))[0].numpy()
        except tf.errors.InvalidArgumentError as error:
            failed.append(name)
            why = error.message.splitlines()[0]
            log.warning("export: it will not decode the %s image %s (%s)", of, name, why)
            if len(failed) > max(1, DISAGREEMENT_LIMIT * len(samples)):
                raise UserError(
                    f"the {of} images {failed[0]} and {name} are read by the loader, but an export "
                    f"cannot decode them ({why}); convert them to JPEG or PNG of 8 bits"
                ) from error
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
    return len(samples)
