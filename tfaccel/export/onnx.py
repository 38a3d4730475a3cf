"""Writes the exported model as an ONNX file, for runtimes without TensorFlow.

`model.onnx` has the function of `serving_default`. It computes in float32, because onnxruntime does
not support bfloat16. (It cannot decode files: ONNX has no operation for that.)

    write(model, images, folder / "model.onnx", names=input_names(model))

Inputs and outputs have the signature's names. In ONNX an output cannot have the name of an input,
as in a model that restores images, so such an output gets the suffix "_output".

The libraries are in the extra `onnx`.
"""

import concurrent.futures
import functools
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
# The resizes that are written as products, and their flags.
_FLAGS = {
    "ScaleAndTranslate": ("antialias",),
    "ResizeBicubic": ("align_corners", "half_pixel_centers"),
    "ResizeArea": ("align_corners",),
}
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
        _WithoutCaptures(traced), input_signature=specs, opset=OPSET, custom_op_handlers=_handlers()
    )
    # tf2onnx leaves unknown operations in the model without an error.
    nodes = written.graph.node
    if unknown := {each.op_type for each in nodes if not onnx.defs.has(each.op_type, each.domain)}:
        hint = " (of images whose size is not fixed)" if unknown & _FLAGS.keys() else ""
        raise UserError(
            f"model {model.name} has operations that ONNX or tf2onnx does not support: "
            f"{', '.join(sorted(unknown))}{hint}; export it without onnx, or use other operations"
        )
    onnx.save_model(written, path)


class _WithoutCaptures:
    """A function whose captured tensors are no inputs of it.

    tf2onnx 1.17 freezes them like the variables, but then still asks for them as inputs: those of a
    `keras.layers.Normalization` with a mean, for example.
    """

    def __init__(self, function, num_inputs: int | None = None):
        """Takes a `tf.function`; or its concrete function and the number of its own inputs."""
        self._function, self._num_inputs = function, num_inputs

    def get_concrete_function(self, *signature):
        """Returns the concrete function, of which this stands before it, too."""
        concrete = self._function.get_concrete_function(*signature)
        return _WithoutCaptures(concrete, len(signature))

    @property
    def inputs(self) -> list:
        """The function's own inputs, and its variables, which tf2onnx leaves out."""
        given = self._function.inputs
        return given[: self._num_inputs]

    def __getattr__(self, name: str):
        """Returns any other attribute of the function."""
        return getattr(self._function, name)


def _handlers() -> dict[str, tuple]:
    """Returns what writes the operations that tf2onnx does not write, or writes wrongly."""
    resizing = {each: (_resize, []) for each in _FLAGS}
    return {"Erfc": (_erfc, []), **resizing}


def _erfc(graph, node, name: str, arguments) -> None:
    """Writes erfc, as in Keras's gelu, as 1 - erf: ONNX has no erfc. For tf2onnx's handlers."""
    node.type = "Erf"
    one = graph.make_const(f"{name}/one", np.array(1, np.float32)).output[0]
    erf = node.output[0]
    graph.insert_new_node_on_output("Sub", erf, f"{name}/erfc", inputs=[one, erf])


def _resize(graph, node, name: str, arguments) -> None:
    """Writes a resize of images [rows, height, width, channels] as two products with matrices.

    Every resize of TensorFlow is linear, along the height and then along the width. So TensorFlow's
    own resize of the identity matrix has the weights of all pixels. tf2onnx 1.17 does not write
    `ScaleAndTranslate` (antialiasing); onnxruntime refuses what it writes for `ResizeBicubic`, and
    answers otherwise for `ResizeArea`.
    """
    size, sides = (
        node.inputs[1].get_tensor_value(as_list=False),
        graph.get_shape(node.input[0])[1:3],
    )
    if min(sides) < 1:
        raise ValueError(f"{name}: the size of the images is open")  # `write` says what to do
    matrices = [_weights(node, side, int(size[axis]), axis) for axis, side in enumerate(sides)]
    image, shapes, dtypes = node.input[0], node.output_shapes, node.output_dtypes
    graph.remove_node(node.name)
    made = functools.partial(graph.make_node, domain="")
    down = graph.make_const(f"{name}/down", matrices[0])
    along = graph.make_const(f"{name}/along", matrices[1].T.copy())
    first = made("Transpose", [image], attr={"perm": [0, 3, 1, 2]})
    float32 = made("Cast", first.output, attr={"to": 1})
    lower = made("MatMul", [down.output[0], float32.output[0]])
    both = made("MatMul", [lower.output[0], along.output[0]])
    made(
        "Transpose",
        both.output,
        attr={"perm": [0, 2, 3, 1]},
        name=node.name,
        outputs=node.output,
        shapes=shapes,
        dtypes=dtypes,
    )


def _weights(node, side: int, new_side: int, axis: int) -> np.ndarray:
    """Returns the weights of a resize along one axis: [new_side, side] float32."""
    identity = np.eye(side, dtype=np.float32)[None, :, :, None]
    size = [new_side, side]  # the second axis stays as it is
    flags = {each: bool(node.get_attr_value(each, False)) for each in _FLAGS[node.type]}
    if node.type == "ScaleAndTranslate":
        # TensorFlow's resize divides the sizes in the graph; a constant is of another caller.
        ratio, move = node.inputs[2:]
        ratio = ratio.get_tensor_value()[axis] if ratio.is_const() else new_side / side
        kernel = node.get_attr_value("kernel_type", b"lanczos3").decode()
        flags |= {"scale": [ratio, 1.0], "kernel_type": kernel}
        flags |= {"translation": [move.get_tensor_value()[axis], 0.0]}
    with concurrent.futures.ThreadPoolExecutor(1) as thread:  # tf2onnx has a graph in this one
        return thread.submit(_resized, node.type, images=identity, size=size, **flags).result()


def _resized(operation: str, **arguments) -> np.ndarray:
    """Returns the only image and channel of a resize: [height, width]."""
    with tf.device("/cpu:0"):
        return getattr(tf.raw_ops, operation)(**arguments).numpy()[0, :, :, 0]
