"""What an export is asked for, checked: all that can be refused without the trained weights.

Takes a model and what `Run.export` takes; gives an Asked, which writes the files. The end of
training and its start (at_start.py) both come here, so that both refuse the same, in the same
words.

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
from tfaccel.export import onnx, parity, saved_model
from tfaccel.export.answers import answers_of
from tfaccel.export.known_inputs import called, with_inputs
from tfaccel.export.preprocessing import Preprocessing
from tfaccel.keras_internals.copies import check_made_again, in_float32, without_training_state
from tfaccel.keras_internals.model_view import losses_of
from tfaccel.step import in_xla
from tfaccel.training.callbacks.ema import check_averages

MOST_BYTES = 2**31  # of all samples and all their answers
NUM_RANDOM = 32  # rows of random input, where no images are given


@dataclasses.dataclass(frozen=True)
class Asked:
    """An export that nothing is known to be wrong with.

    Attributes:
      model: the one that is trained; around a subclassed one, a functional one that calls it.
      trained: the one that is trained.
      config: how it is exported.
      names: of the model's inputs, as a signature has them.
      precision: that the export computes in.
      images: what surrounds a model of images; None for the model alone.
      given: of a model alone, for each input the rows that it is compared on.
      notes: sentences about what was chosen, with the reason.
      keeps_keras: whether `model.keras` is written too: a subclassed model's config may not make it
        again.
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

    def write(self, folder: pathlib.Path) -> keras.Model:
        """Writes the SavedModel, `model.keras` and, if it is asked for, `model.onnx`.

        Args:
          folder: there, and empty.

        Returns:
          The model that the SavedModel holds: a copy where it computes in another precision.

        Raises:
          UserError: the model's config does not make it again, Keras or TensorFlow cannot write it,
            or ONNX lacks an operation of it.
          OSError, tf.errors.OpError: the folder cannot be written.
        """
        try:
            return self._write(folder)
        except (UserError, RunError, OSError, MemoryError, tf.errors.OpError):
            raise
        except Exception as error:  # whatever a layer's code, or its config as JSON, raises
            why = cleaned(str(error)).strip() or type(error).__name__
            raise UserError(
                f"model {self.model.name} cannot be written as a SavedModel and a .keras file "
                f"({why}); mend what its layers do with training=False, or what they save"
            ) from error

    def _write(self, folder: pathlib.Path) -> keras.Model:
        model, config = self.model, self.config
        copied = config.onnx or config.computes_in == "float32"
        # A subclassed model is refused by its own name: its copy's layers would stay as they are.
        single = in_float32(self.trained) if copied and not self._is_in_float32 else model
        served = single if config.computes_in == "float32" else model
        saved_model.write(served, folder, self.images, names=self.names, xla=config.xla)
        if self.keeps_keras:
            without_training_state(self.trained).save(folder / "model.keras")
        if config.onnx:
            onnx.write(single, self.images, folder / "model.onnx", names=self.names)
        return served

    @property
    def _is_in_float32(self) -> bool:
        """Whether a model that cannot be copied layer by layer need not be."""
        return self.model is not self.trained and parity.lowest_precision(self.model) == "float32"


def ask(
    model: keras.Model, config: ExportConfig, *, loader: Loader | None = None, images=None
) -> Asked:
    """Returns what is asked for, checked.

    Args:
      model: trained, or known to take what the loader or `images` give. With a loader, compiled.
      config: how it is exported.
      loader: that evaluates; None for the model alone.
      images: of a model alone, a batch to compare on; None for random input.

    Raises:
      UserError: as `Run.export`, but for the path and what only writing shows.
    """
    if config.onnx:
        onnx.check_installed()
    trained, (model, names) = model, check_model(model, loader=loader, images=images)
    precision = "float32" if config.computes_in == "float32" else parity.lowest_precision(model)
    notes = []
    if precision != "float32":
        notes.append(
            f"it computes in {precision}, as it was trained; for servers without a GPU, which are "
            "slow in that, give computes_in='float32' (tfaccel export --computes-in=float32)"
        )
    if config.xla and (reason := in_xla.of_layers(model)):
        notes.append(f"without XLA, because {reason}")
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
    return Asked(
        model,
        trained,
        config,
        names,
        precision,
        surrounded,
        given,
        notes,
        keeps_keras=not without_keras,
    )


def check_model(
    model: keras.Model, *, loader: Loader | None = None, images=None
) -> tuple[keras.Model, list[str]]:
    """Returns the model of known inputs, and what a signature calls them.

    Args:
      model: the trained one.
      loader: that gives what it takes; or None.
      images: a batch as it takes it; or None.

    Raises:
      UserError: it is no model, its inputs are not known, or two of them would be called the same.
    """
    if not isinstance(model, keras.Model):
        raise UserError(f"model={model!r}; expected the keras.Model that was trained")
    known = with_inputs(model, loader=loader, images=images)
    return known, saved_model.input_names(known)


def why_no_keras(trained: keras.Model, known: keras.Model) -> str | None:
    """Returns why a subclassed model has no `model.keras` in its export; None where it has one.

    Its SavedModel needs no config.
    """
    if known is trained:
        return None
    try:
        check_made_again(trained, lambda copy: called(copy, known.input))
    except UserError as error:
        # Of Keras's page, what the class itself said.
        why = cleaned(str(error.__cause__).rpartition("during deserialization:")[2]).strip()
        return (
            "it is a SavedModel alone, without model.keras, because Keras cannot make "
            f"{type(trained).__name__} again from its config ({why}); to have that file too, let "
            "__init__ take **kwargs and pass them to super().__init__, and let get_config() return "
            "all of its arguments"
        )
    return None


def new_path(path: str | os.PathLike) -> pathlib.Path:
    """Returns the absolute path of an export that is not there yet.

    Raises:
      UserError: it is there, or it is no local path.
    """
    path = local_path(path).absolute()
    if path.exists():
        raise UserError(f"export path {path} exists; give one that does not, or remove it")
    return path


def affordable(samples: int, model: keras.Model, images: ImageConfig) -> int:
    """Returns how many samples are compared, of images or masks that are very large."""
    image = (*images.image_size, images.channels)
    outputs = model.compute_output_shape((1, *image))
    most = max(1, MOST_BYTES // (4 * (math.prod(image) + 4 * math.prod(outputs))))
    if most < samples:
        summary("export: compared on %d samples, not %d, which would not fit", most, samples)
    return min(samples, most)


def _surrounded(
    model: keras.Model, trained: keras.Model, loader: Loader, pixel_dtype: str
) -> saved_model.Images:
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
    return saved_model.Images(
        how, answers_of(model, loader.data, losses=losses_of(trained)), pixel_dtype
    )


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
