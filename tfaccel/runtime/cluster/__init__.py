"""Finds the workers of the job, and which of them this process is.

`find` reads flags and the environment and returns a `Cluster`. It does not need TensorFlow.

    cluster = find(os.environ)
    cluster.num_workers, cluster.worker_index, cluster.source   # 2, 1, "Slurm step 12.0"
    cluster.addresses                                           # ("n9:25817", "n10:25818")

The sources, in order: flags, TF_CONFIG (which Ray's trainer sets too), Slurm, Open MPI. The first
that names several workers is used, and the others must not contradict it. If none does, this
process is the only worker.
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
    """Returns the job's workers, and this process's place among them. It changes nothing.

    Args:
      environment: the environment of this process.
      workers: host:port of each worker, the chief's first; None to read the environment.
      worker_index: this process's index in `workers`; None to read the environment.

    Raises:
      UserError: two sources contradict each other, or a source has an invalid value.
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
    """Raises UserError if there are several workers, but the command needs a single process."""
    if cluster.num_workers > 1:
        raise UserError(
            f"{command} needs one process with all its GPUs, but there are {cluster.num_workers} "
            f"workers ({cluster.source}); start it once, without TF_CONFIG"
        )


def _check_agree(one: Claim, other: Claim) -> None:
    """Raises UserError unless both sources name the same place for this process."""
    if (one.num_workers, one.worker_index) != (other.num_workers, other.worker_index):
        raise UserError(
            f"{_said(one)}, but {_said(other)}; they must agree, so unset the variables of the "
            "wrong one, e.g. with `env -u NAME tfaccel ...`"
        )


def _said(claim: Claim) -> str:
    return (
        f"{claim.source} says that this is worker {claim.worker_index} of {claim.num_workers} "
        f"({claim.words})"
    )
