"""One symbolic call of a Keras model, watched: which layer takes what, and gives what.

Takes a model and the specs of its inputs; gives the calls of its leaves, and the graph.

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
    begin: int  # its operations' numbers in the graph
    end: int

    @property
    def kind(self) -> str:
        """The layer's class."""
        return type(self.layer).__name__


@dataclasses.dataclass
class Trace:
    """What a symbolic call showed.

    Attributes:
      calls: of the leaves, in order.
      graph: with all operations; None where it did not begin.
      outputs: tensors of the model's outputs, as they are nested; none where it failed.
      fault: why it failed, in words; None if it did not.
    """

    calls: list[Call] = dataclasses.field(default_factory=list)
    graph: tf.Graph | None = None
    outputs: object = ()
    fault: str | None = None


def traced(model: keras.Model, specs, *, strategy: tf.distribute.Strategy | None = None) -> Trace:
    """Calls the model on placeholders and returns what was seen.

    Args:
      model: one that is not built is built by this.
      specs: of its inputs, nested as it takes them.
      strategy: that it is built for; None for its own.
    """
    seen = Trace()

    def call(inputs):
        seen.graph = tf.compat.v1.get_default_graph()
        seen.outputs = model(inputs, training=False)
        return seen.outputs

    try:
        if not model.built:  # the layers that it makes meanwhile are to be watched too
            # Keras's own tensors: within a tf.function there are no variables for replicas.
            with (strategy or model.distribute_strategy).scope():
                model(tf.nest.map_structure(_keras_tensor, specs), training=False)
        with _watched(model, seen.calls):
            tf.function(call, autograph=False).get_concrete_function(specs)
    except Exception as error:  # whatever the user's `call` raises
        seen.fault, seen.outputs = _sentence(error), ()
    return seen


def _keras_tensor(spec: tf.TensorSpec) -> keras.KerasTensor:
    return keras.KerasTensor(spec.shape, spec.dtype.name)


def _sentence(error: Exception) -> str:
    """Returns the cause in an error: Keras puts more before it, and arguments after it."""
    text = str(error).rpartition("Error encountered:")[2].partition("Arguments received by")[0]
    text = cleaned(text) or type(error).__name__
    return text if len(text) < 300 else text[:297] + "..."


@contextlib.contextmanager
def _watched(model: keras.Model, calls: list[Call]) -> Iterator[None]:
    """Within the context, each call of a leaf of the model is noted."""
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
    """Yields the layers whose work is known as a whole, or that have no layers of their own."""
    inside = set()
    for layer in layers_of(model, include_self=False):
        if id(layer) in inside or isinstance(layer, keras.layers.InputLayer):
            continue
        if isinstance(layer, keras.layers.RNN):  # its cell is called within a loop
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
        given = [each for each in tf.nest.flatten(outputs) if _is_tensor(each)]
        calls.append(Call(layer, inputs, given, begin, len(graph.get_operations())))
        return outputs

    # Past Keras's own attributes, which it tracks; another's function of this name is put back.
    watched.replaced = {name: layer.__dict__[name]} if name in layer.__dict__ else {}
    layer.__dict__[name] = watched


def _is_tensor(value) -> bool:
    return tf.is_symbolic_tensor(value) if tf.is_tensor(value) else False
