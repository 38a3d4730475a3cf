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


def are_shapes_asked() -> bool:
    """Returns whether Keras calls a layer for its shapes alone: no tensor has a value then."""
    return in_stateless_scope()


def adopt(variable, strategy: tf.distribute.Strategy) -> None:
    """Makes a Keras variable again in the scope of a strategy, and keeps its value."""
    value = keras.ops.convert_to_numpy(variable)
    with strategy.scope():
        variable._initialize(value)


def _number_of(kind: type) -> Callable:
    return lambda variable: kind(variable.numpy())


# Callbacks call `float(model.optimizer.learning_rate)`, but a variable of a strategy lacks
# `__float__`.
for _name, _kind in (("__float__", float), ("__int__", int)):
    if not hasattr(DistributedVariable, _name):
        setattr(DistributedVariable, _name, _number_of(_kind))
