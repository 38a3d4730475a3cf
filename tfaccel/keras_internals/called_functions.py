"""The functions that operations of a traced function call.

graphs = called_by(op)      # of a call, a branch or a loop; [] for any other operation

Private names relied on: TensorFlow 2.21: Graph._is_function, Graph._get_function, and the attribute
_XlaMustCompile.
"""

import tensorflow as tf


def called_by(op: tf.Operation) -> list[tf.Graph]:
    """Returns the traced functions that an operation calls, such as the branches of a condition."""
    found = []
    for each in op.node_def.attr.values():
        names = [each.func.name] if each.HasField("func") else []
        names += [own.name for own in each.list.func]
        for name in names:
            if (graph := _graph_of(op.graph, name)) is not None:
                found.append(graph)
    return found


def is_compiled_by_xla(op: tf.Operation) -> bool:
    """Returns whether XLA compiles the function that an operation calls (`jit_compile=True`)."""
    attributes = op.node_def.attr
    return "_XlaMustCompile" in attributes and attributes["_XlaMustCompile"].b


def _graph_of(graph: tf.Graph, name: str) -> tf.Graph | None:
    while graph is not None:
        if graph._is_function(name):
            return graph._get_function(name).graph
        graph = getattr(graph, "outer_graph", None)
    return None
