"""What this process takes of its host's GPUs and cores, beside others of the same job.

Takes the environment and the cluster; gives GPUs with the reason, and a number of cores.

    share_gpus(os.environ, cluster, num_visible=4)
    # (range(1, 2), "GPU 1 of 4: a share for each of 4 processes on this host")
    num_cores(os.environ, cluster)      # 16

A scheduler may have bound each process to its own already; what is left to see is then not shared
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
    """Returns which of the GPUs this process takes, and why.

    Args:
      environment: of this process.
      cluster: which of how many processes on this host it is.
      num_visible: GPUs that CUDA shows to it.

    Raises:
      UserError: all processes see the same, which cannot be divided equally.
    """
    everything = range(num_visible)
    if cluster.num_local == 1:
        return everything, f"all {num_visible} GPU(s), the default; or choose gpu_ids"
    if reason := _bound(environment, cluster, num_visible):
        return everything, reason
    each, rest = divmod(num_visible, cluster.num_local)
    if rest or not each:
        raise UserError(
            f"{num_visible} GPU(s) cannot be shared equally by {cluster.num_local} processes on "
            "this host; start as many as divide them, or give each its own by "
            "CUDA_VISIBLE_DEVICES or gpu_ids"
        )
    own = everything[cluster.local_index * each :][:each]
    return own, (
        f"GPU {', '.join(map(str, own))} of {num_visible}: a share for each of "
        f"{cluster.num_local} processes on this host"
    )


def _bound(environment: Mapping[str, str], cluster: Cluster, num_visible: int) -> str | None:
    """Returns why the GPUs that are visible are this process's alone; None where they are not."""
    on_node = environment.get("SLURM_GPUS_ON_NODE", "")
    if on_node.isdigit():
        if num_visible == int(on_node):
            return None
        return f"all {num_visible} of the node's {on_node} GPUs that Slurm leaves to this task"
    visible = environment.get("CUDA_VISIBLE_DEVICES")
    # `tfaccel launch` and mpirun give all processes on a host one environment; a program between
    # mpirun and this one may have changed it.
    is_shared = progress.VARIABLE in environment or (
        "OMPI_COMM_WORLD_SIZE" in environment and num_visible >= cluster.num_local
    )
    if visible is None or is_shared:
        return None
    return f"all {num_visible} GPU(s) of CUDA_VISIBLE_DEVICES={visible}, this process's own"


def num_cores(environment: Mapping[str, str], cluster: Cluster) -> int:
    """Returns how many CPU cores are this process's: its share, or those that it is bound to."""
    allowed = len(os.sched_getaffinity(0))
    on_host = int(environment.get("SLURM_CPUS_ON_NODE", 0))
    if "OMPI_MCA_orte_bound_at_launch" in environment:
        on_host = os.cpu_count()
    is_bound = allowed * cluster.num_local <= on_host
    return allowed if is_bound else max(1, allowed // cluster.num_local)
