"""A requested export, checked as far as possible without the trained weights.

`ask` takes a model and the arguments of `Run.export`, and returns an `Asked`, which writes the
files. Both the end of training and its start (at_start.py) call it, so both refuse the same exports
with the same messages.

    asked = ask(model, ExportConfig(), loader=test)
    asked.write(folder)
"""

import dataclasses
import math
import os
import pathlib

import keras
import numpy as np
import tensorflow as tf

from tfaccel.common.errors import RunError, UserError
from tfaccel.common.local_path import local_path
from tfaccel.common.run_log import summary
from tfaccel.common.tables import cleaned
from tfaccel.config import ExportConfig, ImageConfig
from tfaccel.data.distribute import Loader
from tfaccel.data.images import ImageData
from tfaccel.export import litert, onnx, parity, saved_model
from tfaccel.export.answers import answers_of
from tfaccel.export.known_inputs import called, with_inputs
from tfaccel.export.preprocessing import Preprocessing
from tfaccel.export.samples import Samples
from tfaccel.keras_internals.copies import check_made_again, in_float32, without_training_state
from tfaccel.keras_internals.model_view import losses_of
from tfaccel.keras_internals.rematerialized import without_remat
from tfaccel.step import in_xla
from tfaccel.training.callbacks.ema import check_averages

MOST_BYTES = 2**31  # for all samples and all their answers
NUM_RANDOM = 32  # rows of random input, if no images are given


@dataclasses.dataclass(frozen=True)
class Asked:
    """An export request that has passed all checks.

    Attributes:
      model: the trained model; for a subclassed model, a functional model that calls it.
      trained: the trained model.
      config: how to export it.
      names: the names of the model's inputs in a signature.
      precision: the precision that the export computes in.
      images: preprocessing and answers around a model of images; None for the model alone.
      given: for the model alone, the rows to compare on, for each input.
      notes: sentences that say what was chosen and why.
      keeps_keras: whether `model.keras` is written too. The config of a subclassed model may not
        rebuild it.
    """

    model: keras.Model
    trained: keras.Model
    config: ExportConfig
    names: list[str]
    precision: str
    images: saved_model.Images | None
    given: list[np.ndarray] | None
    notes: list[str]
    keeps_keras: bool = True

    def write(self, folder: pathlib.Path, inputs: parity.Arrays) -> keras.Model:
        """Writes the SavedModel, `model.keras` and, if requested, `model.onnx` and `model.tflite`.

        Args:
          folder: an empty folder.
          inputs: inputs of `serving_default` by name, on which "int8" is calibrated.

        Returns:
          The model in the SavedModel. It is a copy if it computes in another precision.

        Raises:
          UserError: the model's config does not rebuild it, Keras or TensorFlow cannot write it, or
            ONNX does not support one of its operations.
          OSError, tf.errors.OpError: the folder cannot be written.
        """
        try:
            with without_remat():
                return self._write(folder, inputs)
        except (UserError, RunError, OSError, MemoryError, tf.errors.OpError):
            raise
        except Exception as error:  # a layer's code or config may raise anything
            why = cleaned(str(error)).strip() or type(error).__name__
            raise UserError(
                f"model {self.model.name} cannot be written as a SavedModel and a .keras file "
                f"({why}); fix what its layers do with training=False, or what they save"
            ) from error

    def _write(self, folder: pathlib.Path, inputs: parity.Arrays) -> keras.Model:
        model, config = self.model, self.config
        copied = config.onnx or config.litert or config.computes_in == "float32"
        # This passes the trained model, so that a subclassed one is refused by its name. A copy of
        # the functional model around it would not change the layers inside.
        single = in_float32(self.trained) if copied and not self._is_in_float32 else model
        served = single if config.computes_in == "float32" else model
        saved_model.write(served, folder, self.images, names=self.names, xla=config.xla)
        if self.keeps_keras:
            without_training_state(self.trained).save(folder / "model.keras")
        if config.onnx:
            onnx.write(single, self.images, folder / "model.onnx", names=self.names)
        if config.litert:
            path, how = folder / "model.tflite", {"how": config.litert, "inputs": inputs}
            litert.write(single, self.images, path, names=self.names, **how)
        return served

    def question(self, samples: Samples | None) -> parity.Question:
        """Returns the inputs for the written export, with the trained model's answers to them."""
        if self.images:
            return parity.about_images(self.model, self.images, samples, self.config.litert)
        return parity.about_inputs(self.model, self.given, self.config.litert)

    @property
    def _is_in_float32(self) -> bool:
        """Whether the model computes in float32 without a copy; a subclassed one has no copy."""
        return self.model is not self.trained and parity.lowest_precision(self.model) == "float32"


def ask(
    model: keras.Model, config: ExportConfig, *, loader: Loader | None = None, images=None
) -> Asked:
    """Checks an export request, and returns it.

    Args:
      model: the trained model, or one whose inputs follow from the loader or `images`. With a
        loader, the model must be compiled.
      config: how to export it.
      loader: a loader for evaluation; None for the model alone.
      images: for the model alone, a batch to compare on; None for random input.

    Raises:
      UserError: as for `Run.export`, except for the path and for faults that only writing shows.
    """
    if config.onnx:
        onnx.check_installed()
    trained, (model, names) = model, check_model(model, loader=loader, images=images)
    precision = "float32" if config.computes_in == "float32" else parity.lowest_precision(model)
    notes = []
    if precision != "float32":
        notes.append(
            f"the export computes in {precision}, as in training, which is slow on servers without "
            "a GPU; for those use computes_in='float32' (tfaccel export --computes-in=float32)"
        )
    if config.xla and (reason := in_xla.of_layers(model)):
        notes.append(f"XLA is off, because {reason}")
        config = dataclasses.replace(config, xla=False)
    if config.weights == "average":
        check_averages(trained)
    without_keras = why_no_keras(trained, model)
    if without_keras:
        notes.append(without_keras)
    surrounded = given = None
    if loader is None:
        given = _random_inputs(model) if images is None else _checked(model, images)
    else:
        surrounded = _surrounded(model, trained, loader, config.pixel_dtype)
        if not surrounded.preprocessing.takes_files:
            notes.append(
                "the SavedModel takes pixels and no files (serving_default alone), because "
                "TensorFlow decodes neither TIFF nor .npy files, nor arrays; tfaccel predict reads "
                "such files itself"
            )
    keeps_keras = without_keras is None
    return Asked(model, trained, config, names, precision, surrounded, given, notes, keeps_keras)


def check_model(
    model: keras.Model, *, loader: Loader | None = None, images=None
) -> tuple[keras.Model, list[str]]:
    """Returns the model with known inputs, and the inputs' names in a signature.

    The inputs may follow from a loader of them, or from a batch of them, `images`.

    Raises:
      UserError: it is not a model, its inputs are not known, or two inputs would have one name.
    """
    if not isinstance(model, keras.Model):
        raise UserError(f"model={model!r}; expected the keras.Model that was trained")
    known = with_inputs(model, loader=loader, images=images)
    return known, saved_model.input_names(known)


def why_no_keras(trained: keras.Model, known: keras.Model) -> str | None:
    """Returns why the export of a subclassed model lacks `model.keras`; None if it has the file.

    The SavedModel does not need a config.
    """
    if known is trained:
        return None
    try:
        check_made_again(trained, lambda copy: called(copy, known.input))
    except UserError as error:
        # Keras's message is a page long; this is the part that the class itself raised.
        why = cleaned(str(error.__cause__).rpartition("during deserialization:")[2]).strip()
        return (
            "the export has a SavedModel but no model.keras, because Keras cannot rebuild "
            f"{type(trained).__name__} from its config ({why}); to get that file too, let __init__ "
            "take **kwargs and pass them to super().__init__, and let get_config() return all of "
            "its arguments"
        )
    return None


def new_path(path: str | os.PathLike) -> pathlib.Path:
    """Returns the absolute path of a new export.

    Raises:
      UserError: the path exists, or it is not a local path.
    """
    path = local_path(path).absolute()
    if path.exists():
        raise UserError(f"export path {path} exists; use a new path, or remove it")
    return path


def affordable(samples: int, model: keras.Model, images: ImageConfig) -> int:
    """Returns how many samples to compare: fewer than `samples` if images are very large."""
    image = (*images.image_size, images.channels)
    outputs = model.compute_output_shape((1, *image))
    most = max(1, MOST_BYTES // (4 * (math.prod(image) + 4 * math.prod(outputs))))
    if most < samples:
        summary("export: compared on %d samples; %d need too much memory", most, samples)
    return min(samples, most)


def _surrounded(
    model: keras.Model, trained: keras.Model, loader: Loader, pixel_dtype: str
) -> saved_model.Images:
    """Returns the preprocessing and answers for a model of a loader's images."""
    if not isinstance(getattr(loader, "data", None), ImageData):
        raise UserError(
            "the loader runs your own code, so its preprocessing cannot be exported; remove "
            "loader=, and use images=, a batch to compare on"
        )
    if len(model.inputs) != 1:
        raise UserError(
            f"model {model.name} has {len(model.inputs)} inputs, but the loader gives one image; "
            "remove loader=, and use images=, a batch to compare on"
        )
    how = Preprocessing.of(loader.data)
    stored = how.images.pixel_dtype
    if pixel_dtype not in ("float32", stored):
        raise UserError(
            f"pixel_dtype={pixel_dtype!r} of the export, but the images have pixels of {stored}; "
            "use pixel_dtype='float32', which takes the same numbers as float32"
        )
    return saved_model.Images(
        how, answers_of(model, loader.data, losses=losses_of(trained)), pixel_dtype
    )


def _checked(model: keras.Model, images) -> list[np.ndarray]:
    """Returns the batch `images` as one array for each of the model's inputs.

    Raises:
      UserError: the batch does not have the shapes of the inputs.
    """
    given = [np.asarray(each) for each in tf.nest.flatten(images)]
    wanted = [(None, *each.shape[1:]) for each in model.inputs]
    shapes = [each.shape for each in given]
    fits = len(shapes) == len(wanted) and all(map(_matches, shapes, wanted))
    if not fits or len({shape[0] for shape in shapes}) != 1 or not shapes[0][0]:
        raise UserError(
            f"images= has {len(shapes)} arrays, {', '.join(map(str, shapes[:4]))}, but model "
            f"{model.name} takes {', '.join(map(str, wanted))} (None is the number of rows, at "
            "least 1 and equal for all inputs); give one batch of the model's inputs"
        )
    return given


def _matches(shape: tuple, wanted: tuple) -> bool:
    return len(shape) == len(wanted) and all(
        size in (None, own) for size, own in zip(wanted, shape, strict=True)
    )


def _random_inputs(model) -> list[np.ndarray]:
    if any(None in each.shape[1:] for each in model.inputs):
        raise UserError(
            f"model {model.name} takes inputs of any size; use images=, a batch to compare on"
        )
    if any(each.dtype == "string" for each in model.inputs):
        raise UserError(f"model {model.name} takes text; use images=, a batch to compare on")
    random = np.random.default_rng(0)
    # Cast to an integer, this is 0 or 1, which is valid for any vocabulary and any pixel.
    return [2 * random.random((NUM_RANDOM, *each.shape[1:])) for each in model.inputs]
