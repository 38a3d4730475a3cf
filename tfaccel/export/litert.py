"""Writes the exported model as a LiteRT file, for phones and small devices.

`model.tflite` has the function of `serving_default`, from pixels to answers. It cannot decode
files.

    write(model, images, folder / "model.tflite", names=names, how="int8", inputs=inputs)

The weights are float32 or float16, or 8-bit integers. With "int8" the layers compute in integers,
too. The ranges of their values are those that occur for some inputs (post-training quantization of
https://ai.google.dev/edge/litert/conversion/tensorflow/quantization/post_training_quantization).
Inputs and outputs stay as they are. They have the signature's names. An output with the name of an
input gets the suffix "_output", as in ONNX.
"""

import pathlib
from collections.abc import Iterator, Sequence

import keras
import numpy as np
import tensorflow as tf

from tfaccel.common.errors import UserError
from tfaccel.export.saved_model import Images, outputs_apart

CALIBRATED_BY = 100  # inputs at most, one by one


def write(
    model: keras.Model,
    images: Images | None,
    path: pathlib.Path,
    *,
    names: Sequence[str],
    how: str,
    inputs: dict[str, np.ndarray],
) -> None:
    """Writes the file.

    Args:
      model: a model that computes in float32.
      images: preprocessing and answers around it; None for the model alone.
      path: the path of the new file.
      names: for the model alone, the names of its inputs in their order.
      how: one of config.LITERT.
      inputs: inputs of the signature by name, [rows, ...] each, for "int8".

    Raises:
      UserError: LiteRT does not support an operation of the model.
    """
    function, specs = outputs_apart(model, images, names)
    weights = [(each, each.numpy()) for each in model.variables]

    def of_constants(*given):
        # LiteRT's calibration does not initialize variables.
        values = [(each, tf.constant(value)) for each, value in weights]
        with keras.StatelessScope(state_mapping=values):
            return function(*given)

    module = tf.Module()
    module.traced = tf.function(of_constants, input_signature=specs, autograph=False)
    converter = tf.lite.TFLiteConverter.from_concrete_functions(
        [module.traced.get_concrete_function()], module
    )
    if how != "float32":
        converter.optimizations = [tf.lite.Optimize.DEFAULT]
    if how == "float16":
        converter.target_spec.supported_types = [tf.float16]
    if how == "int8":
        kinds = tf.lite.OpsSet
        converter.target_spec.supported_ops = [kinds.TFLITE_BUILTINS_INT8, kinds.TFLITE_BUILTINS]
        converter.representative_dataset = lambda: _one_by_one(inputs, specs)
    try:
        written = converter.convert()
    except Exception as error:  # of several kinds, and of C++'s
        raise UserError(
            f"model {model.name} cannot be written for LiteRT ({_why(error)}); export it without "
            "litert, or use other operations"
        ) from error
    path.write_bytes(written)


def _one_by_one(
    inputs: dict[str, np.ndarray], specs: Sequence[tf.TensorSpec]
) -> Iterator[list[np.ndarray]]:
    num_rows = min(CALIBRATED_BY, len(next(iter(inputs.values()))))
    for row in range(num_rows):
        yield [inputs[each.name][row : row + 1].astype(each.dtype.as_numpy_dtype) for each in specs]


def _why(error: Exception) -> str:
    """Returns the line of an error that says what failed."""
    lines = [each.strip() for each in str(error).splitlines() if each.strip()]
    # Operations that LiteRT lacks, or that only TensorFlow's runtime beside it has.
    told = [each for each in lines if each.startswith(("Custom ops:", "Flex ops:"))]
    return (told or lines or [type(error).__name__])[0][:300]
