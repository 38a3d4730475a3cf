"""This process's replicas, the sums over all replicas, and each replica's part of a batch."""

import dataclasses
import os
from collections.abc import Sequence

import tensorflow as tf

from tfaccel.data import shards


@dataclasses.dataclass(frozen=True)
class Replica:
    """One of this process's replicas.

    Attributes:
      local_index: among this process's replicas.
      index: among all workers' replicas, worker by worker.
      device: what TensorFlow calls it.
      num_replicas: of all workers.
      launcher: TensorFlow's, of the collectives that this replica takes part in.
      reduces_in_xla: whether `all_reduce_in_xla` is for it, and will not wait for ever.
    """

    local_index: int
    index: int
    num_replicas: int
    device: str
    launcher: object
    reduces_in_xla: bool

    @property
    def is_gpu(self) -> bool:
        """Whether the device is a GPU."""
        return _is_gpu(self.device)

    def all_reduce(self, value: tf.Tensor) -> tf.Tensor:
        """Returns the sum of every replica's `value`.

        Must be called for every replica in the same order, in a `tf.function`, outside XLA.
        """
        return self.launcher.all_reduce(value)

    def all_reduce_in_xla(self, values: list[tf.Tensor]) -> list[tf.Tensor]:
        """Returns the sums of every replica's values, in a function that XLA compiles for a GPU.

        XLA then has its own collective, by NCCL, which the host need not wait for: 0.45 ms for 100
        MB between two H200s, where TensorFlow's has 1.5 ms more until the host sees its end
        (2026-11-22). Must be called for every replica in the same order.
        """
        return [
            tf.raw_ops.CollectiveReduceV2(
                input=each,
                group_size=self.launcher._group_size,
                group_key=self.launcher._group_key,
                instance_key=number,  # of no use to XLA
                ordering_token=[],
                merge_op="Add",
                final_op="Id",
            )
            for number, each in enumerate(values)
        ]

    def all_reduce_in_forward(self, value: tf.Tensor, *, weight: float | tf.Tensor) -> tf.Tensor:
        """Returns the sum of every replica's `value`, with the gradient of the loss over all rows.

        A replica's loss is a mean over its own rows, and its gradients are multiplied by their
        number afterwards. What reaches another replica's rows through the sum has to bring the
        number of its own rows instead.

        Args:
          value: that the forward pass sums, e.g. batch norm's statistics. That of a replica
            without rows is not counted; of padding, it is.
          weight: this replica's rows, in any unit.
        """

        @tf.custom_gradient
        def summed(each):
            def gradient(upstream):
                own = tf.cast(weight, upstream.dtype)
                # Of a replica without rows 0, or the next layer's sum would have its infinity.
                return tf.math.divide_no_nan(self.all_reduce(upstream * own), own)

            return self.all_reduce(each if has_rows else tf.zeros_like(each)), gradient

        has_rows = isinstance(weight, tf.Tensor) or weight > 0
        return summed(value)

    def all_gather(self, value: tf.Tensor) -> tf.Tensor:
        """Returns the rows of every replica's `value`, [rows, ...], in order of the replicas."""
        return self.launcher.all_gather(value, axis=0)


def local_replicas(strategy: tf.distribute.Strategy) -> list[Replica]:
    """Returns this process's replicas of a Mirrored or MultiWorkerMirrored strategy."""
    extended = strategy.extended
    collectives = getattr(extended, "_collective_ops", None) or extended._cross_device_ops
    devices = extended.worker_devices
    first = getattr(extended, "_id_in_cluster", 0) * len(devices)
    num_replicas = strategy.num_replicas_in_sync
    reduces_in_xla = num_replicas == len(devices) > 1 and _can_wait_in_xla(devices)
    return [
        Replica(index, first + index, num_replicas, device, launcher, reduces_in_xla)
        for index, (device, launcher) in enumerate(
            zip(devices, collectives._launchers, strict=True)
        )
    ]


def _can_wait_in_xla(devices: Sequence[str]) -> bool:
    """Returns whether all may be in an XLA function at once: each takes a thread as it waits."""
    num_threads = tf.config.threading.get_inter_op_parallelism_threads() or os.cpu_count() or 1
    return all(map(_is_gpu, devices)) and num_threads > len(devices)


def _is_gpu(device: str) -> bool:
    return tf.DeviceSpec.from_string(device).device_type == "GPU"


def local_batches(strategy: tf.distribute.Strategy, batch, num_replicas: int) -> list:
    """Returns each local replica's part of what Keras's iterators give.

    A batch that is not distributed (`train_on_batch`) is cut by rows into even parts.
    """
    leaves = tf.nest.flatten(batch)
    if any(isinstance(each, tf.distribute.DistributedValues) for each in leaves):
        parts = [
            [None] * num_replicas if each is None else strategy.experimental_local_results(each)
            for each in leaves
        ]
    elif num_replicas == 1:
        parts = [(each,) for each in leaves]
    else:
        parts = [_cut(each, num_replicas) for each in leaves]
    return [
        tf.nest.map_structure(_or_none, tf.nest.pack_sequence_as(batch, each))
        for each in zip(*parts, strict=True)
    ]


def _or_none(value):
    # A generator's missing sample weights arrive as empty optionals.
    return None if isinstance(value, tf.experimental.Optional) else value


def _cut(value, num_parts: int) -> list:
    if value is None:
        return [None] * num_parts
    slices = [
        shards.part(value.shape[0], num_replicas=num_parts, replica_index=index)
        for index in range(num_parts)
    ]
    if isinstance(value, tf.SparseTensor):
        rest = list(value.shape[1:])
        return [
            tf.sparse.slice(value, [each.start] + [0] * len(rest), [each.stop - each.start, *rest])
            for each in slices
        ]
    return [value[each] for each in slices]
