"""Finds the shapes of a model's outputs from its layers, without tracing the forward pass."""

import functools
from collections.abc import Callable

import keras
from keras.src.models.functional import Functional, unpack_singleton

from tfaccel.keras_internals.layers import layers_of

# The last names of Keras's modules with layers that turn words or numbers into categories.
OF_CATEGORIES = (
    "category_encoding",
    "discretization",
    "hashed_crossing",
    "hashing",
    "index_lookup",
    "text_vectorization",
)


def knowing_outputs(model, compute_output_spec: Callable) -> Callable:
    """Returns a replacement of Keras's `compute_output_spec` that knows the outputs of this model.

    Keras traces the whole forward pass and drops the result, which takes 0.9 s for a ResNet-50 on a
    CPU. The replacement asks each layer of the graph instead, which takes 0.04 s. It does so only
    if the inputs have the shapes that the graph was made for, and if no layer may return another
    shape than it reports.
    """

    @functools.wraps(compute_output_spec)
    def look_up(fn, *args, **kwargs):
        if fn is not model or type(model).call not in (Functional.call, keras.Sequential.call):
            return compute_output_spec(fn, *args, **kwargs)
        if not all(_tells_its_shape(each) for each in layers_of(model, include_self=False)):
            return compute_output_spec(fn, *args, **kwargs)
        graph = getattr(model, "_functional", model)  # None if a Sequential is not built
        given, declared = keras.tree.flatten(args[0]), graph.inputs if graph else []
        shapes = [each if each is None else (None, *each.shape[1:]) for each in given]
        if shapes != [each.shape for each in declared]:
            return compute_output_spec(fn, *args, **kwargs)
        inputs = [
            keras.KerasTensor(each.shape, known.dtype)
            for each, known in zip(given, declared, strict=True)
        ]
        outputs = graph.compute_output_spec(keras.tree.pack_sequence_as(args[0], inputs))
        return unpack_singleton(outputs)  # `call` returns [y] as y, too

    return look_up


def _tells_its_shape(layer) -> bool:
    """Returns whether a layer returns the shape that it reports.

    TextVectorization(output_mode="multi_hot") reports [rows, 1, words] for texts [rows, 1], but
    returns [rows, words] (Keras 3.15). A Lambda or your own layer may report a wrong shape, too.
    """
    methods = type(layer).compute_output_shape, type(layer).compute_output_spec
    modules = [each.__module__ for each in methods]
    return not isinstance(layer, keras.layers.Lambda) and all(
        each.startswith("keras.src.") and each.rpartition(".")[2] not in OF_CATEGORIES
        for each in modules
    )
