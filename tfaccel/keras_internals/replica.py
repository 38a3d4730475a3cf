"""The replicas of this process: their sums with all other replicas, and their parts of a batch.

Takes a strategy and its batches; gives each replica, and what it works on.

    for replica, part in zip(local_replicas(strategy), local_batches(strategy, batch, 2)):
        with tf.device(replica.device):
            total = replica.all_reduce(tf.reduce_sum(part))
"""

import contextlib
import dataclasses
import logging
import os
import weakref
from collections.abc import Callable, Sequence

import numpy as np
import tensorflow as tf

from tfaccel.data import shards
from tfaccel.keras_internals import xla_scatter
from tfaccel.keras_internals.patching import patched
from tfaccel.runtime.agreement import of_workers

log = logging.getLogger("tfaccel")

# Whether `InXla` uses XLA's reduce-scatter and all-gather. Else it sums the whole matrix of all
# replicas, which moves up to twice the bytes. XLA's were compiled, but not measured on GPUs.
SCATTERS_IN_XLA = False

# The strategies over several workers that all agreed to reduce in XLA.
_FIRST_KEY_OF_XLA = 2**30  # TensorFlow counts its groups from 1
_reduce_in_xla: "weakref.WeakSet[tf.distribute.Strategy]" = weakref.WeakSet()


@dataclasses.dataclass(frozen=True)
class Replica:
    """One replica of this process.

    Attributes:
      local_index: The index among the replicas of this process.
      index: The index among the replicas of all workers, worker by worker.
      num_replicas: The number of replicas of all workers.
      num_local: The number of replicas of this process.
      device: TensorFlow's name of the device.
      launcher: TensorFlow's launcher of the collectives that this replica takes part in.
      reduces_in_xla: Whether you may call `all_reduce_in_xla`. If false, it might wait for ever.
      attention: What computes attentions in steps that XLA compiles (keras_internals/attention.py);
        None: Keras.
      gelu: What computes GELUs in such steps (step/gelu/choose.py); None: XLA alone.
      depthwise: What computes depthwise convolutions in such steps (step/depthwise/choose.py);
        None: XLA alone.
      norm_kernels: What computes layer normalizations in such steps (step/layer_norm/choose.py);
        None: XLA alone.
    """

    local_index: int
    index: int
    num_replicas: int
    num_local: int
    device: str
    launcher: object
    reduces_in_xla: bool
    attention: Callable | None = None
    gelu: Callable | None = None
    depthwise: Callable | None = None
    norm_kernels: Callable | None = None

    @property
    def is_gpu(self) -> bool:
        """Whether the device is a GPU."""
        return _is_gpu(self.device)

    @property
    def is_of_workers(self) -> bool:
        """Whether other processes have replicas, too."""
        return self.num_local < self.num_replicas

    @property
    def layer_kernels(self) -> dict:
        """The arguments of `layer_paths` that say what computes layers on this device."""
        return {
            "attention": self.attention,
            "gelu": self.gelu,
            "depthwise": self.depthwise,
            "norm_kernels": self.norm_kernels,
            "on_gpu": self.is_gpu,
        }

    def like(self, **changes) -> "Replica":
        """Returns a replica like this one, with other attributes."""
        return dataclasses.replace(self, **changes)

    def all_reduce(self, value: tf.Tensor) -> tf.Tensor:
        """Returns the sum of the values of all replicas.

        Call it in a `tf.function`, outside XLA, for every replica in the same order.
        """
        with _with_token_of_function(self.launcher):
            return self.launcher.all_reduce(value)

    def all_reduce_in_xla(self, values: list[tf.Tensor]) -> list[tf.Tensor]:
        """Returns the sums of all replicas' values, inside a function that XLA compiles for GPUs.

        XLA uses its own collective, which runs on NCCL, and the host need not wait for it. It sums
        100 MB over two H200s in 0.45 ms. TensorFlow's collective takes 1.5 ms longer until the host
        sees that it has ended (2026-11-22). Call it for every replica in the same order.

        Its group is another one than that of TensorFlow's collectives. TensorFlow gives each group
        one NCCL id. An id makes one communicator only, and a second one waits for a root that has
        gone ("Connection refused", TensorFlow 2.21).
        """
        return [
            tf.raw_ops.CollectiveReduceV2(
                input=each,
                group_size=self.launcher._group_size,
                group_key=_FIRST_KEY_OF_XLA + self.launcher._group_key,
                instance_key=number,  # XLA ignores it
                ordering_token=[],
                merge_op="Add",
                final_op="Id",
            )
            for number, each in enumerate(values)
        ]

    def all_reduce_in_forward(self, value: tf.Tensor, *, weight: float | tf.Tensor) -> tf.Tensor:
        """Returns the sum of all replicas' values, with the gradient of the loss over all rows.

        The loss of a replica is the mean over its own rows, and its gradients are multiplied by the
        number of these rows later. A gradient that flows through this sum to the rows of another
        replica must be multiplied by the number of this replica's rows instead.

        Args:
          value: A value of the forward pass, such as the statistics of batch norm. The value of a
            replica without rows is not counted. The value of padding rows is counted.
          weight: The rows of this replica, in any unit.
        """

        @tf.custom_gradient
        def summed(each):
            def gradient(upstream):
                own = tf.cast(weight, upstream.dtype)
                # A replica without rows gets 0. Its infinity would reach the sum of the next layer.
                return tf.math.divide_no_nan(self.all_reduce(upstream * own), own)

            return self.all_reduce(each if has_rows else tf.zeros_like(each)), gradient

        has_rows = isinstance(weight, tf.Tensor) or weight > 0
        return summed(value)

    def all_gather(self, value: tf.Tensor) -> tf.Tensor:
        """Returns the rows of the values of all replicas, [rows, ...], ordered by replica."""
        return self.launcher.all_gather(value, axis=0)

    # For sharded states (tfaccel/step/sharded_update.py); `InXla` has these methods, too.

    def sum_of(self, value: tf.Tensor) -> tf.Tensor:
        """Returns the sum of the values of all replicas, as `all_reduce` does."""
        return self.all_reduce(value)

    def reduce_scatter(self, matrix: tf.Tensor) -> tf.Tensor:
        """Returns this replica's row of the sum of all replicas' matrices.

        TensorFlow's launcher has no reduce-scatter, so each replica gets the sums of all rows.

        Args:
          matrix: [replicas, values], floating.
        """
        return self.all_reduce(matrix)[self.index]

    def gather_slices(self, own: tf.Tensor) -> tf.Tensor:
        """Returns the vectors of all replicas, [replicas, values] from [values]."""
        # TensorFlow gathers no half precision on the CPU.
        sent = tf.cast(own, tf.float32) if own.dtype.size == 2 else own
        found = tf.cast(self.all_gather(sent[tf.newaxis]), own.dtype)
        return tf.ensure_shape(found, [self.num_replicas, *own.shape])


def _with_token_of_function(launcher) -> contextlib.AbstractContextManager:
    """Returns a context in which a launcher takes its token from the function around a branch.

    The gradient of a `tf.cond` can take only tensors of that function, and the token is none.
    """
    function = tf.compat.v1.get_default_graph()
    while getattr(function, "is_control_flow_graph", False):
        function = function.outer_graph
    token = getattr(launcher, "_ordering_token", None)
    if function is tf.compat.v1.get_default_graph() or token is None:
        return contextlib.nullcontext()
    handle = function.capture(token.handle)
    return patched(launcher, "_get_ordering_token", lambda: handle)


class InXla:
    """The collectives of one replica's traced step that XLA compiles, one behind the other.

    Each replica's function is compiled by itself. If XLA ordered two collectives differently in two
    of them, the replicas would wait for each other for ever. So each collective also sends a number
    that it gets from the one before.
    """

    def __init__(self, replica: Replica):
        """Takes the replica that the step is traced for."""
        self._replica, self._last, self._num_scattered = replica, None, 0
        self._graph = tf.compat.v1.get_default_graph()

    @property
    def is_possible(self) -> bool:
        """Whether a collective can be traced here: not within a branch or loop of the step."""
        return tf.compat.v1.get_default_graph() is self._graph

    def all_reduce(self, values: list[tf.Tensor]) -> list[tf.Tensor]:
        """Returns the sums of all replicas' values, as `Replica.all_reduce_in_xla` does."""
        sums = []
        for each in values:
            sent = tf.reshape(each, [-1])
            if self._last is not None:
                sent = tf.concat([sent, tf.reshape(tf.cast(self._last, sent.dtype), [1])], axis=0)
            (total,) = self._replica.all_reduce_in_xla([sent])
            self._last = total[-1]
            size = each.shape.num_elements()
            sums.append(tf.reshape(total if total.shape[0] == size else total[:size], each.shape))
        return sums

    def sum_of(self, value: tf.Tensor) -> tf.Tensor:
        """Returns the sum of the values of all replicas."""
        return self.all_reduce([value])[0]

    def reduce_scatter(self, matrix: tf.Tensor) -> tf.Tensor:
        """Returns this replica's row of the sum of all replicas' matrices, [replicas, values]."""
        if not SCATTERS_IN_XLA:
            return self.sum_of(matrix)[self._replica.index]
        self._num_scattered += 1
        sent = self._after_last(matrix, [matrix.shape[0], 1])
        return self._own(xla_scatter.reduce_scatter(sent, channel=self._num_scattered), matrix)

    def gather_slices(self, own: tf.Tensor) -> tf.Tensor:
        """Returns the vectors of all replicas, [replicas, values] from [values]."""
        index, num_replicas = self._replica.index, self._replica.num_replicas
        if not SCATTERS_IN_XLA:
            # Each replica adds zeros to the slices of the others.
            rows = [[index, num_replicas - 1 - index], [0, 0]]
            return self.sum_of(tf.pad(own[tf.newaxis], rows))
        self._num_scattered += 1
        sent = self._after_last(own, [1])
        settings = {"num_replicas": num_replicas, "channel": self._num_scattered}
        return self._own(xla_scatter.all_gather(sent, **settings), own)

    def _after_last(self, values: tf.Tensor, shape: list[int]) -> tf.Tensor:
        """Returns the values and behind them, in that shape, what the last collective returned."""
        if self._last is None:
            return values
        last = tf.fill(shape, tf.cast(self._last, values.dtype))
        return tf.concat([values, last], axis=-1)

    def _own(self, found: tf.Tensor, sent: tf.Tensor) -> tf.Tensor:
        """Returns the result without what `_after_last` has added, and keeps a number of it."""
        self._last = tf.reshape(found, [-1])[-1]
        return found[..., : sent.shape[-1]]


def local_replicas(strategy: tf.distribute.Strategy) -> list[Replica]:
    """Returns the replicas of this process in a Mirrored or MultiWorkerMirrored strategy."""
    extended = strategy.extended
    collectives = getattr(extended, "_collective_ops", None) or extended._cross_device_ops
    devices = extended.worker_devices
    first = getattr(extended, "_id_in_cluster", 0) * len(devices)
    num_replicas = strategy.num_replicas_in_sync
    reduces_in_xla = num_replicas > 1 and _can_wait_in_xla(devices)
    if num_replicas > len(devices):
        reduces_in_xla = reduces_in_xla and strategy in _reduce_in_xla
    return [
        Replica(index, first + index, num_replicas, len(devices), device, launcher, reduces_in_xla)
        for index, (device, launcher) in enumerate(
            zip(devices, collectives._launchers, strict=True)
        )
    ]


def agree_on_reductions(strategy: tf.distribute.Strategy, *, xla: bool) -> None:
    """Decides for all workers alike whether their replicas reduce in XLA, and logs the reason.

    Every worker must call it, before it compiles a step. Until then they do not.

    Args:
      strategy: the strategy over all workers.
      xla: whether XLA compiles the steps of this worker.
    """
    devices = strategy.extended.worker_devices
    if strategy.num_replicas_in_sync == len(devices):
        return
    if of_workers(np.array([xla and _can_wait_in_xla(devices)]), strategy).all():
        _reduce_in_xla.add(strategy)
    elif any(map(_is_gpu, devices)):
        log.info(
            "cluster: the host waits for each sum over the workers, because not all of them use "
            "XLA on GPUs with more threads than GPUs (here XLA is %s, with %d threads for %d "
            "devices)",
            *("on" if xla else "off", _num_threads(), len(devices)),
        )


def _num_threads() -> int:
    return tf.config.threading.get_inter_op_parallelism_threads() or os.cpu_count() or 1


def _can_wait_in_xla(devices: Sequence[str]) -> bool:
    """Returns whether all replicas may wait in an XLA function: each one blocks a thread."""
    return all(map(_is_gpu, devices)) and _num_threads() > len(devices)


def _is_gpu(device: str) -> bool:
    return tf.DeviceSpec.from_string(device).device_type == "GPU"


def local_batches(strategy: tf.distribute.Strategy, batch, num_replicas: int) -> list:
    """Returns the part of a batch that each replica of this process gets.

    Args:
      strategy: The strategy of the replicas.
      batch: A batch from an iterator of Keras, or one of `train_on_batch`. The latter is not
        distributed; it is cut by rows into parts of nearly equal size.
      num_replicas: The number of replicas of this process.
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
    # The missing sample weights of a generator arrive as empty optionals.
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
