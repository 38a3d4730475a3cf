"""A model's plain `tf.Variable`s, which Keras does not know, as one replica sees them.

Finds those that are attributes of the model or of its layers, also in lists, tuples and dicts. It
does not find a variable that only a closure holds.

    with own_plain_variables(model, replica):
        model.count.assign_add(1)           # that of this replica
"""

import contextlib
from collections.abc import Iterator

from tensorflow.python.distribute.values import DistributedVariable

from tfaccel.keras_internals.layers import layers_of
from tfaccel.keras_internals.replica import Replica


@contextlib.contextmanager
def own_plain_variables(model, replica: Replica) -> Iterator[None]:
    """Within the context, the attributes are the `tf.Variable`s of this replica.

    All replicas must assign the same values, as they do to a count of steps: unlike those of
    Keras's variables, the changes are not summed over the replicas.
    """
    kept = [
        (vars(layer), name, value)
        for layer in layers_of(model)
        for name, value in vars(layer).items()
        if _has_plain(value)
    ]
    try:
        for attributes, name, value in kept:
            attributes[name] = _own(value, replica.local_index)
        yield
    finally:
        for attributes, name, value in kept:
            attributes[name] = value


def _has_plain(value) -> bool:
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list | tuple):
        return any(map(_has_plain, value))
    return isinstance(value, DistributedVariable)


def _own(value, index: int):
    if not _has_plain(value):
        return value
    if isinstance(value, dict):
        return {key: _own(each, index) for key, each in value.items()}
    if isinstance(value, list | tuple):
        own = [_own(each, index) for each in value]
        return own if isinstance(value, list) else tuple(own)
    return value.values[index]
