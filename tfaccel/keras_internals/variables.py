"""A Keras variable that was made in a strategy's scope: its parts, one for each replica."""

from collections.abc import Callable

import keras
import tensorflow as tf
from tensorflow.python.distribute.values import DistributedVariable


def value_of(variable):
    """Returns what a Keras variable reads as: a `tf.Variable`, a strategy's, or a tensor."""
    return variable._value


def is_distributed(variable) -> bool:
    """Returns whether a Keras variable was made in a strategy's scope."""
    return isinstance(variable._value, tf.distribute.DistributedValues)


def components(variable) -> tuple:
    """Returns a Keras variable's `tf.Variable` on each of this process's replicas."""
    return variable._value.values if is_distributed(variable) else (variable._value,)


def adopt(variable, strategy: tf.distribute.Strategy) -> None:
    """Makes a Keras variable again in the strategy's scope, with the value that it has."""
    value = keras.ops.convert_to_numpy(variable)
    with strategy.scope():
        variable._initialize(value)


def _number_of(kind: type) -> Callable:
    return lambda variable: kind(variable.numpy())


# Callbacks read `float(model.optimizer.learning_rate)`, which a variable has, and a strategy's not.
for _name, _kind in (("__float__", float), ("__int__", int)):
    if not hasattr(DistributedVariable, _name):
        setattr(DistributedVariable, _name, _number_of(_kind))
