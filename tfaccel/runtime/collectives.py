"""Values that travel between replicas: what Horovod's users know, on `tf.distribute`.

Takes a tensor or a nest of tensors, one on each replica; gives every replica the same result.

    def train_step(images):  # for strategy.run
        loss = ...
        return all_reduce(loss, op="mean")

    examples = all_gather(per_replica_examples)  # outside a replica function

Every function works in three places, eagerly and in a `tf.function`:

- In a replica function, the one that `strategy.run` calls: a value is this replica's.
- Outside, in a callback say, a per-replica value holds the value of each of this worker's replicas,
  and any other value counts as the value of every one of them, as it does when `strategy.run` is
  given it. The result is an ordinary tensor on each worker. So `all_reduce(1) == world_size()`
  everywhere, and with one GPU per worker a plain tensor is that worker's own value. The replicas
  are those of the strategy in scope, or, out of every scope, of `tfaccel.setup`. One call for every
  step belongs in a `tf.function`: eagerly TensorFlow traces each gather anew, min and max too, in
  0.1 s or more.
- Without a run and a scope: the job is one replica of rank 0.

MirroredStrategy and MultiWorkerMirroredStrategy are supported. A collective ends when the last
replica has joined it: every replica of every worker makes the same calls in the same order. Under
MirroredStrategy TensorFlow refuses them within `tf.cond`, `tf.while_loop` and a `tf.function` that
the replica function calls.

dtypes are bool, integers up to 64 bits except uint64, and floats; a result has its value's dtype.
A Python list is a nest, of numbers say, and not a tensor. In a replica function every result is
differentiable, for the sum of all replicas' losses.
"""

import functools
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tfaccel.common.errors import UserError
from tfaccel.runtime import strategy as strategy_lib

# A tensor, a tf.IndexedSlices or a tf.distribute.DistributedValues of them, or a nest of these.
Value = Any

_OPS = ("sum", "mean", "min", "max")

# TensorFlow's collectives know float16, float32, float64, int32 and int64; MirroredStrategy reduces
# int32 on one device. Each of the others travels as one that holds all its values; bfloat16 too,
# which can be reduced, but not gathered, and whose sum is rounded once so.
_CARRIERS = {
    **dict.fromkeys(
        (tf.bool, tf.int8, tf.uint8, tf.int16, tf.uint16, tf.int32, tf.uint32), tf.int64
    ),
    tf.bfloat16: tf.float32,
}
_CARRIED = (tf.float16, tf.float32, tf.float64, tf.int64, *_CARRIERS)


def world_size() -> int:
    """Returns the number of replicas over all workers; 1 without a run or a strategy."""
    return (_outside() or tf.distribute.get_strategy()).num_replicas_in_sync


def rank() -> int:
    """Returns this replica's index among all, from 0, worker by worker.

    Outside a replica function it is the first of this worker's replicas, so that `rank() == 0` is
    true on the first worker alone.
    """
    if strategy := _outside():
        ranks = strategy.experimental_distribute_values_from_function(
            lambda context: context.replica_id_in_sync_group
        )
        return strategy.experimental_local_results(ranks)[0]
    context = tf.distribute.get_replica_context()
    # A Python number also while a tf.function is traced, which happens once for each replica.
    return int(tf.get_static_value(tf.convert_to_tensor(context.replica_id_in_sync_group)))


def local_rank() -> int:
    """Returns this replica's index among its worker's, from 0; 0 outside a replica function."""
    if _outside() or not tf.distribute.has_strategy():
        return 0
    return rank() % len(tf.distribute.get_strategy().extended.worker_devices)


def all_reduce(value: Value, *, op: str = "sum") -> Value:
    """Reduces the replicas' tensors element by element.

    The gradient of a sum is the sum of the replicas' gradients, that of a mean their mean.

    Args:
      value: a tensor or a nest of tensors, whose shapes are the same on every replica.
      op: "sum" or "mean", or "min" or "max", for which each replica holds all replicas' tensors
        for a moment. float16 adds in float16: a mean, too, is infinite where the sum is above
        65504. Integers have no mean. For bool, "min" is `all`, "max" is `any`, and there is no sum.

    Returns:
      What `value` is, in shape, dtype and structure.

    Raises:
      UserError: the op is not one of these, or has no meaning for the value's dtype.
    """
    if op not in _OPS:
        raise UserError(f"op={op!r} is not a reduction; use one of {', '.join(_OPS)}")
    return _on_replicas(functools.partial(_reduce, op=op), value)


def all_gather(value: Value, *, axis: int = 0) -> Value:
    """Concatenates the replicas' tensors in the order of their ranks.

    Args:
      value: a tensor, a `tf.IndexedSlices` or a nest of them. Every tensor's shape is the same on
        every replica but for the size along `axis`, which may differ and be 0.
      axis: to concatenate along; negative ones count from the last. `tf.IndexedSlices` have 0
        only: their values and indices are gathered, and the dense shape stays, so the result is
        the sum of the replicas' slices.

    Returns:
      What `value` is, in dtype and structure, with the sum of the sizes along `axis`.

    Raises:
      UserError: the tensor has no such axis, or its number of axes is unknown.
    """
    return _on_replicas(functools.partial(_gather, axis=axis), value)


def broadcast(value: Value, *, root_rank: int = 0) -> Value:
    """Gives every replica the value of one.

    Args:
      value: a tensor or a nest of tensors, whose shapes are the same on every replica.
      root_rank: the replica whose value it is, from 0, as `rank` counts.

    Returns:
      The root's value, in every bit, NaN and -0.0 included; only a float too small for full
      precision (subnormal) may become 0. What the other replicas hold leaves no trace.

    Raises:
      UserError: no replica has this rank.
    """
    if root_rank not in range(world_size()):
        raise UserError(
            f"root_rank={root_rank!r} is the rank of no replica; use one from 0 to "
            f"{world_size() - 1}"
        )
    return _on_replicas(functools.partial(_broadcast, root_rank=root_rank), value)


def _outside() -> tf.distribute.Strategy | None:
    """Returns the strategy whose replicas a call is of that no replica makes; None of one's own."""
    if tf.distribute.in_cross_replica_context():
        return tf.distribute.get_strategy()
    return None if tf.distribute.has_strategy() else strategy_lib.latest()


def _on_replicas(operation: Callable[[list], list], value: Value) -> Value:
    """Calls the operation, of this replica's flat values, on this replica or on all those here."""
    values = tf.nest.flatten(value)
    if strategy := _outside():
        # Also eagerly: to trace a tf.function for the call would take longer, 1.7 s against 0.15 s
        # for a broadcast of 200 variables over three replicas (two CPU cores, 2026-11).
        on_all_here = strategy.run(operation, args=(values,))
        results = [strategy.experimental_local_results(each)[0] for each in on_all_here]
    else:
        results = operation(values)
    return tf.nest.pack_sequence_as(value, results)


def _reduce(values: list, *, op: str) -> list[tf.Tensor]:
    tensors = [_dense(each) for each in values]
    for tensor in tensors:
        _check_reducible(tensor, op=op)
    context = tf.distribute.get_replica_context()
    if op in ("sum", "mean"):
        return _joined(functools.partial(context.all_reduce, op.upper()), tensors)
    # tf.distribute.ReduceOp has neither minimum nor maximum.
    reduce = tf.reduce_min if op == "min" else tf.reduce_max
    return _joined(
        lambda vector: reduce(context.all_gather(vector[tf.newaxis], axis=0), axis=0), tensors
    )


def _gather(values: list, *, axis: int) -> list[tf.Tensor | tf.IndexedSlices]:
    return [
        _gather_slices(each, axis=axis)
        if isinstance(each, tf.IndexedSlices)
        else _gather_tensor(each, axis=axis)
        for each in values
    ]


def _gather_tensor(value: Any, *, axis: int) -> tf.Tensor:
    tensor = _tensor(value)
    axis = _from_front(axis, tensor)
    return tf.cast(_concatenate(tf.cast(tensor, _carrier(tensor)), axis=axis), tensor.dtype)


def _gather_slices(slices: tf.IndexedSlices, *, axis: int) -> tf.IndexedSlices:
    if axis != 0:
        raise UserError(f"axis={axis!r} of tf.IndexedSlices; they gather along axis=0 alone")
    values, indices = _gather([slices.values, slices.indices], axis=0)
    return tf.IndexedSlices(values, indices, slices.dense_shape)


def _broadcast(values: list, *, root_rank: int) -> list[tf.Tensor]:
    context = tf.distribute.get_replica_context()
    is_root = rank() == root_rank

    def from_root(vector):
        # x + -0.0 is x for every float x, while -0.0 + 0.0 is 0.0. An integer has one zero.
        # `tf.where` and not `if`, so that every replica has a gradient to reduce.
        return context.all_reduce("SUM", tf.where(is_root, vector, -tf.zeros_like(vector)))

    return _joined(from_root, [_dense(each) for each in values])


def _joined(
    collective: Callable[[tf.Tensor], tf.Tensor], tensors: list[tf.Tensor]
) -> list[tf.Tensor]:
    """Calls the collective, elementwise, on one vector for each dtype that travels."""
    results = list(tensors)
    for dtype in dict.fromkeys(map(_carrier, tensors)):
        places = [place for place, each in enumerate(tensors) if _carrier(each) == dtype]
        vectors = [tf.reshape(tf.cast(tensors[place], dtype), [-1]) for place in places]
        # A zero at the end, because to reduce an empty tensor can end the process: a segmentation
        # fault in TensorFlow 2.21 on CPUs. And always a new tensor, because TensorFlow takes one
        # object in all replicas, a constant say, for the value of one alone, and does not add.
        joined = collective(tf.concat([*vectors, tf.zeros([1], dtype)], axis=0))
        parts = tf.split(joined, [*map(tf.size, vectors), 1])
        for place, part in zip(places, parts, strict=False):
            before = tensors[place]
            result = tf.reshape(tf.cast(part, before.dtype), tf.shape(before))
            results[place] = tf.ensure_shape(result, before.shape)
    return results


def _concatenate(tensor: tf.Tensor, *, axis: int) -> tf.Tensor:
    """Returns the replicas' tensors, concatenated along this axis, counted from the front."""
    others = [each for each in range(tensor.shape.rank) if each != axis]
    front = tf.transpose(tensor, [axis, *others])
    shape = tf.shape(front)
    columns = tf.reduce_prod(shape[1:])
    rows = tf.reshape(front, [shape[0], columns])
    # As in `_joined`, if all replicas' tensors are empty: a row ahead of the first replica's, and a
    # column where there is none.
    padded = tf.pad(rows, [[int(rank() == 0), 0], [0, tf.maximum(1 - columns, 0)]])
    gathered = tf.distribute.get_replica_context().all_gather(padded, axis=0)[1:, :columns]
    front = tf.reshape(gathered, tf.concat([tf.shape(gathered)[:1], shape[1:]], axis=0))
    result = tf.transpose(front, [*range(1, axis + 1), 0, *range(axis + 1, tensor.shape.rank)])
    result.set_shape([None if each == axis else size for each, size in enumerate(tensor.shape)])
    return result


def _carrier(tensor: tf.Tensor) -> tf.DType:
    return _CARRIERS.get(tensor.dtype, tensor.dtype)


def _dense(value: Any) -> tf.Tensor:
    if isinstance(value, tf.IndexedSlices):
        raise UserError(
            "tf.IndexedSlices are not reduced or broadcast; gather them with all_gather, or make "
            "them dense with tf.convert_to_tensor"
        )
    return _tensor(value)


def _tensor(value: Any) -> tf.Tensor:
    if isinstance(value, tf.distribute.DistributedValues) and not isinstance(value, tf.Variable):
        raise UserError(
            "a per-replica value is used without its strategy; call this within "
            "`with strategy.scope():`"
        )
    tensor = tf.convert_to_tensor(value)
    if tensor.dtype not in _CARRIED:
        raise UserError(
            f"dtype {tensor.dtype.name} cannot travel between replicas; cast to bool, an integer "
            "dtype other than uint64, or a float dtype"
        )
    return tensor


def _check_reducible(tensor: tf.Tensor, *, op: str) -> None:
    if op == "mean" and not tensor.dtype.is_floating:
        raise UserError(
            f"op='mean' of dtype {tensor.dtype.name}; cast to a float dtype, or use op='sum'"
        )
    if op == "sum" and tensor.dtype == tf.bool:
        raise UserError("op='sum' of dtype bool; cast to tf.int32, or use op='max' for any")


def _from_front(axis: int, tensor: tf.Tensor) -> int:
    num_axes = tensor.shape.rank
    if num_axes is None:
        raise UserError(
            "a tensor of unknown shape cannot be gathered; give its number of axes with "
            "tf.ensure_shape"
        )
    if axis not in range(-num_axes, num_axes):
        raise UserError(
            f"axis={axis!r} is not an axis of shape {tuple(tensor.shape)}; use one from "
            f"{-num_axes} to {num_axes - 1}"
            if num_axes
            else f"axis={axis!r} of a scalar, which has no axis; gather value[tf.newaxis]"
        )
    return axis % num_axes
