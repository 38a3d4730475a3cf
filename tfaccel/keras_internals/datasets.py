"""What a `tf.data.Dataset` is made of."""

from collections.abc import Iterator

import tensorflow as tf


def steps_of(dataset: tf.data.Dataset) -> Iterator[tf.data.Dataset]:
    """Yields a data set and the data sets that it is made of, each once, the last step first."""
    known, waiting = {}, [dataset]
    while waiting:
        each = waiting.pop()
        if id(each) not in known:
            known[id(each)] = each
            yield each
            waiting += each._inputs()


def first_input_of(step: tf.data.Dataset) -> tf.data.Dataset | None:
    """Returns the data set that this step reads; None for a source."""
    return next(iter(step._inputs()), None)


def batching_of(step: tf.data.Dataset) -> tuple[int, bool] | None:
    """Returns the batch size and whether a smaller last batch is dropped; None for other steps."""
    if not hasattr(step, "_batch_size"):
        return None
    size, drops = (tf.get_static_value(each) for each in (step._batch_size, step._drop_remainder))
    return int(size), bool(drops)


def operations_of(dataset: tf.data.Dataset) -> set[str]:
    """Returns the names of the operations in the functions of a data set and of its inputs."""
    names = set()
    for each in steps_of(dataset):
        for function in each._functions():
            graph = function.function.graph.as_graph_def()
            inner = (node for each in graph.library.function for node in each.node_def)
            names |= {node.op for node in (*graph.node, *inner)}
    return names
