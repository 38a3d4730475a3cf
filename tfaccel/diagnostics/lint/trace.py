"""Records one symbolic call of a Keras model: the inputs and outputs of each layer.

Takes a model and the specs of its inputs; returns the calls of its leaf layers, and the graph.

    trace = traced(model, tf.TensorSpec((None, 28, 28, 1)))

Keras 3.15 looks up `call`, or `quantized_call`, on the layer each time that it calls the layer.
"""

import contextlib
import dataclasses
from collections.abc import Iterator

import keras
import tensorflow as tf

from tfaccel.common.tables import cleaned
from tfaccel.keras_internals.layers import layers_held, layers_of


@dataclasses.dataclass
class Call:
    """One call of a leaf layer, with its tensors in the graph."""

    layer: keras.layers.Layer
    inputs: list
    outputs: list
    begin: int  # the index of its first operation in the graph; `end` is after the last one
    end: int

    @property
    def kind(self) -> str:
        """The layer's class."""
        return type(self.layer).__name__


@dataclasses.dataclass
class Trace:
    """The result of a symbolic call.

    Attributes:
      calls: the calls of the leaf layers, in order.
      graph: the graph of all operations; None if the call did not start.
      outputs: the tensors of the model's outputs, nested as they are; empty if the call failed.
      fault: why the call failed, in words; None if it did not.
    """

    calls: list[Call] = dataclasses.field(default_factory=list)
    graph: tf.Graph | None = None
    outputs: object = ()
    fault: str | None = None


def traced(model: keras.Model, specs, *, strategy: tf.distribute.Strategy | None = None) -> Trace:
    """Calls the model on placeholders and returns what happened.

    Args:
      model: the model; if it is not built, this builds it.
      specs: the specs of its inputs, nested as the model takes them.
      strategy: the strategy to build the model for; None for the model's own.
    """
    seen = Trace()

    def call(inputs):
        seen.graph = tf.compat.v1.get_default_graph()
        seen.outputs = model(inputs, training=False)
        return seen.outputs

    try:
        if not model.built:  # first, so that the layers that it creates are recorded too
            # Keras tensors, because a tf.function cannot create variables for replicas.
            with (strategy or model.distribute_strategy).scope():
                model(tf.nest.map_structure(_keras_tensor, specs), training=False)
        with _watched(model, seen.calls):
            tf.function(call, autograph=False).get_concrete_function(specs)
    except Exception as error:  # the user's `call` may raise anything
        seen.fault, seen.outputs = _sentence(error), ()
    return seen


def _keras_tensor(spec: tf.TensorSpec) -> keras.KerasTensor:
    return keras.KerasTensor(spec.shape, spec.dtype.name)


def _sentence(error: Exception) -> str:
    """Returns the cause of an error, without the text that Keras puts around it."""
    text = str(error).rpartition("Error encountered:")[2].partition("Arguments received by")[0]
    text = cleaned(text) or type(error).__name__
    return text if len(text) < 300 else text[:297] + "..."


@contextlib.contextmanager
def _watched(model: keras.Model, calls: list[Call]) -> Iterator[None]:
    """Records each call of a leaf layer within the context."""
    own = list(_leaves(model))
    for layer in own:
        _watch(layer, calls)
    try:
        yield
    finally:
        for layer in own:
            for name in ("call", "quantized_call"):
                watch = layer.__dict__.get(name)
                if hasattr(watch, "replaced"):
                    del layer.__dict__[name]
                    layer.__dict__.update(watch.replaced)


def _leaves(model: keras.Model) -> Iterator[keras.layers.Layer]:
    """Yields the layers without inner layers, and those whose work is known as a whole."""
    inside = set()
    for layer in layers_of(model, include_self=False):
        if id(layer) in inside or isinstance(layer, keras.layers.InputLayer):
            continue
        if isinstance(layer, keras.layers.RNN):  # it calls its cell within a loop
            inside |= {id(each) for each in layers_of(layer, include_self=False)}
        elif layers_held(layer):
            continue
        yield layer


def _watch(layer: keras.layers.Layer, calls: list[Call]) -> None:
    name = "call" if getattr(layer, "quantization_mode", None) is None else "quantized_call"
    call = getattr(layer, name)

    def watched(*args, **kwargs):
        graph = tf.compat.v1.get_default_graph()
        begin = len(graph.get_operations())
        outputs = call(*args, **kwargs)
        inputs = [each for each in tf.nest.flatten((args, kwargs)) if _is_tensor(each)]
        results = [each for each in tf.nest.flatten(outputs) if _is_tensor(each)]
        calls.append(Call(layer, inputs, results, begin, len(graph.get_operations())))
        return outputs

    # Set in __dict__, because Keras tracks attributes. The user's own function is restored later.
    watched.replaced = {name: layer.__dict__[name]} if name in layer.__dict__ else {}
    layer.__dict__[name] = watched


def _is_tensor(value) -> bool:
    return tf.is_symbolic_tensor(value) if tf.is_tensor(value) else False
