"""A trained model to files that need neither tfaccel nor DALI, and proof that they answer alike.

Takes a Keras model and a folder; gives, in that folder, a SavedModel, `model.keras` and
`tfaccel.json`. A fresh process loads the SavedModel with plain TensorFlow and answers what the
trained model is asked as well, before the folder appears.

    export_model(model, "exported/1", config=ExportConfig(), runtime=run.runtime, loader=test)
"""

import contextlib
import logging
import os
import pathlib
import shutil
import tempfile
from collections.abc import Iterator

import keras
import numpy as np
import tensorflow as tf

from tfaccel import progress
from tfaccel.callbacks.ema import averages_of
from tfaccel.config import ExportConfig
from tfaccel.data.distribute import Loader
from tfaccel.data.images import ImageData
from tfaccel.errors import RunError, UserError
from tfaccel.export import card, onnx, parity, saved_model
from tfaccel.export.answers import answers_of
from tfaccel.export.parting import where_pixels_part
from tfaccel.export.preprocessing import Preprocessing
from tfaccel.export.samples import take_samples
from tfaccel.runtime import Runtime

log = logging.getLogger("tfaccel")

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
    if config.onnx:
        onnx.check_installed()
    if not getattr(model, "inputs", None):
        raise UserError(
            f"model {model.name} has no known inputs; expected a functional or built Sequential "
            "model: start it with keras.Input(shape=...)"
        )
    if config.computes_in == "policy" and model.compute_dtype != "float32":
        log.info(
            "export: it computes in %s, as it was trained; for servers without a GPU, which are "
            "slow in that, give computes_in='float32'",
            model.compute_dtype,
        )
    surrounded = samples = None
    if loader is not None:
        surrounded = _surrounded(model, loader, config.pixel_dtype)
        samples = take_samples(loader.data, runtime, config.samples)
    with _weights(model, config.weights), _whole_or_not_at_all(path) as folder:
        served = _in_float32(model) if config.computes_in == "float32" else model
        saved_model.write(served, folder, surrounded, xla=config.xla)
        _without_training_state(model).save(folder / "model.keras")
        if config.onnx:
            onnx.write(_in_float32(model), surrounded, folder / "model.onnx")
        if surrounded:
            proof = parity.of_images(folder, model, surrounded, samples)
        else:
            given = _random_inputs(model) if images is None else tf.nest.flatten(images)
            proof = parity.of_inputs(folder, model, given)
        card.write(folder, served, surrounded, proof, config)
        if proof.failed:
            _reject(folder, path, proof, _parted(proof, samples, loader, surrounded, runtime))
    for check in proof.checks:
        log.info("export: %s: %s", check.name, check.words)
    log.info("export: %s, by %d samples in a process without tfaccel and DALI", path, proof.num)
    return path


def _new_path(path: str | os.PathLike) -> pathlib.Path:
    path = pathlib.Path(path).expanduser().absolute()
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


def _weights(model: keras.Model, which: str) -> contextlib.AbstractContextManager:
    return averages_of(model) if which == "average" else contextlib.nullcontext()


@contextlib.contextmanager
def _whole_or_not_at_all(path: pathlib.Path) -> Iterator[pathlib.Path]:
    """Within the context, a folder beside `path` is filled; it then has that name, or is gone."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        unfinished = pathlib.Path(tempfile.mkdtemp(prefix=f".{path.name}.", dir=path.parent))
    except OSError as error:
        raise UserError(
            f"export path {path} cannot be made ({error.strerror}); give another"
        ) from error
    try:
        unfinished.chmod(0o755)  # mkdtemp's 0700 would hide it from a server
        yield unfinished
        unfinished.rename(path)
    except (OSError, tf.errors.ResourceExhaustedError) as error:
        raise RunError(
            f"export path {path} cannot be written ({error}); make room, or give another"
        ) from error
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)  # it is there only after a failure


def _reject(folder: pathlib.Path, path: pathlib.Path, proof: parity.Parity, parted: str) -> None:
    """Gives an export a name that is no version, and raises what is wrong with it.

    Raises:
      RunError: always.
    """
    rejected = folder.rename(path.with_name(f"{folder.name[1:]}.rejected"))
    wrong = "; ".join(f"{each.name}: {each.words} (limit {each.limit:g})" for each in proof.failed)
    raise RunError(
        f"the export does not answer as the trained model does: {wrong}.{parted} It is not "
        f"exported, but kept in {rejected}"
    )


def _parted(proof: parity.Parity, samples, loader, surrounded, runtime: Runtime) -> str:
    """Returns where the pixels part, in a sentence; nothing where they do not."""
    if proof.failed[0].name != "pixels" or samples.source is None:
        return ""
    source, encoded = samples.source.taken(np.array([proof.worst])), samples.encoded[proof.worst]
    step = where_pixels_part(source, encoded, loader.data, surrounded.preprocessing, runtime)
    return f" They part in the {step}; the worst image is {samples.names[proof.worst]}."


def _without_training_state(model) -> keras.Model:
    """Returns a copy that plain Keras loads: not compiled, so without optimizer or loss of ours.

    Raises:
      UserError: it has a layer that its config does not make again.
    """
    try:
        copy = keras.models.clone_model(model)
    except (TypeError, ValueError) as error:
        raise UserError(
            f"model {model.name} cannot be made again from its config ({error}); register its own "
            "classes and functions by keras.saving.register_keras_serializable()"
        ) from error
    copy.set_weights(model.get_weights())
    return copy


def _in_float32(model) -> keras.Model:
    """Returns a copy of which every layer computes in float32."""

    def in_float32(layer):
        # Of Keras's operations, as `a + b`, no dtype is to be set; they take that of their inputs.
        own = {"dtype": "float32"} if isinstance(layer, keras.layers.Layer) else {}
        return type(layer).from_config(_policies_in_float32(layer.get_config()) | own)

    copy = keras.models.clone_model(model, clone_function=in_float32, recursive=True)
    copy.set_weights(model.get_weights())
    return copy


def _policies_in_float32(config):
    """Returns a layer's config with all dtype policies in float32: what it wraps has its own."""
    if isinstance(config, dict):
        if config.get("class_name") == "DTypePolicy":
            return "float32"
        return {name: _policies_in_float32(each) for name, each in config.items()}
    if isinstance(config, list):
        return [_policies_in_float32(each) for each in config]
    return config


def _random_inputs(model) -> list[np.ndarray]:
    if any(None in each.shape[1:] for each in model.inputs):
        raise UserError(
            f"model {model.name} takes inputs of any size; give images=, a batch to compare on"
        )
    random = np.random.default_rng(0)
    # Cast to whole numbers, this is a valid 0 or 1 for any vocabulary and any pixel.
    return [2 * random.random((NUM_RANDOM, *each.shape[1:])) for each in model.inputs]
