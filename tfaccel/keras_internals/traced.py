"""What TensorFlow knows of a traced function and of its operations."""

import functools
import math
from collections.abc import Callable, Iterable, Iterator

import numpy as np
import tensorflow as tf
from tensorflow.python.framework import kernels, op_def_registry
from tensorflow.python.framework.auto_control_deps_utils import get_read_write_resource_inputs
from tensorflow.python.ops.handle_data_util import get_resource_handle_data

# For `tf.function(experimental_attributes=...)`: the function runs only what its outputs need.
UNORDERED = {"_disable_acd": True}

# Types of operations whose results depend on the shapes of their inputs alone.
OF_SHAPES = frozenset({"Shape", "ShapeN", "Size", "Rank", "ZerosLike", "OnesLike"})


def kernels_of(operation: str, device: str) -> list[dict[str, frozenset[int]]]:
    """Returns the kernels of an operation on a device, e.g. "XLA_GPU_JIT".

    Each kernel is a dict from an attribute to the dtypes, as numbers, that it may be.
    """
    return [
        {
            each.name: frozenset(each.allowed_values.list.type)
            for each in kernel.constraint
            if each.allowed_values.list.type
        }
        for kernel in kernels.get_registered_kernels_for_op(operation).kernel
        if kernel.device_type == device
    ]


def has_effects(operation: str) -> bool:
    """Returns whether an operation runs even if nothing needs its outputs."""
    definition = op_def_registry.get(operation)
    return definition is not None and definition.is_stateful


def made_by(
    tensor: tf.Tensor, *, inputs: Callable[[tf.Operation], Iterable[tf.Tensor]] | None = None
) -> Iterator[tf.Operation]:
    """Yields the operations that a tensor is computed by, in its own graph: its own one first.

    Args:
      tensor: a tensor of a graph.
      inputs: a function of an operation that returns those of its inputs to go on with; None for
        all inputs. It is called after the operation was yielded.
    """
    waiting, seen = [tensor.op], set()
    while waiting:
        op = waiting.pop()
        if id(op) not in seen:
            seen.add(id(op))
            yield op
            waiting += [each.op for each in (op.inputs if inputs is None else inputs(op))]


def assigned_in(graph) -> Iterator[tuple[tf.Tensor, tf.DType]]:
    """Yields the handle and dtype of each variable that a traced function may assign."""
    read_by = functools.cache(lambda operation: get_read_write_resource_inputs(operation)[0])
    for handle, own in graph.captures:
        data = get_resource_handle_data(own) if own.dtype == tf.resource else None
        if data is None or not data.is_set:  # a tensor, or an iterator
            continue
        if not all(own in read_by(each) for each in own.consumers()):
            yield handle, tf.as_dtype(data.shape_and_type[0].dtype)


def names_of_results(logs: dict, variables: list) -> set[str]:
    """Returns the names of the logs that are computed from these Keras variables.

    Args:
      logs: tensors of the graph that is being traced. Other tensors count as computed from them.
      variables: Keras variables, such as those of metrics.
    """
    graph = tf.compat.v1.get_default_graph()
    handles = handles_of(graph, variables)
    return {name for name, each in logs.items() if _comes_from(each, handles, graph)}


def handles_of(graph, variables: list) -> set[int]:
    """Returns the ids of the tensors that are the handles of Keras variables in a graph."""
    wanted = {id(getattr(each._value, "handle", None)) for each in variables} - {id(None)}
    return {id(own) for outside, own in getattr(graph, "captures", ()) if id(outside) in wanted}


def _comes_from(tensor, handles: set[int], graph) -> bool:
    if not tf.is_symbolic_tensor(tensor) or tensor.graph is not graph:
        return True
    return any(id(each) in handles for op in made_by(tensor) for each in op.outputs)


def constant_of(tensor: tf.Tensor, *, at_most: int) -> np.ndarray | None:
    """Returns the value of a tensor that depends on no input and no variable of a traced function.

    Its operations are computed on the CPU, now. Returns None if the tensor depends on an input, a
    variable, a random number or a function, or if it has more than `at_most` values.

    Args:
      tensor: a tensor of the graph that is being traced, or an eager one.
      at_most: the largest number of values, also of the tensors on the way.
    """
    if not tf.is_symbolic_tensor(tensor):
        return tensor.numpy()
    operations = _operations_of(tensor, at_most)
    if operations is None:
        return None
    graph = tf.compat.v1.GraphDef(versions=tensor.graph.graph_def_versions)
    for each in operations:
        node = graph.node.add()
        node.CopyFrom(each.node_def)
        node.device = ""
        node.input[:] = [name for name in node.input if not name.startswith("^")]
    with tf.init_scope(), tf.device("CPU:0"):
        imported = functools.partial(
            tf.import_graph_def, graph, return_elements=[tensor.name], name=""
        )
        (value,) = tf.compat.v1.wrap_function(imported, [])()
        return value.numpy()


def _operations_of(tensor: tf.Tensor, at_most: int) -> list[tf.Operation] | None:
    """Returns the operations that a tensor needs; None if one has an input, a state or a size."""
    found = []
    for each in made_by(tensor):
        sizes = [output.shape.num_elements() for output in each.outputs]
        if (
            each.type == "Placeholder"
            or has_effects(each.type)
            or any(attribute.HasField("func") for attribute in each.node_def.attr.values())
            or None in sizes
            or math.fsum(sizes) > at_most
        ):
            return None
        found.append(each)
    return found
