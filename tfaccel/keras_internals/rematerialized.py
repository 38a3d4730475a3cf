"""Tells which operations the calls of some layers add to a graph.

    calls = Calls()
    with calls.noted_in(layers):            # while a step is traced
        step(batch)
    calls.of(graph)                         # [[operation, ...], ...]

Layers that were made in a `keras.RematScope` are to be computed again in the backward pass. Keras
3.15 gives them to `tf.recompute_grad`, which raises an error in `fit`: it takes no keywords in a
traced function. So what Keras does with such layers is replaced.
"""

import contextlib
import functools
import math
from collections.abc import Callable, Iterator, Sequence

import keras
import tensorflow as tf
from keras.src.ops.operation import Operation

from tfaccel.keras_internals.copies import PLAIN
from tfaccel.keras_internals.graph_copies import current_graph
from tfaccel.keras_internals.moved import place_of_remat
from tfaccel.keras_internals.patching import patched, with_entry


class Calls:
    """The operations of calls, as far as they were added to a graph."""

    def __init__(self):
        """Starts with no call."""
        self._spans: list[tuple[tf.Graph, int, int]] = []

    def _noted(self, function: Callable, *, counts: Callable = lambda results: True) -> Callable:
        """Returns a function whose calls are noted if `counts` is true for their results."""

        @functools.wraps(function)
        def call(*args, **kwargs):
            graph = current_graph()
            begin = 0 if graph is None else len(graph.get_operations())
            results = function(*args, **kwargs)
            if graph is not None and counts(results):
                self._spans.append((graph, begin, len(graph.get_operations())))
            return results

        return call

    @contextlib.contextmanager
    def noted_in(self, layers: Sequence) -> Iterator[None]:
        """Within the context, calls of these layers and of those of a `RematScope` are noted."""
        with contextlib.ExitStack() as contexts:
            contexts.enter_context(_rematerialized_by(self._as_scope_says, self._noted))
            for each in layers:  # Keras does not track entries of __dict__
                contexts.enter_context(with_entry(each.__dict__, "call", self._noted(each.call)))
            yield

    def _as_scope_says(self, operation, function: Callable, *_args, **_kwargs) -> Callable:
        """Returns what is called in place of an operation's `call`, as its scope's mode says.

        A functional model in a scope is no call of its own. It would be computed again as a whole,
        and keep all activations while its gradients are computed. Its layers are.
        """
        mode = operation._remat_mode
        if not mode or mode.mode is None or type(operation) in PLAIN:
            return function
        if mode.mode == "activations":
            activation = getattr(operation, "activation", None)
            return function if activation is None else self._with_activation(operation, function)
        if mode.mode == "list_of_layers":
            return self._noted(function) if operation.name in mode.layer_names else function
        if mode.mode == "larger_than":
            is_larger = lambda results: _size(results) > mode.output_size_threshold  # noqa: E731
            return self._noted(function, counts=is_larger)
        return self._noted(function)

    def _with_activation(self, layer, function: Callable) -> Callable:
        @functools.wraps(function)
        def call(*args, **kwargs):
            with with_entry(layer.__dict__, "activation", self._noted(layer.activation)):
                return function(*args, **kwargs)

        return call

    def of(self, graph: tf.Graph) -> list[list[tf.Operation]]:
        """Returns the operations of each call in a graph; a call within another is part of it."""
        made = graph.get_operations()
        found, last = [], 0
        own = [(begin, end) for each, begin, end in self._spans if each is graph]
        for begin, end in sorted(own, key=lambda span: (span[0], -span[1])):
            if end > last:
                found.append(made[max(begin, last) : end])
                last = end
        return found


def without_remat() -> contextlib.AbstractContextManager:
    """Returns a context in which a `keras.RematScope` has no effect on what is traced."""
    return _rematerialized_by(lambda operation, function, *args, **kwargs: function, lambda f: f)


@contextlib.contextmanager
def _rematerialized_by(of_operation: Callable, of_function: Callable) -> Iterator[None]:
    """Within the context, operations and functions to be computed again are given to others.

    Args:
      of_operation: takes the place of `rematerialized_call` of Keras's operations and layers.
      of_function: takes the place of `keras.remat`, for TensorFlow.
    """
    method = lambda self, *args, **kwargs: of_operation(self, *args, **kwargs)  # noqa: E731
    with (
        patched(Operation, "rematerialized_call", method),
        patched(keras.layers.Layer, "rematerialized_call", method),
        patched(place_of_remat, "remat", of_function),
    ):
        yield


def _size(results) -> int:
    """Returns the number of elements of a row, as Keras counts them before a batch is known."""
    sizes = (each.shape[1:] for each in tf.nest.flatten(results) if tf.is_tensor(each))
    return sum(math.prod(each or 1 for each in shape) for shape in sizes)
