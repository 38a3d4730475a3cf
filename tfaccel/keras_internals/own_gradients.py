"""Finds the user's functions with a `tf.custom_gradient`, and refuses those that mix rows in it.

Each replica computes the gradient of its own rows. A gradient of rows that depends on a reduction
over rows, as in `upstream / tf.norm(upstream)`, would use only the replica's rows.

    with rows_kept_apart(num_rows):
        step(batch)
"""

import contextlib
import functools
from collections.abc import Callable, Iterable

import tensorflow as tf
from tensorflow.python.ops import custom_gradient

from tfaccel.common.errors import UserError
from tfaccel.keras_internals.patching import patched
from tfaccel.keras_internals.recording import JoinsRowsError

_LIBRARIES = ("tensorflow.", "keras.", "keras_hub.", "keras_cv.", "tfaccel.")
_REDUCTIONS = ("Sum", "Mean", "Max", "Min", "Prod", "All", "Any", "EuclideanNorm")


def rows_kept_apart(num_rows: int) -> contextlib.AbstractContextManager:
    """Returns a context in which a gradient of the user that mixes rows raises `UserError`.

    Args:
      num_rows: the number of rows of the traced batch.
    """
    return changed_by(lambda function: _checked(function, num_rows))


def none_in_step() -> contextlib.AbstractContextManager:
    """Returns a context in which a gradient of the user raises `JoinsRowsError`."""

    def refuse(function):
        raise JoinsRowsError("the step has a tf.custom_gradient of its own")

    return changed_by(refuse)


def changed_by(change: Callable[[Callable], Callable]) -> contextlib.AbstractContextManager:
    """Returns a context in which functions of the user with their own gradient are changed.

    Those of libraries are not: their gradients are linear in the gradient that arrives.
    """
    direct = custom_gradient._graph_mode_decorator

    def decorator(function, args, kwargs):
        is_users = not getattr(function, "__module__", "").startswith(_LIBRARIES)
        return direct(change(function) if is_users else function, args, kwargs)

    return patched(custom_gradient, "_graph_mode_decorator", decorator)


def _checked(function: Callable, num_rows: int) -> Callable:
    @functools.wraps(function)
    def forward(*args, **kwargs):
        value, gradient = function(*args, **kwargs)

        @functools.wraps(gradient)
        def backward(*upstream, **settings):
            graph = tf.compat.v1.get_default_graph()
            num_before = len(graph.get_operations())
            found = gradient(*upstream, **settings)
            made = graph.get_operations()[num_before:]
            if _mixes_rows(made, [*args, *upstream], tf.nest.flatten(found), num_rows):
                name = getattr(function, "__qualname__", "a function")
                raise UserError(
                    f"the tf.custom_gradient of {name} reduces over the rows of a batch in its "
                    "backward function, and each replica would use only its own rows; compute the "
                    "gradient of each row by itself, or train on one replica"
                )
            return found

        return value, backward

    return forward


def _mixes_rows(made: list[tf.Operation], given: Iterable, found: list, num_rows: int) -> bool:
    """Returns whether a gradient of rows depends on a reduction over rows."""
    of_rows = {id(each) for each in given if _has_rows(each, num_rows)}
    mixed = set()
    for op in made:
        inputs = {id(each) for each in op.inputs}
        outputs = {id(each) for each in op.outputs}
        if inputs & of_rows:
            of_rows |= outputs
            if _reduces_axis_0(op) and _has_rows(op.inputs[0], num_rows):
                mixed |= outputs
        if inputs & mixed:
            mixed |= outputs
    return any(id(each) in mixed and _has_rows(each, num_rows) for each in found)


def _has_rows(value, num_rows: int) -> bool:
    if not isinstance(value, tf.Tensor) or not value.shape.rank:
        return False
    return value.shape[0] is None or (value.shape[0] > 0 and value.shape[0] % num_rows == 0)


def _reduces_axis_0(op: tf.Operation) -> bool:
    if op.type == "L2Loss":
        return True
    axes = tf.get_static_value(op.inputs[1]) if op.type in _REDUCTIONS else None
    if axes is None or op.inputs[0].shape.rank is None:
        return False
    return any(int(each) % max(1, op.inputs[0].shape.rank) == 0 for each in axes.reshape(-1))
