"""Who this process is: one of how many workers, which of them, and where the others are.

Takes flags and the environment; gives a `Cluster`. Needs no TensorFlow.

    cluster = find(os.environ)
    cluster.num_workers, cluster.worker_index, cluster.source   # 2, 1, "Slurm step 12.0"
    cluster.addresses                                           # ("n9:25817", "n10:25818")

Asked in this order: flags, TF_CONFIG (which Ray's trainer sets too), Slurm, Open MPI. The first
that speaks is believed, and the others must not contradict it. Who says nothing of several workers
leaves a process on its own.
"""

from collections.abc import Mapping, Sequence

from tfaccel.common.errors import UserError
from tfaccel.runtime.cluster import explicit, open_mpi, slurm, tf_config
from tfaccel.runtime.cluster.place import Claim, Cluster

__all__ = ["Cluster", "check_one_process", "find"]


def find(
    environment: Mapping[str, str],
    *,
    workers: Sequence[str] | None = None,
    worker_index: int | None = None,
) -> Cluster:
    """Returns the job's workers, and this process's place among them. Changes nothing.

    Args:
      environment: of this process.
      workers: host:port of each worker, the chief's first, where the caller says so.
      worker_index: which of them this is; None for what the environment says of this process.

    Raises:
      UserError: two that speak contradict each other, or one of them says what cannot be.
    """
    claims = [each.claim(environment) for each in (tf_config, slurm, open_mpi)]
    claims = [each for each in claims if each]
    if workers is not None:
        claims.insert(0, explicit.claim(workers, worker_index, others=claims))
    elif worker_index is not None:
        raise UserError(f"worker_index={worker_index} without workers; give host:port of each")
    if not claims:
        return Cluster(source=slurm.why_alone(environment) or Cluster.source)
    for other in claims[1:]:
        _check_agree(claims[0], other)
    return claims[0].make()


def check_one_process(cluster: Cluster, command: str) -> None:
    """Raises UserError where there are several workers.

    Args:
      cluster: the job's workers.
      command: what is of one process, in words for the message.
    """
    if cluster.num_workers > 1:
        raise UserError(
            f"{command} is of one process and all its GPUs, not of {cluster.num_workers} workers "
            f"({cluster.source}); start it once, without TF_CONFIG"
        )


def _check_agree(one: Claim, other: Claim) -> None:
    """Raises UserError unless both say the same of this process."""
    if (one.num_workers, one.worker_index) != (other.num_workers, other.worker_index):
        raise UserError(
            f"{_said(one)}, but {_said(other)}; expected the same of both: unset the variables of "
            "the one that is wrong, e.g. with `env -u NAME tfaccel ...`"
        )


def _said(claim: Claim) -> str:
    return (
        f"{claim.source} says that this is worker {claim.worker_index} of {claim.num_workers} "
        f"({claim.words})"
    )
