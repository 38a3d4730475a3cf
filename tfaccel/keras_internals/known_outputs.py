"""The shapes of a model's outputs, asked layer by layer, without a trace."""

import functools
from collections.abc import Callable

import keras
from keras.src.models.functional import Functional, unpack_singleton

from tfaccel.keras_internals.layers import layers_of

# Modules of Keras's layers that turn words or numbers into categories, by their last name.
OF_CATEGORIES = (
    "category_encoding",
    "discretization",
    "hashed_crossing",
    "hashing",
    "index_lookup",
    "text_vectorization",
)


def knowing_outputs(model, compute_output_spec: Callable) -> Callable:
    """Returns what can stand for Keras's function of a layer: of this model it may know the result.

    Keras traces the whole forward pass, and throws it away: 0.9 s of a ResNet-50, on a CPU. A graph
    of layers, for inputs as it was made for, is asked layer by layer: 0.04 s. (Not where a layer
    may tell another shape than it gives.)
    """

    @functools.wraps(compute_output_spec)
    def look_up(fn, *args, **kwargs):
        if fn is not model or type(model).call not in (Functional.call, keras.Sequential.call):
            return compute_output_spec(fn, *args, **kwargs)
        if not all(_tells_its_shape(each) for each in layers_of(model, include_self=False)):
            return compute_output_spec(fn, *args, **kwargs)
        graph = getattr(model, "_functional", model)  # None: a Sequential that is not built
        given, declared = keras.tree.flatten(args[0]), graph.inputs if graph else []
        shapes = [each if each is None else (None, *each.shape[1:]) for each in given]
        if shapes != [each.shape for each in declared]:
            return compute_output_spec(fn, *args, **kwargs)
        inputs = [
            keras.KerasTensor(each.shape, known.dtype)
            for each, known in zip(given, declared, strict=True)
        ]
        outputs = graph.compute_output_spec(keras.tree.pack_sequence_as(args[0], inputs))
        return unpack_singleton(outputs)  # as `call` does, which returns [y] as y

    return look_up


def _tells_its_shape(layer) -> bool:
    """Returns whether a layer gives the shape that it says it will give.

    TextVectorization(output_mode="multi_hot") says [rows, 1, words] of texts [rows, 1], and gives
    [rows, words] (Keras 3.15); what a user's own layer, or a Lambda, says need not be true either.
    """
    methods = type(layer).compute_output_shape, type(layer).compute_output_spec
    modules = [each.__module__ for each in methods]
    return not isinstance(layer, keras.layers.Lambda) and all(
        each.startswith("keras.src.") and each.rpartition(".")[2] not in OF_CATEGORIES
        for each in modules
    )
