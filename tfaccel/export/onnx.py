"""The exported model as an ONNX file, for runtimes without TensorFlow.

Takes the function that `serving_default` is; writes `model.onnx`. It computes in float32: of
bfloat16 onnxruntime loads nothing. (What decodes files is not in it: ONNX has no such operation.)

    write(model, images, folder / "model.onnx", names=input_names(model))

Its inputs and outputs have the signature's names. But ONNX knows one thing by a name: an output
that is called as an input is, as of a restoration, has SUFFIX behind it.

The libraries are the extra `onnx`.
"""

import importlib.util
import logging
import os
import pathlib
from collections.abc import Sequence

import keras
import numpy as np
import tensorflow as tf

from tfaccel.common.errors import UserError
from tfaccel.export.saved_model import Images, inputs_to_outputs, outputs_by_name, pixels_to_answers

OPSET = 18  # of ONNX 1.13, which onnxruntime has read since 1.14
LIBRARIES = ("tf2onnx", "onnx", "onnxruntime")
SUFFIX = "_output"


def check_installed() -> None:
    """Raises UserError unless what writes and checks ONNX is there."""
    missing = [each for each in LIBRARIES if importlib.util.find_spec(each) is None]
    if missing:
        raise UserError(
            f"{', '.join(missing)} is not installed, which ONNX needs; add the extra: uv run "
            "--extra onnx tfaccel ..., or pip install 'tfaccel[onnx]'"
        )


def write(
    model: keras.Model, images: Images | None, path: pathlib.Path, *, names: Sequence[str]
) -> None:
    """Writes the file.

    Args:
      model: that computes in float32.
      images: what surrounds it; None for the model alone.
      path: of the new file.
      names: of the inputs of a model alone, in their order.

    Raises:
      UserError: the model has an operation that ONNX has not, or of which tf2onnx does not know.
    """
    import onnx
    import tf2onnx

    logging.getLogger("tf2onnx").setLevel(logging.CRITICAL)  # what it cannot is said below
    # Its optimizer begins a session on every GPU, also on those that are not this run's, and would
    # take all their memory.
    os.environ.setdefault("TF_FORCE_GPU_ALLOW_GROWTH", "true")
    function, specs = (
        pixels_to_answers(model, images) if images else inputs_to_outputs(model, names)
    )
    named = _named(function, {each.name for each in specs})
    traced = tf.function(named, input_signature=specs, autograph=False)
    written, _ = tf2onnx.convert.from_function(
        traced, input_signature=specs, opset=OPSET, custom_op_handlers={"Erfc": (_erfc, [])}
    )
    # It leaves in what it does not know, and calls that a model.
    nodes = written.graph.node
    if unknown := {each.op_type for each in nodes if not onnx.defs.has(each.op_type, each.domain)}:
        raise UserError(
            f"model {model.name} has operations that ONNX or tf2onnx does not know: "
            f"{', '.join(sorted(unknown))}; export it without onnx, or build it of others"
        )
    onnx.save_model(written, path)


def _erfc(graph, node, name: str, arguments) -> None:
    """Makes 1 - erf of an erfc, as in Keras's gelu: ONNX has no erfc. See tf2onnx's handlers."""
    node.type = "Erf"
    one = graph.make_const(f"{name}/one", np.array(1, np.float32)).output[0]
    erf = node.output[0]
    graph.insert_new_node_on_output("Sub", erf, f"{name}/erfc", inputs=[one, erf])


def _named(function, input_names: set[str]):
    """Returns the function, which gives its outputs by name: those that a SavedModel gives them."""

    def call(*inputs):
        outputs = outputs_by_name(function(*inputs))
        return {
            f"{name}{SUFFIX}" if name in input_names else name: each
            for name, each in outputs.items()
        }

    return call
