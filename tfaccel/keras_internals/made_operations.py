"""Tells which operations the user's code adds to a graph, and at which line.

    with told_of_operations(lambda op: print(op.type, line_of(op))):
        step(batch)

These are the operations that a handler may see (tfaccel/keras_internals/row_operations.py). So
what Keras's layers, metrics and optimizers compute, and gradients, are not among them.
"""

import contextlib
import os
from collections.abc import Callable

import keras
import tensorflow as tf
from tensorflow.python.framework import ops

from tfaccel.keras_internals.patching import patched
from tfaccel.keras_internals.row_operations import is_noticing

# Code of these folders is not the user's.
_LIBRARIES = tuple(
    os.path.dirname(each) + os.sep
    for each in (tf.__file__, keras.__file__, os.path.dirname(os.path.abspath(__file__)))
)


def told_of_operations(tell: Callable[[tf.Operation], None]) -> contextlib.AbstractContextManager:
    """Returns a context in which `tell` gets each operation of the user's, when it is made."""
    direct = ops.Graph._create_op_internal

    def create(graph, *args, **kwargs):
        op = direct(graph, *args, **kwargs)
        if is_noticing():
            tell(op)
        return op

    return patched(ops.Graph, "_create_op_internal", create)


def line_of(op: tf.Operation) -> str | None:
    """Returns the line of the user's code that made an operation, such as "model.py:9"."""
    for frame in reversed(list(op.traceback or ())):
        if not frame.filename.startswith(_LIBRARIES) and os.path.exists(frame.filename):
            return f"{os.path.basename(frame.filename)}:{frame.lineno}"
    return None
