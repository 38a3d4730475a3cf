"""Writes a model, its preprocessing and its answers as a SavedModel with signatures for a server.

    write(model, folder, Images(preprocessing, answers), names=input_names(model), xla=True)

The signatures of a model of images:

  serving_default  from image [rows, height, width, channels], pixels in 0 to 255, to the answers
  predict_bytes    from image_bytes [rows] string, JPEG or PNG files, to the answers and class names
  preprocess       from the same files to the uint8 pixels that serving_default takes, and to the
                   float32 inputs of the model itself

Images of other than 8 bits, or of other than 1 or 3 channels, have their own range and dtype. If
their files are not all PNG, only serving_default is written, as TensorFlow cannot decode them.

Any other model has only serving_default, from its own inputs to its own outputs in float32, named
by `input_names` and `outputs_by_name`.
"""

import dataclasses
import functools
import pathlib
import re
from collections.abc import Sequence

import keras
import tensorflow as tf

from tfaccel.common.errors import UserError
from tfaccel.export.answers import Answers
from tfaccel.export.preprocessing import Preprocessing
from tfaccel.keras_internals.layers import layers_of

SUFFIX = "_output"  # of an output's name, in a format whose inputs and outputs share their names


@dataclasses.dataclass(frozen=True)
class Images:
    """The functions around a model of images.

    Attributes:
      preprocessing: from files to the model's inputs.
      answers: from the model's outputs to the answers.
      pixel_dtype: the dtype of the pixels that `serving_default` takes: "float32", "uint8" or
        "uint16".
    """

    preprocessing: Preprocessing
    answers: Answers
    pixel_dtype: str = "float32"


def write(
    model: keras.Model,
    folder: pathlib.Path,
    images: Images | None,
    *,
    names: Sequence[str],
    xla: bool,
) -> None:
    """Writes the SavedModel.

    Args:
      model: built, functional or Sequential.
      folder: an empty folder.
      images: the functions around the model; None for the model alone.
      names: for the model alone, the names of its inputs in their order.
      xla: whether the served model is compiled with XLA; decoding never is.
    """
    archive = keras.export.ExportArchive()
    # The archive finds the variables that its functions use, but no tables, so track layers without
    # variables. If it tracked the whole model of a strategy, it would write all weights twice: the
    # replica's and the strategy's.
    for layer in layers_of(model, include_self=False):
        if layer.built and not layer.variables:
            archive.track(layer)
    for name, (function, signature) in _endpoints(model, images, names, xla=xla).items():
        archive.add_endpoint(name, function, input_signature=signature)
    archive.write_out(folder, verbose=False)


def pixels_to_answers(model: keras.Model, images: Images):
    """Returns the function of `serving_default` for images, and its signature."""

    def answer(image):
        inputs = images.preprocessing.inputs(image)
        return images.answers(model(structured(model, [inputs]), training=False))

    size, channels = images.preprocessing.images.image_size, images.preprocessing.images.channels
    return answer, [tf.TensorSpec((None, *size, channels), images.pixel_dtype, name="image")]


def inputs_to_outputs(model: keras.Model, names: Sequence[str]):
    """Returns the function of the model alone, and its signature with these names."""

    def serve(*inputs):
        outputs = model(structured(model, inputs), training=False)
        return tf.nest.map_structure(lambda each: tf.cast(each, tf.float32), outputs)

    specs = [
        tf.TensorSpec((None, *each.shape[1:]), each.dtype, name=name)
        for each, name in zip(model.inputs, names, strict=True)
    ]
    return serve, specs


def input_names(model: keras.Model) -> list[str]:
    """Returns the inputs' names in a signature, with "_" for characters that TensorFlow refuses.

    Pass the trained model: if Keras chose the names, a copy of the model may have others.

    Raises:
      UserError: two inputs would have the same name.
    """
    names = [
        re.sub(r"^(?![a-zA-Z])", "arg_", re.sub(r"\W", "_", each.name, flags=re.ASCII))
        for each in model.inputs
    ]
    if len(set(names)) < len(names):
        given = ", ".join(repr(each.name) for each in model.inputs)
        raise UserError(
            f"model {model.name} has inputs {given}, whose names in a signature would be "
            f"{', '.join(names)}; give them names that differ in letters or digits"
        )
    return names


def outputs_by_name(outputs) -> dict[str, tf.Tensor]:
    """Returns a model's outputs by their names in a signature."""
    if isinstance(outputs, dict):
        return outputs
    return {f"output_{i}": each for i, each in enumerate(tf.nest.flatten(outputs))}


def outputs_apart(model: keras.Model, images: Images | None, names: Sequence[str]):
    """Returns the function of `serving_default` and its signature, with its outputs by name.

    None of these is the name of an input, because some formats have one set of names.

    Args:
      model: built, functional or Sequential.
      images: preprocessing and answers around it; None for the model alone.
      names: for the model alone, the names of its inputs in their order.
    """
    function, specs = (
        pixels_to_answers(model, images) if images else inputs_to_outputs(model, names)
    )
    input_names = {each.name for each in specs}

    def call(*inputs):
        outputs = outputs_by_name(function(*inputs))
        return {
            f"{name}{SUFFIX}" if name in input_names else name: each
            for name, each in outputs.items()
        }

    return call, specs


def structured(model: keras.Model, inputs):
    """Returns flat inputs in the model's structure: one input alone, or its list or dict."""
    if isinstance(model, keras.Sequential):
        return inputs[0]
    return tf.nest.pack_sequence_as(model.input, inputs)


def _endpoints(
    model, images: Images | None, names: Sequence[str], *, xla: bool
) -> dict[str, tuple]:
    """Returns each function and its signature by name. Keras makes the first `serving_default`."""
    compiled = functools.partial(tf.function, jit_compile=True, autograph=False)
    if images is None:
        serve, specs = inputs_to_outputs(model, names)
        return {"serve": (compiled(serve) if xla else serve, specs)}
    answer, specs = pixels_to_answers(model, images)
    answer = compiled(answer) if xla else answer
    if not images.preprocessing.takes_files:
        return {"serve": (answer, specs)}
    preprocessing, (pixels,) = images.preprocessing, specs

    def predict_bytes(image_bytes):
        window = tf.cast(preprocessing.pixels(image_bytes), pixels.dtype)
        return images.answers.named(answer(window))

    def preprocess(image_bytes):
        window = preprocessing.pixels(image_bytes)
        return {"pixels": window, "inputs": preprocessing.inputs(window)}

    files = [tf.TensorSpec((None,), tf.string, name="image_bytes")]
    return {
        "serve": (answer, specs),
        "predict_bytes": (predict_bytes, files),
        "preprocess": (preprocess, files),
    }
