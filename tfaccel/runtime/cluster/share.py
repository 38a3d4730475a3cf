"""This process's share of its host's GPUs and cores, which other processes of the job use, too.

    share_gpus(os.environ, cluster, num_visible=4)
    # (range(1, 2), "GPU 1 of 4: a share for each of 4 processes on this host")
    num_cores(os.environ, cluster)      # 16

A scheduler may already have bound each process to its own GPUs and cores, which are then not shared
again.
"""

import os
from collections.abc import Mapping

from tfaccel.common.errors import UserError
from tfaccel.process import progress
from tfaccel.runtime.cluster.place import Cluster


def share_gpus(
    environment: Mapping[str, str], cluster: Cluster, num_visible: int
) -> tuple[range, str]:
    """Returns the GPUs that this process uses, and why.

    Args:
      environment: the environment of this process.
      cluster: the job's processes, with those of this host.
      num_visible: number of GPUs that CUDA shows to this process.

    Raises:
      UserError: all processes see the same GPUs, and their number cannot be divided equally.
    """
    everything = range(num_visible)
    if cluster.num_local == 1:
        return everything, f"all {num_visible} GPU(s), the default; gpu_ids can choose others"
    if reason := _bound(environment, cluster, num_visible):
        return everything, reason
    each, rest = divmod(num_visible, cluster.num_local)
    if rest or not each:
        raise UserError(
            f"{num_visible} GPU(s) cannot be shared equally by {cluster.num_local} processes on "
            "this host; start a number of processes that divides the GPUs, or give each process "
            "its own GPUs by CUDA_VISIBLE_DEVICES or gpu_ids"
        )
    own = everything[cluster.local_index * each :][:each]
    return own, (
        f"GPU {', '.join(map(str, own))} of {num_visible}: a share for each of "
        f"{cluster.num_local} processes on this host"
    )


def _bound(environment: Mapping[str, str], cluster: Cluster, num_visible: int) -> str | None:
    """Returns why the visible GPUs belong to this process alone; None if they are shared."""
    on_node = environment.get("SLURM_GPUS_ON_NODE", "")
    if on_node.isdigit():
        if num_visible == int(on_node):
            return None
        return f"all {num_visible} of the node's {on_node} GPUs that Slurm gives to this task"
    visible = environment.get("CUDA_VISIBLE_DEVICES")
    # `tfaccel launch` and mpirun give all processes of a host the same environment, but a program
    # between mpirun and this process may have changed it.
    is_shared = progress.VARIABLE in environment or (
        "OMPI_COMM_WORLD_SIZE" in environment and num_visible >= cluster.num_local
    )
    if visible is None or is_shared:
        return None
    return f"all {num_visible} GPU(s) of CUDA_VISIBLE_DEVICES={visible}, this process's own"


def num_cores(environment: Mapping[str, str], cluster: Cluster) -> int:
    """Returns the number of CPU cores of this process: those it is bound to, or its share."""
    allowed = len(os.sched_getaffinity(0))
    on_host = int(environment.get("SLURM_CPUS_ON_NODE", 0))
    if "OMPI_MCA_orte_bound_at_launch" in environment:
        on_host = os.cpu_count()
    is_bound = allowed * cluster.num_local <= on_host
    return allowed if is_bound else max(1, allowed // cluster.num_local)
