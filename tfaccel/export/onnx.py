"""Writes the exported model as an ONNX file, for runtimes without TensorFlow.

`model.onnx` has the function of `serving_default`. It computes in float32, because onnxruntime does
not support bfloat16. (It cannot decode files: ONNX has no operation for that.)

    write(model, images, folder / "model.onnx", names=input_names(model))

Inputs and outputs have the signature's names. In ONNX an output cannot have the name of an input,
as in a model that restores images, so such an output gets the suffix "_output".

The libraries are in the extra `onnx`.
"""

import logging
import os
import pathlib
from collections.abc import Sequence

import keras
import numpy as np
import tensorflow as tf

from tfaccel.common.errors import UserError
from tfaccel.common.extras import how_to_add, is_installed
from tfaccel.export.saved_model import Images, outputs_apart

OPSET = 18  # of ONNX 1.13; onnxruntime supports it since 1.14
LIBRARIES = ("tf2onnx", "onnx", "onnxruntime")


def check_installed() -> None:
    """Raises UserError if the libraries that write and check ONNX are not installed."""
    missing = [each for each in LIBRARIES if not is_installed(each)]
    if missing:
        raise UserError(
            f"{', '.join(missing)} is not installed, but ONNX needs it; add the extra: "
            f"{how_to_add('onnx')}"
        )


def write(
    model: keras.Model, images: Images | None, path: pathlib.Path, *, names: Sequence[str]
) -> None:
    """Writes the file.

    Args:
      model: a model that computes in float32.
      images: preprocessing and answers around it; None for the model alone.
      path: the path of the new file.
      names: for the model alone, the names of its inputs in their order.

    Raises:
      UserError: ONNX or tf2onnx does not support an operation of the model.
    """
    import onnx
    import tf2onnx

    logging.getLogger("tf2onnx").setLevel(logging.CRITICAL)  # the error below says what failed
    # Its optimizer starts a session on every GPU, also on GPUs that this run does not use. The
    # session would take all their memory.
    os.environ.setdefault("TF_FORCE_GPU_ALLOW_GROWTH", "true")
    function, specs = outputs_apart(model, images, names)
    traced = tf.function(function, input_signature=specs, autograph=False)
    written, _ = tf2onnx.convert.from_function(
        traced, input_signature=specs, opset=OPSET, custom_op_handlers={"Erfc": (_erfc, [])}
    )
    # tf2onnx leaves unknown operations in the model without an error.
    nodes = written.graph.node
    if unknown := {each.op_type for each in nodes if not onnx.defs.has(each.op_type, each.domain)}:
        raise UserError(
            f"model {model.name} has operations that ONNX or tf2onnx does not support: "
            f"{', '.join(sorted(unknown))}; export it without onnx, or use other operations"
        )
    onnx.save_model(written, path)


def _erfc(graph, node, name: str, arguments) -> None:
    """Writes erfc, as in Keras's gelu, as 1 - erf: ONNX has no erfc. For tf2onnx's handlers."""
    node.type = "Erf"
    one = graph.make_const(f"{name}/one", np.array(1, np.float32)).output[0]
    erf = node.output[0]
    graph.insert_new_node_on_output("Sub", erf, f"{name}/erfc", inputs=[one, erf])
