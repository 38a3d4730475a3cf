"""What a step will need, known when it has been traced and before it is compiled.

step = measured(step, tell, xla=True, replicas=replicas)     # before it becomes a tf.function
tell(need)      # is called each time that the step has been traced
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence

import tensorflow as tf

from tfaccel.keras_internals.graph_copies import current_graph
from tfaccel.keras_internals.replica import Replica
from tfaccel.step.memory.buffers import UnknownSizeError, bytes_of, peak_bytes


@dataclasses.dataclass(frozen=True)
class Need:
    """The memory of a step on one replica, in bytes.

    Attributes:
      step: the most that is in memory at a time beside variables and batches: activations and
        gradients. None if a size is not known when the step is traced.
      batches: the arguments of the step: its batch, or those of all steps of an execution.
      rows: the rows of a step's batch; None if that is not known.
      xla: whether XLA compiles the step.
      unknown: which size is not known.
    """

    step: int | None
    batches: int
    rows: int | None
    xla: bool
    unknown: str = ""


def measured(
    function: Callable,
    tell: Callable[[Need], None],
    *,
    xla: bool,
    replicas: Sequence[Replica],
    of_launch: bool,
) -> Callable:
    """Returns a function to compile that calls `tell` when it has been traced.

    Args:
      function: of the batches of all replicas of this process.
      tell: gets the need of its first replica.
      xla: whether XLA compiles it, or its parts.
      replicas: those of this process.
      of_launch: whether the arguments are those of several steps, [steps, rows, ...].
    """

    @functools.wraps(function)
    def traced(*arguments):
        outputs = function(*arguments)
        graph = current_graph()
        if graph is not None:
            first = replicas[0]
            where = {"on_gpu": first.is_gpu, "device": first.device if len(replicas) > 1 else None}
            given = _bytes_of_all(arguments) // len(replicas)
            rows = _size_of_first(arguments, axis=1 if of_launch else 0)
            tell(_need(graph, outputs, given, rows, xla=xla, **where))
        return outputs

    return traced


def _need(graph, outputs, given: int, rows: int | None, *, xla: bool, **where) -> Need:
    leaves = [each for each in _tensors(outputs) if tf.is_symbolic_tensor(each)]
    try:
        step = peak_bytes(graph, leaves, xla=xla, **where)
    except UnknownSizeError as error:
        return Need(None, given, rows, xla, str(error))
    return Need(step, given, rows, xla)


def _size_of_first(nest, *, axis: int) -> int | None:
    """Returns the size of an axis of the first tensor that has it."""
    shapes = [each.shape for each in _tensors(nest) if tf.is_tensor(each)]
    return next((each[axis] for each in shapes if each.rank is not None and each.rank > axis), None)


def _bytes_of_all(nest) -> int:
    """Returns the bytes of tensors; those of an unknown shape count as nothing."""
    total = 0
    for each in {id(each): each for each in _tensors(nest) if tf.is_tensor(each)}.values():
        total += bytes_of(each) if each.shape.is_fully_defined() else 0
    return total


def _tensors(nest) -> list:
    return tf.nest.flatten(nest, expand_composites=True)
