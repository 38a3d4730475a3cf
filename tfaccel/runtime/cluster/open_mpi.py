"""Open MPI: reads this process's place from the environment that `mpirun` sets.

The claim is None outside of `mpirun`, or if there is one process. Open MPI does not tell a process
the addresses of other hosts.

    mpirun -n 2 tfaccel train --config=... --workdir=...        # on one host
    claim = open_mpi.claim(os.environ)
    claim.make().addresses      # ("localhost:25817", "localhost:25818")
"""

from collections.abc import Mapping

from tfaccel.common.errors import UserError
from tfaccel.runtime.cluster.addresses import base_port
from tfaccel.runtime.cluster.place import Claim, Cluster

# Names that the processes of one mpirun share: for all versions, and for Open MPI 4.
JOB_NAMES = ("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid")


def claim(environment: Mapping[str, str]) -> Claim | None:
    """Reads mpirun's variables.

    Raises:
      UserError: a variable is missing, or is not a number.
    """
    if environment.get("OMPI_COMM_WORLD_SIZE", "1") == "1":
        return None
    size, rank = (_number(environment, name) for name in ("SIZE", "RANK"))
    words = f"OMPI_COMM_WORLD_SIZE={size}, OMPI_COMM_WORLD_RANK={rank}"
    return Claim("Open MPI", size, rank, words, lambda: _cluster(environment, size, rank))


def _cluster(environment: Mapping[str, str], size: int, rank: int) -> Cluster:
    local_index, num_local = (_number(environment, f"LOCAL_{name}") for name in ("RANK", "SIZE"))
    if num_local != size:
        raise UserError(
            f"Open MPI runs {num_local} of {size} processes on this host, and does not tell where "
            "the others are; start one launcher on each host, `mpirun --map-by ppr:1:node tfaccel "
            "launch --nnodes=N --master-addr=HOST ...`, or name all by --workers=host:port,..."
        )
    job = [environment[name] for name in JOB_NAMES if environment.get(name)]
    if not job:
        raise UserError(
            f"Open MPI sets none of {', '.join(JOB_NAMES)} here, from which the processes derive "
            "their ports; give the ports by --workers=localhost:port,..."
        )
    first = base_port(job[0], num_workers=size)
    addresses = tuple(f"localhost:{first + index}" for index in range(size))
    return Cluster(addresses, rank, False, local_index, num_local, source="Open MPI")


def _number(environment: Mapping[str, str], name: str) -> int:
    text = environment.get(f"OMPI_COMM_WORLD_{name}", "")
    if not text.isdigit():
        raise UserError(f"OMPI_COMM_WORLD_{name}={text!r}; expected a number, which mpirun sets")
    return int(text)
