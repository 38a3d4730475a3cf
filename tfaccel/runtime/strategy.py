"""Makes the process's one `tf.distribute` strategy, from the cluster and the devices.

strategy = make_strategy(cluster, ("/gpu:0", "/gpu:1"), peer_timeout_s=60)
"""

import functools

import tensorflow as tf

from tfaccel.common.errors import UserError
from tfaccel.common.run_log import summary
from tfaccel.runtime.cluster import Cluster
from tfaccel.runtime.cluster.addresses import check_free
from tfaccel.runtime.private_names import configure_coordination


def make_strategy(
    cluster: Cluster, devices: tuple[str, ...], *, peer_timeout_s: int = 60
) -> tf.distribute.Strategy:
    """Returns the process's one strategy, with a replica on each device of every worker.

    With several workers this must precede any other use of TensorFlow's devices. It waits until all
    workers have started, for ever if one does not, and ignores Ctrl-C meanwhile.

    Args:
      cluster: the workers, and which of them this is.
      devices: this process's devices, such as ("/gpu:0", "/gpu:1"). With several workers, these are
        all GPUs that TensorFlow may see, or one CPU.
      peer_timeout_s: seconds of one worker's silence after which TensorFlow stops the others.

    Raises:
      UserError: there are several workers, and TensorFlow was already used or joined a cluster.
    """
    global _latest
    # Separate functions, so that with one worker the timeout does not make another strategy.
    if cluster.num_workers == 1:
        _latest = _mirrored(devices)
    else:
        _latest = _multi_worker(cluster, devices, peer_timeout_s)
    return _latest


_latest: tf.distribute.Strategy | None = None


def latest() -> tf.distribute.Strategy | None:
    """Returns the strategy that this process made last; None if it made none."""
    return _latest


@functools.cache
def _mirrored(devices: tuple[str, ...]) -> tf.distribute.Strategy:
    """Returns the strategy of a single process.

    There is only one per set of devices. A second one would number its collectives from the start
    again, and TensorFlow would confuse them ("Shape mismatch in the collective instance").
    """
    return tf.distribute.MirroredStrategy(list(devices))


@functools.cache
def _multi_worker(
    cluster: Cluster, devices: tuple[str, ...], peer_timeout_s: int
) -> tf.distribute.Strategy:
    """Returns the strategy over all workers when all have started. There is only one."""
    if _multi_worker.cache_info().currsize:
        raise UserError(
            "this process has already joined its cluster with other settings; call tfaccel.setup() "
            "only once"
        )
    gpus = [each for each in devices if "gpu" in each]
    kinds = tf.distribute.experimental.CommunicationImplementation
    summary(
        "cluster: this is worker %d (%s); waiting for %d workers: %s",
        cluster.worker_index,
        cluster.addresses[cluster.worker_index],
        cluster.num_workers,
        ", ".join(cluster.addresses),
    )
    check_free(cluster.addresses[cluster.worker_index])  # otherwise TensorFlow would wait for ever
    # The timeout of TensorFlow's coordination service, which is 10 s by default.
    configure_coordination(cluster.task(0), cluster.jobs, heartbeat_timeout_s=peer_timeout_s)
    job, index = cluster.job_and_index(cluster.worker_index)
    try:
        strategy = tf.distribute.MultiWorkerMirroredStrategy(
            tf.distribute.cluster_resolver.SimpleClusterResolver(
                tf.train.ClusterSpec(cluster.jobs),
                task_type=job,
                task_id=index,
                num_accelerators={"GPU": len(gpus)},
                rpc_layer="grpc",
            ),
            tf.distribute.experimental.CommunicationOptions(
                implementation=kinds.NCCL if gpus else kinds.RING
            ),
        )
    except (RuntimeError, ValueError) as error:
        raise UserError(
            f"TensorFlow was used before it could join its cluster ({error}); call tfaccel.setup() "
            "before any other use of TensorFlow"
        ) from error
    summary("cluster: all %d workers have started", cluster.num_workers)
    return strategy
