"""Copies operations of a traced function, and gives operations other inputs.

copy = copied(op, inputs)
give_input(gradient_op, 1, copy.outputs[0])
"""

from collections.abc import Iterable, Sequence

import tensorflow as tf
from tensorflow.python.framework import tensor as tensor_lib

# Operations without state that TensorFlow's gradient may replace by ones with more results, because
# they call other functions.
_OF_FUNCTIONS = {"Case", "For", "If", "PartitionedCall", "StatelessCase", "StatelessIf"}
_OF_FUNCTIONS |= {"StatelessWhile", "SymbolicGradient", "While"}
OF_MODULE = "XlaCallModule"  # has no state, although TensorFlow lists it among those that have


def current_graph() -> tf.Graph | None:
    """Returns the graph that operations are added to; None while TensorFlow runs eagerly."""
    return None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()


def is_input(op: tf.Operation) -> bool:
    """Returns whether an operation stands for an input of the traced function."""
    return op.type == "Placeholder"


def is_copyable(op: tf.Operation) -> bool:
    """Returns whether a copy of an operation computes the same, at any time."""
    if is_input(op) or op.type in _OF_FUNCTIONS:
        return False
    if op.op_def.is_stateful and op.type != OF_MODULE:
        return False
    return all(each.dtype not in (tf.resource, tf.variant) for each in [*op.inputs, *op.outputs])


def copied(
    op: tf.Operation, inputs: Sequence[tf.Tensor], *, after: Sequence[tf.Operation] = ()
) -> tf.Operation:
    """Returns a copy of an operation with other inputs of the same shapes and dtypes.

    It waits for the operations `after`, unless XLA compiles it.
    """
    graph = op.graph
    definition = op.node_def
    attributes = {name: each for name, each in definition.attr.items() if name != "_class"}
    with (
        graph.as_default(),
        graph.control_dependencies(None),
        graph.control_dependencies(list(after)),
        tf.device(op.device or None),
    ):
        copy = graph._create_op_internal(
            op.type,
            list(inputs),
            [each.dtype for each in op.outputs],
            name=f"recomputed/{op.name}",
            attrs=attributes,
            op_def=op.op_def,
        )
    modules_in_any_order([copy])
    return copy


def modules_in_any_order(ops: Iterable[tf.Operation]) -> None:
    """Lets calls of modules run when their inputs are there.

    TensorFlow lists them among operations with state, and has each of these wait for those made
    before it. A copy would wait for gradients that need it, and a gradient for one that the copies
    wait for.
    """
    for op in ops:
        order = getattr(op.graph, "experimental_acd_manager", None)
        if op.type == OF_MODULE and order is not None:
            order.run_independently(op)


def give_input(op: tf.Operation, index: int, tensor: tensor_lib.Tensor) -> None:
    """Makes a tensor of the same graph the input of an operation."""
    op._update_input(index, tensor)


def is_persistent(tape: tf.GradientTape) -> bool:
    """Returns whether a tape may compute several gradients."""
    return tape._persistent
