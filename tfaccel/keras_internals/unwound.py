"""Puts back what TensorFlow leaves behind when the trace of a step raises an error.

`tf.map_fn`, `tf.scan`, `tf.foldl` and `tf.foldr` set the caching device of TensorFlow's variable
scope and do not put it back if the function raises. Every later `strategy.scope()` of the process
then raises "Caching devices is not yet supported", and stays half entered: the next one raises
"Mixing different tf.distribute.Strategy objects" (TensorFlow 2.21, 2026-11-28).

    with unwound():
        step(batch)
"""

import contextlib
from collections.abc import Iterator

import tensorflow as tf

from tfaccel.keras_internals.never_run import never_run


@contextlib.contextmanager
def unwound() -> Iterator[None]:
    """Within the context, an error leaves the caching device of the variable scope as it was."""
    device = tf.compat.v1.get_variable_scope().caching_device
    try:
        yield
    except BaseException:
        _set(device)
        raise


@contextlib.contextmanager
def without_caching_device() -> Iterator[None]:
    """Within the context, a `strategy.scope()` can be entered, even in a `tf.map_fn`."""
    device = tf.compat.v1.get_variable_scope().caching_device
    if device is None:
        yield
        return
    _set(None)
    try:
        yield
    finally:
        _set(device)


def _set(device) -> None:
    # Outside a graph, it cannot be set. All graphs of functions share the scope.
    with never_run("unwound"):
        tf.compat.v1.get_variable_scope().set_caching_device(device)
