"""Turns a Keras model into facts, with one symbolic call that computes nothing.

Takes a functional, sequential or subclassed model; a model that is not built is built for the data.

    facts = read_model(model, data_specs=tf.TensorSpec((None, 28, 28, 1)))
"""

import contextlib
import dataclasses
import math
import re

import keras
import tensorflow as tf

from tfaccel.diagnostics.lint.facts import OUTSIDE, Data, Layer, Model, Output, Shape
from tfaccel.diagnostics.lint.read_data import shapes_of
from tfaccel.diagnostics.lint.trace import Call, Trace, traced
from tfaccel.keras_internals.layers import kernel_of, shapes_built_for
from tfaccel.keras_internals.one_replica import without_strategy
from tfaccel.keras_internals.variables import is_distributed
from tfaccel.training.own_scaling import of_other_pixels, of_raw_pixels, own_scaling

CONVOLUTIONS = ("Conv1D", "Conv2D", "Conv3D")
TRANSPOSED = tuple(f"{each}Transpose" for each in CONVOLUTIONS)
SAME_VALUE = ("Cast", "Identity")  # operations that pass a value on
LETTERS = re.compile(r"(\w+),(\w+)->(\w+)")


def read_model(
    model: keras.Model,
    *,
    data_specs=None,
    strategy: tf.distribute.Strategy | None = None,
) -> Model:
    """Returns the facts about a model.

    Args:
      model: any Keras model.
      data_specs: the specs of its inputs, nested as in the data, with the batch; None for no data.
      strategy: the strategy of the model's variables; None for none.
    """
    inputs = _own_inputs(model)
    if inputs is None:
        inputs = _first_layer_spec(model, data_specs)
    specs = data_specs if inputs is None else inputs
    if specs is None:
        return Model(
            name=model.name,
            fault="the model is not built, and the data does not tell a shape to build it for",
        )
    specs = tf.nest.map_structure(_with_any_batch, specs)
    seen = traced(model, specs, strategy=strategy)
    with without_strategy():
        # `run.compile` copies single variables to the replicas, but refuses such a model.
        is_outside = strategy is not None and model.distribute_strategy is not strategy
    outside = [each for each in model.variables if is_outside and not is_distributed(each)]
    return Model(
        name=model.name,
        layers=_layers(seen),
        inputs=() if inputs is None else shapes_of(inputs),
        outputs=_outputs(model, seen),
        outside_scope=tuple(each.path for each in outside),
        unknown=tuple(dict.fromkeys(each.kind for each in seen.calls if _is_unknown(each))),
        own_scaling=getattr(own_scaling(model), "name", None),
        fault=seen.fault,
    )


def with_pixels(read: Model, model: keras.Model, data: Data) -> Model:
    """Returns the facts with the model's needs for the data's pixels, if the pixels are known."""
    if data.pixel_range is None:
        return read
    return dataclasses.replace(
        read,
        raw=of_raw_pixels(model, data.pixel_range),
        other_pixels=of_other_pixels(model, data.pixel_range),
    )


def by_input_name(model: keras.Model, data_specs):
    """Returns the data's inputs as Keras passes them to the model.

    A functional model takes the inputs with its names from a dict, in its own order.
    """
    names = [each.name for each in _inputs(model)]
    if not isinstance(data_specs, dict) or not names or not set(names) <= set(data_specs):
        return data_specs
    if isinstance(getattr(model, "input", None), dict):
        return data_specs  # the keys are the model's
    return [data_specs[each] for each in names]


def _inputs(model: keras.Model) -> list[keras.KerasTensor]:
    """Returns a functional or sequential model's inputs, or [] for any other model."""
    with contextlib.suppress(AttributeError, ValueError):
        return list(model.inputs or ())
    return []


def _own_inputs(model: keras.Model):
    """Returns the specs that the model was built for, nested as it takes them, or None."""
    if not model.built:
        return None
    if inputs := _inputs(model):
        own = getattr(model, "input", None)  # of all other models: a sequential one has none
        return tf.nest.map_structure(_spec, inputs[0] if own is None else own)
    flat = [each for each in shapes_built_for(model) if isinstance(each, tuple) and len(each) > 1]
    if len(flat) != 1 or any(isinstance(size, tuple | list) for size in flat[0]):
        return None
    return tf.TensorSpec(flat[0], model.input_dtype)


def _first_layer_spec(model: keras.Model, data_specs) -> tf.TensorSpec | None:
    """Returns the input spec of a sequential model if only its first layer is built, or None."""
    first = model.layers[0] if isinstance(model, keras.Sequential) and model.layers else None
    axes = getattr(getattr(first, "input_spec", None), "axes", None)
    if not axes or not isinstance(data_specs, tf.TensorSpec):
        return None
    sizes = data_specs.shape.as_list()
    if len(sizes) <= max(map(abs, axes)):  # the data is not batched
        return None
    for axis, size in axes.items():
        sizes[axis] = size
    return tf.TensorSpec(sizes, data_specs.dtype)


def _spec(tensor: keras.KerasTensor) -> tf.TensorSpec:
    return tf.TensorSpec(tensor.shape, tensor.dtype)


def _with_any_batch(spec: tf.TensorSpec) -> tf.TensorSpec:
    return tf.TensorSpec((None, *spec.shape[1:]), spec.dtype)


# The trace as facts.


def _layers(seen: Trace) -> tuple[Layer, ...]:
    if seen.graph is None:
        return ()
    calls = seen.calls
    number = {op.name: index for index, op in enumerate(seen.graph.get_operations())}
    owners = {at: index for index, each in enumerate(calls) for at in range(each.begin, each.end)}
    results = {_source(each).name for each in tf.nest.flatten(seen.outputs)}
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
            momentum=_momentum(each.layer),
            unset_reverse_dtype=_unset_reverse_dtype(each),
        )
        for each in calls
    )


def _momentum(layer: keras.layers.Layer) -> float | None:
    is_trained = isinstance(layer, keras.layers.BatchNormalization) and layer.trainable
    return layer.momentum if is_trained else None


def _unset_reverse_dtype(call: Call) -> str | None:
    """Returns the logits' dtype in a reverse call of an embedding without a `reverse_dtype`.

    Earlier versions of KerasHub have a ReversibleEmbedding of their own, with the same attribute.
    """
    if getattr(call.layer, "reverse_dtype", "none such") is not None or not call.inputs:
        return None
    is_reverse = call.inputs[0].dtype.is_floating  # else they are ids
    is_quantized = getattr(call.layer, "quantization_mode", None) is not None
    return call.outputs[0].dtype.name if is_reverse and not is_quantized else None


def _outputs(model: keras.Model, seen: Trace) -> tuple[Output, ...]:
    tensors = tf.nest.flatten(seen.outputs)
    by_key = isinstance(seen.outputs, dict)
    names = sorted(seen.outputs) if by_key else getattr(model, "output_names", ())
    names = names if len(names) == len(tensors) else [None] * len(tensors)
    makers = {one.name: index for index, each in enumerate(seen.calls) for one in each.outputs}
    return tuple(
        Output(_shape(each), each.dtype.name, name, makers.get(_source(each).name))
        for each, name in zip(tensors, names, strict=True)
    )


def _is_unknown(call: Call) -> bool:
    """Returns whether a layer has a weight matrix but no known matrix product."""
    matrices = any(len(each.shape) > 1 for each in call.layer.weights)
    lookup = isinstance(call.layer, keras.layers.Embedding)
    return matrices and not lookup and "Depthwise" not in call.kind and not _product(call)


def _shape(tensor) -> Shape:
    return tuple(tensor.shape[1:]) if tensor.shape.rank else ()


def _source(tensor):
    """Returns the tensor that this value comes from, before casts."""
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
    """Returns the facts about a layer's matrix product, or {} if none is known."""
    layer, kind = call.layer, call.kind
    if not call.inputs or not call.outputs or not layer.built:
        return {}
    if isinstance(layer, keras.layers.RNN) and hasattr(layer, "units"):
        inputs = _shape(call.inputs[0])
        matrices = sum(math.prod(each.shape) for each in layer.weights if len(each.shape) == 2)
        return _product_facts(inputs[-1], layer.units, _positions(inputs[:-1]), matrices)
    kernel = kernel_of(layer)
    if kernel is None:
        return {}
    shape, outputs = tuple(kernel.shape), _shape(call.outputs[0])
    if isinstance(layer, keras.layers.Dense):
        return _product_facts(*shape, _positions(outputs[:-1]), math.prod(shape))
    if isinstance(layer, keras.layers.EinsumDense):
        return _einsum_product(layer, shape, outputs)
    if kind in TRANSPOSED:  # each input pixel is multiplied; the kernel is [..., out, in]
        pixels = _positions(_pixels(layer, _shape(call.inputs[0])))
        return _product_facts(shape[-1], shape[-2], pixels, math.prod(shape))
    if kind in CONVOLUTIONS or kind.startswith("SeparableConv"):
        return _product_facts(*shape[-2:], _positions(_pixels(layer, outputs)), math.prod(shape))
    return {}


def _pixels(layer, shape: Shape) -> Shape:
    """Returns the sizes of an image without its channels."""
    return shape[1:] if layer.data_format == "channels_first" else shape[:-1]


def _einsum_product(layer, shape: tuple, outputs: Shape) -> dict:
    letters = LETTERS.fullmatch(layer.equation.replace("...", "").replace(" ", ""))
    if not letters:
        return {}
    sizes = dict(zip(letters[2], shape, strict=True))
    columns = math.prod(size for name, size in sizes.items() if name in letters[3])
    rows = math.prod(shape) // max(1, columns)
    given = math.prod(each or 1 for each in outputs)
    return _product_facts(rows, columns, max(1, given // max(1, columns)), math.prod(shape))


def _product_facts(features_in, features_out, positions: int, weights: int) -> dict:
    return {
        "features_in": features_in,
        "features_out": features_out,
        "positions": positions,
        "multiplies": positions * weights,
    }


def _positions(sizes: Shape) -> int:
    """Returns the number of positions; a size that is not known counts as 1."""
    return math.prod(each or 1 for each in sizes)
