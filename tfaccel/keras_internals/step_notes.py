"""Tells what a traced step does besides its operations: assignments, metrics, own gradients.

    with noted(noter):
        step(batch)

tfaccel/step/plain_steps.py notes it, and asks `operations` about the graph.
"""

import contextlib
from collections.abc import Callable, Iterator
from typing import NamedTuple, Protocol

import tensorflow as tf
from tensorflow.python.framework.auto_control_deps_utils import get_read_write_resource_inputs

from tfaccel.keras_internals import own_gradients
from tfaccel.keras_internals.moved import Variable as TensorFlowVariable
from tfaccel.keras_internals.patching import patched
from tfaccel.keras_internals.reductions import CALLERS, metric_methods_by
from tfaccel.keras_internals.row_operations import known_when_traced
from tfaccel.keras_internals.traced import has_effects


class Noter(Protocol):
    """What is told of a step."""

    def assigned(self, variable, value) -> None:
        """Notes that a Keras variable is assigned a value."""

    def updated(self, own: Callable, metric, args: tuple, kwargs: dict):
        """Calls `own(*args, **kwargs)`, the `update_state` of a metric, and notes it."""

    def result(self, own: Callable, metric, args: tuple, kwargs: dict):
        """Calls `own()`, the `result` of a metric, and notes it."""

    def has_own_gradient(self) -> None:
        """Notes that the user's code computes the gradient of an operation."""

    def accumulates_forward(self) -> None:
        """Notes that the step computes derivatives in the forward direction."""


@contextlib.contextmanager
def noted(noter: Noter) -> Iterator[None]:
    """Within the context, `noter` is told of what a step does. Variables keep their values."""

    def assign(variable, value):
        noter.assigned(variable, value)
        return variable

    def note(function):
        noter.has_own_gradient()
        return function

    def enter(accumulator):
        noter.accumulates_forward()
        return direct_enter(accumulator)

    direct_enter = tf.autodiff.ForwardAccumulator.__enter__
    with (
        patched(TensorFlowVariable, "assign", assign),
        own_gradients.changed_by(note),
        patched(tf.autodiff.ForwardAccumulator, "__enter__", enter),
        metric_methods_by("update_state", noter.updated, but=CALLERS),
        metric_methods_by("result", noter.result),
    ):
        yield


class Operation(NamedTuple):
    """An operation of a traced graph.

    Attributes:
      op: the operation.
      resources: those of its inputs that are handles of variables and the like.
      written: those of them that it may change.
      is_function: whether it calls a function, as a branch or a loop does.
      has_effects: whether it does something besides its outputs.
    """

    op: tf.Operation
    resources: list[tf.Tensor]
    written: list[tf.Tensor]
    is_function: bool
    has_effects: bool


def operations(graph) -> Iterator[Operation]:
    """Yields the operations of a graph, each one behind those whose outputs it takes."""
    for op in graph.get_operations():
        resources = [each for each in op.inputs if each.dtype == tf.resource]
        written = list(get_read_write_resource_inputs(op)[1]) if resources else []
        is_function = any(each.type == "func" for each in op.op_def.attr)
        yield Operation(op, resources, written, is_function, has_effects(op.type))


def number_of(value) -> float | None:
    """Returns a single number that is known when traced, such as `tf.shape(x)[0]`; else None."""
    tensor = None if value is None else tf.convert_to_tensor(value)
    if tensor is None or tensor.shape.rank != 0:
        return None
    known = known_when_traced(tensor)
    return None if known is None else float(known)


def has_value_of_its_own(graph, placeholder: tf.Tensor) -> bool:
    """Returns whether a placeholder stands for a tensor outside that has a value already."""
    return any(own is placeholder and hasattr(each, "numpy") for each, own in graph.captures)
