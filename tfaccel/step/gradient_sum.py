"""The sum of the gradients over all replicas, without the rest of the step, to measure it.

The buffers are as large as those of the training step, and the same collective sums them.

    alone = GradientSum(model, gradients_as=None)   # a compiled model that has trained a step
    alone.num_bytes                                 # 375848
    alone.run(3)                                    # three sums; it waits for the end of the last
"""

import functools
import math
from collections.abc import Callable, Iterable

import keras
import tensorflow as tf

from tfaccel.keras_internals.replica import Replica, local_replicas
from tfaccel.keras_internals.traced import UNORDERED
from tfaccel.step import replica_steps
from tfaccel.step.totals import sent_as


class GradientSum:
    """The all-reduce of a model's gradients, on buffers of its own.

    It needs no more memory than a training step, which holds the gradients and a copy of them in
    one vector.

    Attributes:
      num_replicas: the number of replicas of all workers.
      num_bytes: the bytes that each replica adds to the sum.
    """

    def __init__(self, model: keras.Model, *, gradients_as: str | None):
        """Makes the buffers on this process's devices.

        Args:
          model: a compiled model with trainable weights. It has trained a step, because the first
            step decides whether XLA compiles it, and so which collective it uses.
          gradients_as: the dtype in which gradients are sent; None for their own dtype.
        """
        self._replicas = local_replicas(model.distribute_strategy)
        self.num_replicas = self._replicas[0].num_replicas
        in_xla = model.train_function.xla and self._replicas[0].reduces_in_xla
        most = replica_steps.bucket_bytes_of(self._replicas[0], in_xla=in_xla)
        by_dtype = sizes_by_dtype(model.trainable_variables, gradients_as=gradients_as)
        sizes = [
            (dtype, each)
            for dtype, size in by_dtype.items()
            for each in _cut(size, size if most is None else most // dtype.size)
        ]
        self.num_bytes = sum(dtype.size * size for dtype, size in sizes)
        self._buffers = []
        for replica in self._replicas:
            with tf.device(replica.device):
                self._buffers.append([tf.ones([size], dtype) for dtype, size in sizes])
        self._sums = [_sum_of(each, in_xla=in_xla) for each in self._replicas]
        attributes = UNORDERED if in_xla else None
        self._call = tf.function(self._on_each, autograph=False, experimental_attributes=attributes)

    def run(self, num_times: int) -> list[list[tf.Tensor]]:
        """Sums the buffers, and waits until the last sum has ended on this process's replicas.

        The host waits only for the last sum. So a GPU need not wait for the host between two sums,
        as in a launch of several steps. Every worker must give the same number.

        Args:
          num_times: the number of sums, at least 1. Each one sums the same buffers.

        Returns:
          The last sums: for each replica here, one or several vectors for each dtype, as in a step.
          All buffers hold ones, so each value is the number of replicas.
        """
        for _ in range(num_times):
            sums = self._call(self._buffers)
        for replica, own in zip(self._replicas, sums, strict=True):
            with tf.device(replica.device):  # otherwise TensorFlow would copy the whole buffer
                for each in own:
                    each[0].numpy()  # waits for the device
        return sums

    def _on_each(self, buffers: list[list[tf.Tensor]]) -> list[list[tf.Tensor]]:
        pairs = zip(self._sums, buffers, strict=True)
        calls = [functools.partial(sum_, own) for sum_, own in pairs]
        return replica_steps.on_each(self._replicas, calls)


def sizes_by_dtype(
    variables: Iterable[keras.Variable], *, gradients_as: str | None
) -> dict[tf.DType, int]:
    """Returns the number of gradient values that are sent in each dtype.

    A step sends a few vectors for each dtype (tfaccel/step/totals.py). One of them also has the few
    values of metrics and of batch norm, which are not counted here.

    Args:
      variables: the trainable variables.
      gradients_as: the dtype in which gradients are sent; None for their own dtype.
    """
    sizes = {}
    for each in variables:
        dtype = sent_as(tf.as_dtype(each.dtype), gradients_as)
        sizes[dtype] = sizes.get(dtype, 0) + math.prod(each.shape)
    return sizes


def _cut(size: int, most: int) -> list[int]:
    """Returns sizes of at most `most` that add up to `size`."""
    return [min(most, size - start) for start in range(0, size, most)] if size else [0]


def _sum_of(replica: Replica, *, in_xla: bool) -> Callable[[list[tf.Tensor]], list[tf.Tensor]]:
    """Returns the function that sums the replica's buffers as `replica_step` does."""
    if in_xla:
        return replica_steps.compiled(replica, replica.all_reduce_in_xla)
    return lambda buffers: [replica.all_reduce(each) for each in buffers]
