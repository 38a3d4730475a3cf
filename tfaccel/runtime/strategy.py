"""The `tf.distribute` strategy that follows from the cluster and the devices.

Takes the `Cluster` and the devices that `runtime` chose; gives the process's one strategy.

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
    """Returns the process's one strategy, with a replica on each of these devices of every worker.

    With several workers this waits until all have started, for ever if one does not (and Ctrl-C is
    not heard meanwhile), and must come before any other use of TensorFlow's devices.

    Args:
      cluster: of how many workers, and which this is.
      devices: of this process, e.g. ("/gpu:0", "/gpu:1"): with several workers every GPU that
        TensorFlow may see, or one CPU.
      peer_timeout_s: after how long a silence of one worker TensorFlow stops the others.

    Raises:
      UserError: there are several workers, and TensorFlow has started or joined them otherwise.
    """
    global _latest
    # Apart, so that it is one strategy for the same devices whatever the timeout.
    if cluster.num_workers == 1:
        _latest = _mirrored(devices)
    else:
        _latest = _multi_worker(cluster, devices, peer_timeout_s)
    return _latest


_latest: tf.distribute.Strategy | None = None


def latest() -> tf.distribute.Strategy | None:
    """Returns the strategy that this process made last, which is its run's; None without a run."""
    return _latest


@functools.cache
def _mirrored(devices: tuple[str, ...]) -> tf.distribute.Strategy:
    """Returns the strategy of a process on its own.

    A second one on the same devices would number its collectives from the start again, and
    TensorFlow would take them for the first one's ("Shape mismatch in the collective instance").
    """
    return tf.distribute.MirroredStrategy(list(devices))


@functools.cache
def _multi_worker(
    cluster: Cluster, devices: tuple[str, ...], peer_timeout_s: int
) -> tf.distribute.Strategy:
    """Returns the strategy over all workers once they are here; one, as `_mirrored` says."""
    if _multi_worker.cache_info().currsize:
        raise UserError(
            "this process has joined its cluster before, with other settings; call tfaccel.setup() "
            "once, in one way"
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
    check_free(cluster.addresses[cluster.worker_index])  # TensorFlow would wait for ever
    # TensorFlow's own coordination service waits as long as we do; else it waits 10 s.
    configure_coordination(cluster.task(0), cluster.jobs, heartbeat_timeout_s=peer_timeout_s)
    try:
        strategy = tf.distribute.MultiWorkerMirroredStrategy(
            _resolver(cluster, num_gpus=len(gpus)),
            tf.distribute.experimental.CommunicationOptions(
                implementation=kinds.NCCL if gpus else kinds.RING
            ),
        )
    except (RuntimeError, ValueError) as error:
        raise UserError(
            f"TensorFlow was used before it could join its cluster ({error}); call tfaccel.setup() "
            "before any other use of TensorFlow"
        ) from error
    summary("cluster: all %d workers are here", cluster.num_workers)
    return strategy


def _resolver(cluster: Cluster, *, num_gpus: int):
    job, index = cluster.job_and_index(cluster.worker_index)
    return tf.distribute.cluster_resolver.SimpleClusterResolver(
        tf.train.ClusterSpec(cluster.jobs),
        task_type=job,
        task_id=index,
        num_accelerators={"GPU": num_gpus},
        rpc_layer="grpc",
    )
