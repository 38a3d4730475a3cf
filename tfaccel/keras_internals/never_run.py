"""Graphs for a trace that never runs, with placeholders for the tensors of a batch.

with never_run("made_by_step"):
    step(placeholders(specs_of(batch)))
"""

import contextlib

import numpy as np
import tensorflow as tf


def never_run(name: str) -> contextlib.AbstractContextManager:
    """Returns a context in which operations are added to a graph that nothing runs.

    Variables are made outside the graph, so they stay.
    """
    return tf.__internal__.FuncGraph(name).as_default()


def spec_of(value):
    """Returns the `tf.TypeSpec` of a tensor or an array; None for None."""
    if value is None or isinstance(value, tf.TypeSpec):
        return value
    if isinstance(value, tf.RaggedTensor | tf.SparseTensor):
        return tf.type_spec_from_value(value)
    value = value if hasattr(value, "shape") else np.asarray(value)
    return tf.TensorSpec(value.shape, value.dtype)


def placeholders(specs, *, times: int = 1):
    """Returns placeholders for the specs of a batch, with a multiple of the rows of each."""
    return tf.nest.map_structure(lambda spec: _placeholder(spec, times), specs)


def _placeholder(spec, times: int):
    if spec is None:
        return None
    shape = spec.shape
    if shape.rank and shape[0] is not None:
        shape = [shape[0] * times, *shape[1:]]
    if isinstance(spec, tf.RaggedTensorSpec):
        inner = spec.shape[spec.ragged_rank + 1 :]
        return tf.compat.v1.ragged.placeholder(spec.dtype, spec.ragged_rank, inner)
    if isinstance(spec, tf.SparseTensorSpec):
        return tf.compat.v1.sparse_placeholder(spec.dtype, shape)
    return tf.compat.v1.placeholder(spec.dtype, shape)
