"""A Keras model to plain facts, by one symbolic call: no batch is run.

Takes a functional, sequential or subclassed model; one that is not built is built for the data.

    facts = read_model(model, data_specs=(tf.TensorSpec((None, 28, 28, 1)),))

Private Keras names relied on: Layer._build_shapes_dict, Dense._kernel and those of its kin.
(The public `kernel` of these is the weights of LoRA's two small products, too.)
"""

import contextlib
import math
import re

import keras
import tensorflow as tf

from tfaccel.linter.facts import OUTSIDE, Layer, Model, Shape
from tfaccel.linter.trace import Call, Trace, traced
from tfaccel.seam import is_distributed

CONVOLUTIONS = ("Conv1D", "Conv2D", "Conv3D")
TRANSPOSED = tuple(f"{each}Transpose" for each in CONVOLUTIONS)
SAME_VALUE = ("Cast", "Identity")  # operations that only hand a value on
LETTERS = re.compile(r"(\w+),(\w+)->(\w+)")


def read_model(
    model: keras.Model,
    *,
    data_specs: tuple[tf.TensorSpec, ...] = (),
    strategy: tf.distribute.Strategy | None = None,
) -> Model:
    """Returns the facts of a model.

    Args:
      model: any Keras model.
      data_specs: of its inputs, as the data have them, batch included.
      strategy: that its variables should belong to; None for none.
    """
    inputs = _own_inputs(model)
    specs = inputs or data_specs
    if not specs:
        return Model(
            name=model.name, fault="it is not built, and the data say no shape to build for"
        )
    specs = tuple(tf.TensorSpec((None, *each.shape[1:]), each.dtype) for each in specs)
    seen = traced(model, specs)
    weights = [each for each in model.variables if strategy and not is_distributed(each)]
    return Model(
        name=model.name,
        layers=_layers(seen),
        inputs=tuple(tuple(each.shape[1:]) for each in inputs),
        outputs=tuple(_shape(each) for each in seen.outputs),
        output_dtypes=tuple(each.dtype.name for each in seen.outputs),
        outside_scope=tuple(each.path for each in weights),
        unknown=tuple(dict.fromkeys(each.kind for each in seen.calls if _is_unknown(each))),
        fault=seen.fault,
    )


def _own_inputs(model: keras.Model) -> tuple[tf.TensorSpec, ...]:
    """Returns what the model was built for, as far as it knows."""
    if not model.built:
        return ()
    with contextlib.suppress(AttributeError, ValueError):  # of a subclassed model
        return tuple(tf.TensorSpec(each.shape, each.dtype) for each in model.inputs or ())
    shapes = getattr(model, "_build_shapes_dict", None) or {}
    flat = [each for each in shapes.values() if isinstance(each, tuple) and len(each) > 1]
    if len(flat) != len(shapes) or any(isinstance(size, tuple | list) for size in sum(flat, ())):
        return ()
    return tuple(tf.TensorSpec(each, model.input_dtype) for each in flat)


# What was seen, as facts.


def _layers(seen: Trace) -> tuple[Layer, ...]:
    if seen.graph is None:
        return ()
    calls = seen.calls
    number = {op.name: index for index, op in enumerate(seen.graph.get_operations())}
    owners = {at: index for index, each in enumerate(calls) for at in range(each.begin, each.end)}
    results = {_source(each).name for each in seen.outputs}
    return tuple(
        Layer(
            name=each.layer.name,
            kind=each.kind,
            inputs=_shape(each.inputs[0]) if each.inputs else (),
            outputs=_shape(each.outputs[0]) if each.outputs else (),
            **_product(each),
            activation=_activation(each.layer),
            dtype="int8" if _is_int8(each.layer) else each.layer.compute_dtype,
            feeds=_feeds(each, number, owners),
            is_input=any(_source(one).op.type == "Placeholder" for one in each.inputs[:1]),
            is_output=any(one.name in results for one in each.outputs),
            padding=getattr(each.layer, "padding", None) if _is_convolution(each) else None,
            window=_window(each),
            channels_first=getattr(each.layer, "data_format", None) == "channels_first",
        )
        for each in calls
    )


def _is_unknown(call: Call) -> bool:
    """Whether it has a matrix of whose use nothing is known here."""
    matrices = any(len(each.shape) > 1 for each in call.layer.weights)
    lookup = isinstance(call.layer, keras.layers.Embedding)
    return matrices and not lookup and "Depthwise" not in call.kind and not _product(call)


def _shape(tensor) -> Shape:
    return tuple(tensor.shape[1:]) if tensor.shape.rank else ()


def _source(tensor):
    """Returns the tensor whose value this is, in another dtype perhaps."""
    while tensor.op.type in SAME_VALUE:
        tensor = tensor.op.inputs[0]
    return tensor


def _feeds(call: Call, number: dict, owners: dict) -> tuple[int, ...]:
    found, left = set(), list(call.outputs)
    while left:
        for op in left.pop().consumers():
            owner = owners.get(number.get(op.name), OUTSIDE)
            if owner == OUTSIDE and op.type in SAME_VALUE:
                left += op.outputs
            else:
                found.add(owner)
    return tuple(sorted(found))


def _activation(layer: keras.layers.Layer) -> str | None:
    activation = getattr(layer, "activation", None)
    if activation is not None:
        return getattr(activation, "__name__", type(activation).__name__)
    return "softmax" if isinstance(layer, keras.layers.Softmax) else None


def _is_int8(layer: keras.layers.Layer) -> bool:
    return getattr(layer, "quantization_mode", None) == "int8"


def _is_convolution(call: Call) -> bool:
    return call.kind in (*CONVOLUTIONS, *TRANSPOSED, "DepthwiseConv2D", "SeparableConv2D")


def _window(call: Call) -> tuple[int, ...]:
    if not _is_convolution(call):
        return ()
    sizes = zip(call.layer.kernel_size, call.layer.dilation_rate, strict=True)
    return tuple((size - 1) * dilation + 1 for size, dilation in sizes)


def _product(call: Call) -> dict:
    """Returns a layer's matrix product: its sides, rows for an example, and multiplications."""
    layer, kind = call.layer, call.kind
    if not call.inputs or not call.outputs or not layer.built:
        return {}
    if isinstance(layer, keras.layers.RNN) and hasattr(layer, "units"):
        inputs = _shape(call.inputs[0])
        matrices = sum(math.prod(each.shape) for each in layer.weights if len(each.shape) == 2)
        return _sides(inputs[-1], layer.units, _positions(inputs[:-1]), matrices)
    kernels = (getattr(layer, each, None) for each in ("pointwise_kernel", "_kernel", "kernel"))
    kernel = next((each for each in kernels if each is not None), None)
    if kernel is None:
        return {}
    shape, outputs = tuple(kernel.shape), _shape(call.outputs[0])
    if isinstance(layer, keras.layers.Dense):
        return _sides(*shape, _positions(outputs[:-1]), math.prod(shape))
    if isinstance(layer, keras.layers.EinsumDense):
        return _of_einsum(layer, shape, outputs)
    if kind in TRANSPOSED:  # each input pixel is multiplied, and the kernel is [..., out, in]
        pixels = _positions(_pixels(layer, _shape(call.inputs[0])))
        return _sides(shape[-1], shape[-2], pixels, math.prod(shape))
    if kind in CONVOLUTIONS or kind.startswith("SeparableConv"):
        return _sides(*shape[-2:], _positions(_pixels(layer, outputs)), math.prod(shape))
    return {}


def _pixels(layer, shape: Shape) -> Shape:
    """Returns an image's sides."""
    return shape[1:] if layer.data_format == "channels_first" else shape[:-1]


def _of_einsum(layer, shape: tuple, outputs: Shape) -> dict:
    letters = LETTERS.fullmatch(layer.equation.replace("...", "").replace(" ", ""))
    if not letters:
        return {}
    sizes = dict(zip(letters[2], shape, strict=True))
    columns = math.prod(size for name, size in sizes.items() if name in letters[3])
    rows = math.prod(shape) // max(1, columns)
    given = math.prod(each or 1 for each in outputs)
    return _sides(rows, columns, max(1, given // max(1, columns)), math.prod(shape))


def _sides(features_in, features_out, positions: int, weights: int) -> dict:
    return {
        "features_in": features_in,
        "features_out": features_out,
        "positions": positions,
        "multiplies": positions * weights,
    }


def _positions(sizes: Shape) -> int:
    """Returns how many places there are; a size that is not known counts once."""
    return math.prod(each or 1 for each in sizes)
