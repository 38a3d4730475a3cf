"""The values of a Keras variable: one `tf.Variable`, or one for each replica of this process."""

from collections.abc import Callable

import keras
import tensorflow as tf
from keras.src.backend.common.stateless_scope import in_stateless_scope
from tensorflow.python.distribute.values import DistributedVariable


def value_of(variable):
    """Returns what a Keras variable reads: its `tf.Variable`, that of a strategy, or a tensor."""
    return variable._value


def is_distributed(variable) -> bool:
    """Returns whether a Keras variable was made in the scope of a strategy."""
    return isinstance(variable._value, tf.distribute.DistributedValues)


def components(variable) -> tuple:
    """Returns the `tf.Variable` of a Keras variable on each replica of this process."""
    return variable._value.values if is_distributed(variable) else (variable._value,)


def in_order(graph) -> list[tf.Variable]:
    """Returns the variables of a traced function, in the order in which the trace met them.

    `graph.variables` is a set, whose order differs between two processes. The compile cache finds a
    program by its text, so no text may depend on that order.
    """
    met = {id(outside): number for number, (outside, _) in enumerate(graph.captures)}
    return sorted(graph.variables, key=lambda each: met[id(each.handle)])


def are_shapes_asked() -> bool:
    """Returns whether Keras calls a layer for its shapes alone: no tensor has a value then."""
    return in_stateless_scope()


def adopt(variable, strategy: tf.distribute.Strategy) -> None:
    """Makes a Keras variable again in the scope of a strategy, and keeps its value."""
    value = keras.ops.convert_to_numpy(variable)
    with strategy.scope():
        variable._initialize(value)


def standing_in(metric, values: dict[int, tf.Tensor]):
    """Returns an object like a metric, whose variables read as other values.

    Args:
      metric: The metric. It may have its variables in lists and dicts, or in metrics within.
      values: From the id of a variable to what it reads as.
    """

    copies = {}  # by the id of the original

    def copied(original, others: dict):
        copy = copies[id(original)] = object.__new__(type(original))
        vars(copy).update(vars(original))
        vars(copy).update({name: other(each) for name, each in others.items()})
        return copy

    def other(value):
        if id(value) in copies:
            return copies[id(value)]
        if id(value) in values:
            return copied(value, {"_value": values[id(value)]})
        if isinstance(value, keras.metrics.Metric):
            return copied(value, vars(value))
        if isinstance(value, dict):
            return {name: other(each) for name, each in value.items()}
        if isinstance(value, list | tuple) and not hasattr(value, "_fields"):
            return [other(each) for each in value]
        return value

    return other(metric)


def _number_of(kind: type) -> Callable:
    return lambda variable: kind(variable.numpy())


# Callbacks call `float(model.optimizer.learning_rate)`, but a variable of a strategy lacks
# `__float__`.
for _name, _kind in (("__float__", float), ("__int__", int)):
    if not hasattr(DistributedVariable, _name):
        setattr(DistributedVariable, _name, _number_of(_kind))
