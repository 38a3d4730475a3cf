"""Sums, means, gathers and broadcasts over replicas, as in Horovod, with `tf.distribute`.

Each function takes a tensor or a nest of tensors on each replica, and every replica gets the same
result.

    def train_step(images):  # for strategy.run
        loss = ...
        return all_reduce(loss, op="mean")

    examples = all_gather(per_replica_examples)  # outside a replica function

Every function works in four places, eagerly and in a `tf.function`:

- In a replica function, which `strategy.run` calls: a value belongs to this replica.
- In the `train_step` or `test_step` of a model, or in a loss or layer that it calls.
- Outside of these, for example in a callback: a per-replica value has the value of each of this
  worker's replicas. Any other value is the value of each replica, as in `strategy.run`. The result
  is an ordinary tensor on each worker. So `all_reduce(1) == world_size()` everywhere, and with one
  GPU per worker a plain tensor is that worker's value. The replicas are those of the strategy in
  scope or, without a scope, those of `tfaccel.setup`. Put a call that runs in every step into a
  `tf.function`: eagerly, TensorFlow traces each gather, min and max again, in 0.1 s or more.
- Without a run and a scope: the job has one replica of rank 0.

MirroredStrategy and MultiWorkerMirroredStrategy are supported. A collective ends when the last
replica has joined it, so every replica of every worker must make the same calls in the same order.
With MirroredStrategy, TensorFlow forbids collectives within `tf.cond`, `tf.while_loop` and a
`tf.function` that the replica function calls.

dtypes are bool, integers up to 64 bits except uint64, and floats. A result has the dtype of its
value. A Python list is a nest of values, not a tensor. In a replica function every result is
differentiable with respect to the sum of all replicas' losses.
"""

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator
from typing import Any

import tensorflow as tf

from tfaccel.common.errors import UserError
from tfaccel.runtime import strategy as strategy_lib

# A tensor, a tf.IndexedSlices or a tf.distribute.DistributedValues of them, or a nest of these.
Value = Any

_OPS = ("sum", "mean", "min", "max")

# TensorFlow's collectives accept float16, float32, float64, int32 and int64, but MirroredStrategy
# reduces int32 on one device. Every other dtype is sent as a wider one. This includes bfloat16,
# which TensorFlow can reduce but not gather; with float32, its sum is rounded only once.
_CARRIERS = {
    **dict.fromkeys(
        (tf.bool, tf.int8, tf.uint8, tf.int16, tf.uint16, tf.int32, tf.uint32), tf.int64
    ),
    tf.bfloat16: tf.float32,
}
_CARRIED = (tf.float16, tf.float32, tf.float64, tf.int64, *_CARRIERS)


# What joins the replicas while a `train_step` or `test_step` is traced for one of them.
# A thread traces one replica, or a part of its batch, at a time.
_tracing = threading.local()


@contextlib.contextmanager
def within_step(replicas) -> Iterator[None]:
    """Within the context, an object joins the replicas, because no strategy is in scope.

    Args:
      replicas: has `num_replicas`, `rank`, `local_rank`, `all_reduce(tensor, op)`,
        `all_gather(tensor, axis)` and `broadcast(tensor, root_rank)`. These are called within its
        context `unnoticed()`.
    """
    before = _step()
    _tracing.step = replicas
    try:
        yield
    finally:
        _tracing.step = before


class OneReplica:
    """What joins the replicas of a step that has only one: every result is its own value."""

    num_replicas, rank, local_rank = 1, 0, 0
    unnoticed = staticmethod(contextlib.nullcontext)

    def all_reduce(self, value: tf.Tensor, op: str) -> tf.Tensor:
        """Returns the value, for every op."""
        return tf.identity(value)

    def all_gather(self, value: tf.Tensor, axis: int = 0) -> tf.Tensor:
        """Returns the value."""
        return tf.identity(value)

    def broadcast(self, value: tf.Tensor, root_rank: int) -> tf.Tensor:
        """Returns the value."""
        return tf.identity(value)


def _step():
    """Returns what joins the replicas of the step that this thread traces; None outside one."""
    return getattr(_tracing, "step", None)


def world_size() -> int:
    """Returns the number of replicas over all workers; 1 without a run or a strategy."""
    if step := _step():
        return step.num_replicas
    return (_outside() or tf.distribute.get_strategy()).num_replicas_in_sync


def rank() -> int:
    """Returns this replica's index among all replicas, from 0, worker by worker.

    Outside a replica function, this is the index of this worker's first replica, so `rank() == 0`
    is true only on the first worker.
    """
    if step := _step():
        return step.rank
    if strategy := _outside():
        ranks = strategy.experimental_distribute_values_from_function(
            lambda context: context.replica_id_in_sync_group
        )
        return strategy.experimental_local_results(ranks)[0]
    context = tf.distribute.get_replica_context()
    # A Python number even in a tf.function, because that is traced once for each replica.
    return int(tf.get_static_value(tf.convert_to_tensor(context.replica_id_in_sync_group)))


def local_rank() -> int:
    """Returns this replica's index on its worker, from 0; 0 outside a replica function."""
    if step := _step():
        return step.local_rank
    if _outside() or not tf.distribute.has_strategy():
        return 0
    return rank() % len(tf.distribute.get_strategy().extended.worker_devices)


def all_reduce(value: Value, *, op: str = "sum") -> Value:
    """Reduces the replicas' tensors element by element.

    The gradient of a sum is the sum of the replicas' gradients; that of a mean is their mean.

    Args:
      value: a tensor or a nest of tensors with the same shapes on every replica.
      op: "sum", "mean", "min" or "max". For "min" and "max" each replica briefly stores the tensors
        of all replicas. float16 is added in float16, so even a mean is infinite if the sum is above
        65504. Integers have no mean. For bool, "min" means `all`, "max" means `any`, and there is
        no sum.

    Returns:
      The result, with the shapes, dtypes and structure of `value`.

    Raises:
      UserError: `op` is unknown, or is undefined for the value's dtype.
    """
    if op not in _OPS:
        raise UserError(f"op={op!r} is not a reduction; use one of {', '.join(_OPS)}")
    return _on_replicas(functools.partial(_reduce, op=op), value)


def all_gather(value: Value, *, axis: int = 0) -> Value:
    """Concatenates the replicas' tensors in the order of their ranks.

    Args:
      value: a tensor, a `tf.IndexedSlices` or a nest of them. Shapes are the same on every replica,
        except for the size along `axis`, which may differ and be 0.
      axis: the axis to concatenate along; a negative axis counts from the last. `tf.IndexedSlices`
        have only axis 0: their values and indices are gathered, and the dense shape stays, so the
        result is the sum of the replicas' slices.

    Returns:
      The result, with the dtypes and structure of `value` and the summed sizes along `axis`.

    Raises:
      UserError: the tensor has no such axis, or its number of axes is unknown.
    """
    return _on_replicas(functools.partial(_gather, axis=axis), value)


def broadcast(value: Value, *, root_rank: int = 0) -> Value:
    """Gives every replica the value of one replica.

    Args:
      value: a tensor or a nest of tensors with the same shapes on every replica.
      root_rank: the rank of the replica to take the value from, from 0.

    Returns:
      The root's value, with every bit, including NaN and -0.0. Only a float that is too small for
      full precision (subnormal) may become 0. The other replicas' values have no effect.

    Raises:
      UserError: no replica has this rank.
    """
    if root_rank not in range(world_size()):
        raise UserError(
            f"root_rank={root_rank!r}, but no replica has this rank; use one from 0 to "
            f"{world_size() - 1}"
        )
    return _on_replicas(functools.partial(_broadcast, root_rank=root_rank), value)


def _outside() -> tf.distribute.Strategy | None:
    """Returns the strategy to run on for a call outside a replica function; else None."""
    if tf.distribute.in_cross_replica_context():
        return tf.distribute.get_strategy()
    return None if tf.distribute.has_strategy() else strategy_lib.latest()


def _on_replicas(operation: Callable[[list], list], value: Value) -> Value:
    """Runs the operation on this replica or, outside a replica function, on all replicas here."""
    values = tf.nest.flatten(value)
    if step := _step():
        with step.unnoticed():
            results = operation(values)
    elif strategy := _outside():
        # Run this eagerly, too: tracing a tf.function for one call takes longer, 1.7 s against
        # 0.15 s for a broadcast of 200 variables over three replicas (two CPU cores, 2026-11).
        on_all_here = strategy.run(operation, args=(values,))
        results = [strategy.experimental_local_results(each)[0] for each in on_all_here]
    else:
        results = operation(values)
    return tf.nest.pack_sequence_as(value, results)


def _reduce(values: list, *, op: str) -> list[tf.Tensor]:
    tensors = [_dense(each) for each in values]
    for tensor in tensors:
        _check_reducible(tensor, op=op)
    if step := _step():
        return [step.all_reduce(each, op) for each in tensors]
    context = tf.distribute.get_replica_context()
    if op in ("sum", "mean"):
        return _joined(functools.partial(context.all_reduce, op.upper()), tensors)
    # tf.distribute.ReduceOp has no minimum and no maximum.
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
    if step := _step():
        return step.all_gather(tensor, axis)
    return tf.cast(_concatenate(tf.cast(tensor, _carrier(tensor)), axis=axis), tensor.dtype)


def _gather_slices(slices: tf.IndexedSlices, *, axis: int) -> tf.IndexedSlices:
    if axis != 0:
        raise UserError(f"axis={axis!r} of tf.IndexedSlices; only axis=0 can be gathered")
    values, indices = _gather([slices.values, slices.indices], axis=0)
    return tf.IndexedSlices(values, indices, slices.dense_shape)


def _broadcast(values: list, *, root_rank: int) -> list[tf.Tensor]:
    if step := _step():
        return [step.broadcast(_dense(each), root_rank) for each in values]
    context = tf.distribute.get_replica_context()
    is_root = rank() == root_rank

    def from_root(vector):
        # x + -0.0 is x for every float x, while -0.0 + 0.0 is 0.0. An integer has only one zero.
        # This uses `tf.where`, not `if`, so that every replica has a gradient to reduce.
        return context.all_reduce("SUM", tf.where(is_root, vector, -tf.zeros_like(vector)))

    return _joined(from_root, [_dense(each) for each in values])


def _joined(
    collective: Callable[[tf.Tensor], tf.Tensor], tensors: list[tf.Tensor]
) -> list[tf.Tensor]:
    """Calls an elementwise collective once per dtype, on all tensors joined into one vector."""
    results = list(tensors)
    for dtype in dict.fromkeys(map(_carrier, tensors)):
        places = [place for place, each in enumerate(tensors) if _carrier(each) == dtype]
        vectors = [tf.reshape(tf.cast(tensors[place], dtype), [-1]) for place in places]
        # The zero at the end is needed because reducing an empty tensor can end the process: a
        # segmentation fault in TensorFlow 2.21 on CPUs. The concat also makes a new tensor. If all
        # replicas pass the same object, such as a constant, TensorFlow does not add it up.
        joined = collective(tf.concat([*vectors, tf.zeros([1], dtype)], axis=0))
        parts = tf.split(joined, [*map(tf.size, vectors), 1])
        for place, part in zip(places, parts, strict=False):
            before = tensors[place]
            result = tf.reshape(tf.cast(part, before.dtype), tf.shape(before))
            results[place] = tf.ensure_shape(result, before.shape)
    return results


def _concatenate(tensor: tf.Tensor, *, axis: int) -> tf.Tensor:
    """Returns the replicas' tensors, concatenated along `axis`, which is not negative."""
    others = [each for each in range(tensor.shape.rank) if each != axis]
    front = tf.transpose(tensor, [axis, *others])
    shape = tf.shape(front)
    columns = tf.reduce_prod(shape[1:])
    rows = tf.reshape(front, [shape[0], columns])
    # Avoid empty tensors, as in `_joined`: add a row before the first replica's, and a column
    # if there is none.
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
            "tf.IndexedSlices cannot be reduced or broadcast; gather them with all_gather, or make "
            "them dense with tf.convert_to_tensor"
        )
    return _tensor(value)


def _tensor(value: Any) -> tf.Tensor:
    if isinstance(value, tf.distribute.DistributedValues) and not isinstance(value, tf.Variable):
        raise UserError(
            "a per-replica value is used without its strategy; make this call within "
            "`with strategy.scope():`"
        )
    tensor = tf.convert_to_tensor(value)
    if tensor.dtype not in _CARRIED:
        raise UserError(
            f"dtype {tensor.dtype.name} cannot be sent between replicas; cast to bool, an integer "
            "dtype other than uint64, or a float dtype"
        )
    return tensor


def _check_reducible(tensor: tf.Tensor, *, op: str) -> None:
    if op == "mean" and not tensor.dtype.is_floating:
        raise UserError(
            f"op='mean' is undefined for dtype {tensor.dtype.name}; cast to float, or use op='sum'"
        )
    if op == "sum" and tensor.dtype == tf.bool:
        raise UserError("op='sum' is undefined for dtype bool; cast to tf.int32, or use op='max'")


def _from_front(axis: int, tensor: tf.Tensor) -> int:
    num_axes = tensor.shape.rank
    if num_axes is None:
        raise UserError(
            "a tensor of unknown rank cannot be gathered; set its number of axes with "
            "tf.ensure_shape"
        )
    if axis not in range(-num_axes, num_axes):
        raise UserError(
            f"axis={axis!r} is not an axis of shape {tuple(tensor.shape)}; use one from "
            f"{-num_axes} to {num_axes - 1}"
            if num_axes
            else f"axis={axis!r}, but a scalar has no axis; gather value[tf.newaxis]"
        )
    return axis % num_axes
