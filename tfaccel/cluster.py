"""Which worker of the job this process is, and the `tf.distribute` strategy that follows from it.

Takes TF_CONFIG and the devices that `runtime` chose; gives a `Cluster` and a strategy.

    cluster = from_environment(os.environ)
    strategy = make_strategy(cluster, ("/gpu:0", "/gpu:1"), peer_timeout_s=60)

Private names relied on:
  TensorFlow 2.21: context.context().configure_coordination_service,
    coordination_config_pb2.CoordinatedJob.
"""

import dataclasses
import functools
import json
import logging
import re
from collections.abc import Mapping, Sequence

import tensorflow as tf
from tensorflow.compiler.xla.tsl.protobuf import coordination_config_pb2
from tensorflow.python.eager import context

from tfaccel.errors import UserError

log = logging.getLogger("tfaccel")

JOBS = ("chief", "worker")  # in the order in which TensorFlow counts their replicas
EXPECTED = (
    'expected {"cluster": {"worker": ["host:port", ...]}, "task": {"type": "worker", "index": 0}}'
)


@dataclasses.dataclass(frozen=True)
class Cluster:
    """The workers of the job, and this worker's place among them.

    Attributes:
      addresses: host:port of each worker, the chief's first; none for a process on its own.
      worker_index: which of them this is, from 0.
      has_chief: whether TF_CONFIG calls worker 0 "chief"; TensorFlow then counts the others from 0.
    """

    addresses: tuple[str, ...] = ()
    worker_index: int = 0
    has_chief: bool = False

    @property
    def num_workers(self) -> int:
        """Processes in the job."""
        return max(1, len(self.addresses))

    @property
    def num_workers_here(self) -> int:
        """Processes of the job on this machine, going by the addresses' hosts."""
        hosts = [each.rpartition(":")[0] for each in self.addresses]
        return hosts.count(hosts[self.worker_index]) if hosts else 1

    @property
    def is_chief(self) -> bool:
        """Whether this worker is the one that writes what is written once."""
        return self.worker_index == 0

    def task(self, worker_index: int) -> str:
        """Returns what TensorFlow calls a worker, e.g. "/job:worker/replica:0/task:1"."""
        job, index = self._job_and_index(worker_index)
        return f"/job:{job}/replica:0/task:{index}"

    def _job_and_index(self, worker_index: int) -> tuple[str, int]:
        if self.has_chief:
            return ("chief", 0) if worker_index == 0 else ("worker", worker_index - 1)
        return "worker", worker_index


def from_environment(environment: Mapping[str, str]) -> Cluster:
    """Reads TF_CONFIG; a process without one, or the only worker in it, is a job of its own.

    Raises:
      UserError: TF_CONFIG is not what TensorFlow defines, or has other jobs than chief and worker.
    """
    text = environment.get("TF_CONFIG") or "{}"
    try:
        tf_config = json.loads(text)
        jobs = dict(tf_config.get("cluster", {}))
    except (AttributeError, TypeError, ValueError) as error:
        raise UserError(f"TF_CONFIG={text!r} cannot be read ({error}); {EXPECTED}") from error
    _check_jobs(jobs)
    tasks = [(job, index) for job in JOBS for index in range(len(jobs.get(job, ())))]
    if len(tasks) <= 1:
        return Cluster()
    addresses = tuple(jobs[job][index] for job, index in tasks)
    if len(set(addresses)) < len(addresses):
        raise UserError(
            f"TF_CONFIG names an address twice ({', '.join(addresses)}); give every worker a "
            "host:port of its own"
        )
    worker_index = _worker_index(tf_config.get("task"), tasks)
    return Cluster(addresses, worker_index, has_chief=tasks[0][0] == "chief")


def _check_jobs(jobs: Mapping) -> None:
    """Raises UserError unless these are a chief at most, and workers, by address."""
    for job, addresses in jobs.items():
        if job not in JOBS:
            raise UserError(
                f"TF_CONFIG has the job {job!r}; tfaccel trains on a chief and workers alone: take "
                f"{job!r} out of the cluster, and do not start tfaccel there"
            )
        if not isinstance(addresses, list) or not all(map(_is_address, addresses)):
            raise UserError(f"TF_CONFIG has {job}={addresses!r}; {EXPECTED}")
    if len(jobs.get("chief", ())) > 1:
        raise UserError(
            f"TF_CONFIG has chief={jobs['chief']}; keep one, and make workers of others"
        )


def _is_address(value) -> bool:
    return isinstance(value, str) and re.fullmatch(r".+:\d+", value) is not None


def _worker_index(task, tasks: Sequence[tuple[str, int]]) -> int:
    """Returns which of `tasks`, (job, index), the `task` of TF_CONFIG is."""
    names = [f"{job} {index}" for job, index in tasks]
    name = f"{task.get('type')} {task.get('index')}" if isinstance(task, dict) else None
    if name not in names:
        raise UserError(
            f"TF_CONFIG has task={task!r}, which is not in its cluster; expected the type and "
            f"index of one of: {', '.join(names)}"
        )
    return names.index(name)


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
    # Apart, so that it is one strategy for the same devices whatever the timeout.
    if cluster.num_workers == 1:
        return _mirrored(devices)
    return _multi_worker(cluster, devices, peer_timeout_s)


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
    log.info(
        "cluster: this is worker %d (%s); waiting for %d workers: %s",
        cluster.worker_index,
        cluster.addresses[cluster.worker_index],
        cluster.num_workers,
        ", ".join(cluster.addresses),
    )
    _set_heartbeat(cluster, peer_timeout_s)
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
    log.info("cluster: all %d workers are here", cluster.num_workers)
    return strategy


def _jobs(cluster: Cluster) -> dict[str, list[str]]:
    """Returns the addresses by job, as TF_CONFIG had them."""
    jobs = {}
    for worker_index, address in enumerate(cluster.addresses):
        jobs.setdefault(cluster._job_and_index(worker_index)[0], []).append(address)
    return jobs


def _resolver(cluster: Cluster, *, num_gpus: int):
    job, index = cluster._job_and_index(cluster.worker_index)
    return tf.distribute.cluster_resolver.SimpleClusterResolver(
        tf.train.ClusterSpec(_jobs(cluster)),
        task_type=job,
        task_id=index,
        num_accelerators={"GPU": num_gpus},
        rpc_layer="grpc",
    )


def _set_heartbeat(cluster: Cluster, peer_timeout_s: int) -> None:
    """Lets TensorFlow's own coordination service wait as long as we do; else it waits 10 s."""
    context.context().configure_coordination_service(
        service_type="standalone",
        service_leader=cluster.task(0),
        heartbeat_timeout_in_ms=1000 * peer_timeout_s,
        coordinated_jobs=[
            coordination_config_pb2.CoordinatedJob(name=job, num_tasks=len(addresses))
            for job, addresses in _jobs(cluster).items()
        ],
    )
