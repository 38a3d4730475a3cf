"""A model and what surrounds it as a SavedModel: the signatures that a server offers.

Takes the model, its preprocessing and its answers; writes the folder.

    write(model, folder, Images(preprocessing, answers))

Of images:
  serving_default  image [rows, height, width, channels], pixels in 0 to 255, to the answers
  predict_bytes    image_bytes [rows] string, JPEG or PNG files, to the answers and class names
  preprocess       the same files to the pixels that serving_default takes, uint8, and to what the
                   model itself sees, float32
Of any other model: serving_default, from its own inputs to its own outputs in float32, by
`input_names` and `outputs_by_name`.
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


@dataclasses.dataclass(frozen=True)
class Images:
    """What surrounds a model of images.

    Attributes:
      preprocessing: from files to its inputs.
      answers: from its outputs to what is answered.
      pixel_dtype: of the pixels that `serving_default` takes: "float32" or "uint8".
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
      folder: there, and empty.
      images: what surrounds it; None for the model alone.
      names: of the inputs of a model alone, in their order.
      xla: whether the model is compiled with XLA where it is served; decoding never is.
    """
    archive = keras.export.ExportArchive()
    # It finds the variables that its functions use, but no tables. Of a model that a strategy holds
    # it would write all weights twice: a replica's own, and the strategy's.
    for layer in layers_of(model, include_self=False):
        if layer.built and not layer.variables:
            archive.track(layer)
    for name, (function, signature) in _endpoints(model, images, names, xla=xla).items():
        archive.add_endpoint(name, function, input_signature=signature)
    archive.write_out(folder, verbose=False)


def pixels_to_answers(model: keras.Model, images: Images):
    """Returns the function that `serving_default` is, and its signature."""

    def answer(image):
        inputs = images.preprocessing.inputs(image)
        return images.answers(model(structured(model, [inputs]), training=False))

    size, channels = images.preprocessing.images.image_size, images.preprocessing.images.channels
    return answer, [tf.TensorSpec((None, *size, channels), images.pixel_dtype, name="image")]


def inputs_to_outputs(model: keras.Model, names: Sequence[str]):
    """Returns the function of the model alone, and its signature, which has these names."""

    def serve(*inputs):
        outputs = model(structured(model, inputs), training=False)
        return tf.nest.map_structure(lambda each: tf.cast(each, tf.float32), outputs)

    specs = [
        tf.TensorSpec((None, *each.shape[1:]), each.dtype, name=name)
        for each, name in zip(model.inputs, names, strict=True)
    ]
    return serve, specs


def input_names(model: keras.Model) -> list[str]:
    """Returns what a signature calls the model's inputs: "_" stands for what TensorFlow takes not.

    They are asked of the trained model: a copy's may be others, where Keras chose them.

    Raises:
      UserError: two become the same.
    """
    names = [
        re.sub(r"^(?![a-zA-Z])", "arg_", re.sub(r"\W", "_", each.name, flags=re.ASCII))
        for each in model.inputs
    ]
    if len(set(names)) < len(names):
        given = ", ".join(repr(each.name) for each in model.inputs)
        raise UserError(
            f"model {model.name} has inputs {given}, which a signature would call "
            f"{', '.join(names)}; give them names that differ in letters or digits"
        )
    return names


def outputs_by_name(outputs) -> dict[str, tf.Tensor]:
    """Returns a model's outputs by the names that a signature gives them."""
    if isinstance(outputs, dict):
        return outputs
    return {f"output_{i}": each for i, each in enumerate(tf.nest.flatten(outputs))}


def structured(model: keras.Model, inputs):
    """Returns the flat inputs as the model takes them: alone, or in its own list or dict."""
    if isinstance(model, keras.Sequential):
        return inputs[0]
    return tf.nest.pack_sequence_as(model.input, inputs)


def _endpoints(
    model, images: Images | None, names: Sequence[str], *, xla: bool
) -> dict[str, tuple]:
    """Returns each function and its signature by name; the first one is `serving_default`."""
    compiled = functools.partial(tf.function, jit_compile=True, autograph=False)
    if images is None:
        serve, specs = inputs_to_outputs(model, names)
        return {"serve": (compiled(serve) if xla else serve, specs)}
    answer, specs = pixels_to_answers(model, images)
    answer = compiled(answer) if xla else answer
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
