"""A trained model to files that need neither tfaccel nor DALI, and proof that they answer alike.

Takes a Keras model and a folder; gives, in that folder, a SavedModel, `model.keras` and
`tfaccel.json`. A fresh process loads the SavedModel with plain TensorFlow and answers what the
trained model is asked as well, before the folder appears.

    export_model(model, "exported/1", config=ExportConfig(), runtime=run.runtime, loader=test)
"""

import contextlib
import dataclasses
import logging
import math
import os
import pathlib

import keras
import numpy as np
import tensorflow as tf

from tfaccel import progress
from tfaccel.callbacks.ema import averages_of
from tfaccel.config import ExportConfig, ImageConfig
from tfaccel.copies import in_float32, without_training_state
from tfaccel.data.distribute import Loader
from tfaccel.data.images import ImageData
from tfaccel.errors import RunError, UserError
from tfaccel.export import card, onnx, parity, saved_model
from tfaccel.export.answers import answers_of
from tfaccel.export.parting import where_pixels_part
from tfaccel.export.preprocessing import Preprocessing
from tfaccel.export.samples import take_samples
from tfaccel.export.unfinished import keep_rejected, whole_or_not_at_all
from tfaccel.literal_path import warn_servers
from tfaccel.local_path import local_path
from tfaccel.run_log import summary
from tfaccel.runtime import Runtime
from tfaccel.step import in_xla

log = logging.getLogger("tfaccel")

MOST_BYTES = 2**31  # of all samples and all their answers
NUM_RANDOM = 32  # rows of random input, where no images are given


@progress.within("export")
def export_model(
    model: keras.Model,
    path: str | os.PathLike,
    *,
    config: ExportConfig,
    runtime: Runtime,
    loader: Loader | None = None,
    images=None,
) -> pathlib.Path:
    """Writes `path` whole or not at all, and proves it before it appears: see `Run.export`."""
    path = _new_path(path)
    if not isinstance(model, keras.Model):
        raise UserError(f"model={model!r}; expected the keras.Model that was trained")
    if config.onnx:
        onnx.check_installed()
    if not getattr(model, "inputs", None):
        raise UserError(
            f"model {model.name} has no known inputs; expected a functional or built Sequential "
            "model: start it with keras.Input(shape=...)"
        )
    precision = "float32" if config.computes_in == "float32" else parity.lowest_precision(model)
    if precision != "float32":
        summary(
            "export: it computes in %s, as it was trained; for servers without a GPU, which are "
            "slow in that, give computes_in='float32' (tfaccel export --computes-in=float32)",
            precision,
        )
    if config.xla and (reason := in_xla.of_layers(model)):
        summary("export: without XLA, because %s", reason)
        config = dataclasses.replace(config, xla=False)
    names = saved_model.input_names(model)
    surrounded = samples = given = None
    if loader is None:
        given = _random_inputs(model) if images is None else _checked(model, images)
    else:
        surrounded = _surrounded(model, loader, config.pixel_dtype)
        most = _affordable(config.samples, model, loader.data.images)
        samples = take_samples(loader.data, runtime, most)
    with _weights(model, config.weights), whole_or_not_at_all(path) as folder:
        single = in_float32(model) if config.onnx or config.computes_in == "float32" else None
        served = single if config.computes_in == "float32" else model
        saved_model.write(served, folder, surrounded, names=names, xla=config.xla)
        without_training_state(model).save(folder / "model.keras")
        if config.onnx:
            onnx.write(single, surrounded, folder / "model.onnx", names=names)
        if surrounded:
            proof = parity.of_images(folder, model, surrounded, samples)
        else:
            proof = parity.of_inputs(folder, model, given)
        for check in proof.checks:
            summary("export: %s: %s", check.name, check.words)
        by = loader.data.loader if loader else None
        card.write(folder, served, surrounded, proof, config, precision=precision, loader=by)
        if proof.failed:
            kept = keep_rejected(folder, path)
            _reject(proof, kept, _parted(proof, samples, loader, surrounded, runtime))
    warn_servers(path)
    summary("export: %s, by %d samples in a process without tfaccel and DALI", path, proof.num)
    return path


def _new_path(path: str | os.PathLike) -> pathlib.Path:
    path = local_path(path).absolute()
    if path.exists():
        raise UserError(f"export path {path} exists; give one that does not, or remove it")
    return path


def _surrounded(model: keras.Model, loader: Loader, pixel_dtype: str) -> saved_model.Images:
    """Returns what surrounds a model that takes what a loader of images gives."""
    if not isinstance(getattr(loader, "data", None), ImageData):
        raise UserError(
            "the loader gives what your own code makes, of which an export knows no preprocessing; "
            "leave it out, and give images=, a batch to compare on"
        )
    if len(model.inputs) != 1:
        raise UserError(
            f"model {model.name} has {len(model.inputs)} inputs, and the loader gives one image; "
            "leave it out, and give images=, a batch to compare on"
        )
    how = Preprocessing.of(loader.data)
    return saved_model.Images(how, answers_of(model, loader.data), pixel_dtype)


def _affordable(samples: int, model: keras.Model, images: ImageConfig) -> int:
    """Returns how many samples are compared, of images or masks that are very large."""
    image = (*images.image_size, images.channels)
    outputs = model.compute_output_shape((1, *image))
    most = max(1, MOST_BYTES // (4 * (math.prod(image) + 4 * math.prod(outputs))))
    if most < samples:
        summary("export: compared on %d samples, not %d, which would not fit", most, samples)
    return min(samples, most)


def _weights(model: keras.Model, which: str) -> contextlib.AbstractContextManager:
    return averages_of(model) if which == "average" else contextlib.nullcontext()


def _reject(proof: parity.Parity, kept: pathlib.Path, parted: str) -> None:
    """Raises RunError: what is wrong with an export, and where it is kept."""
    wrong = "; ".join(f"{each.name}: {each.words} (limit {each.limit:g})" for each in proof.failed)
    raise RunError(
        f"the export does not answer as the trained model does: {wrong}.{parted} It is not "
        f"exported, but kept in {kept}"
    )


def _parted(proof: parity.Parity, samples, loader, surrounded, runtime: Runtime) -> str:
    """Returns where the pixels part, in a sentence; nothing where they do not."""
    if all(each.name != "pixels" for each in proof.failed) or samples.source is None:
        return ""
    source, encoded = samples.source.taken(np.array([proof.worst])), samples.encoded[proof.worst]
    step = where_pixels_part(source, encoded, loader.data, surrounded.preprocessing, runtime)
    return f" They part in the {step}; the worst image is {samples.names[proof.worst]}."


def _checked(model: keras.Model, images) -> list[np.ndarray]:
    """Returns a batch that was given, an array for each of the model's inputs.

    Raises:
      UserError: it is not what the model takes.
    """
    given = [np.asarray(each) for each in tf.nest.flatten(images)]
    wanted = [(None, *each.shape[1:]) for each in model.inputs]
    shapes = [each.shape for each in given]
    fits = len(shapes) == len(wanted) and all(map(_matches, shapes, wanted))
    if not fits or len({shape[0] for shape in shapes}) != 1 or not shapes[0][0]:
        raise UserError(
            f"images= has {len(shapes)} arrays, {', '.join(map(str, shapes[:4]))}; model "
            f"{model.name} takes {', '.join(map(str, wanted))}, None for any number, which is the "
            "same of all and at least 1: give a batch as the model takes it"
        )
    return given


def _matches(shape: tuple, wanted: tuple) -> bool:
    return len(shape) == len(wanted) and all(
        size in (None, own) for size, own in zip(wanted, shape, strict=True)
    )


def _random_inputs(model) -> list[np.ndarray]:
    if any(None in each.shape[1:] for each in model.inputs):
        raise UserError(
            f"model {model.name} takes inputs of any size; give images=, a batch to compare on"
        )
    if any(each.dtype == "string" for each in model.inputs):
        raise UserError(f"model {model.name} takes text; give images=, a batch to compare on")
    random = np.random.default_rng(0)
    # Cast to whole numbers, this is a valid 0 or 1 for any vocabulary and any pixel.
    return [2 * random.random((NUM_RANDOM, *each.shape[1:])) for each in model.inputs]
