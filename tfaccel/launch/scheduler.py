"""Reads the nodes of `tfaccel launch` from the variables of Slurm or mpirun.

`nodes` combines them with the flags.

    srun --ntasks-per-node=1 tfaccel launch --nproc-per-node=4 train ...
    nodes(os.environ, {"num_ranks_per_node": 4})
    # {"num_nodes": 2, "node_rank": 1, "master_addr": "n9", "master_port": 21034, ...}
"""

from collections.abc import Mapping

from tfaccel.common.errors import UserError
from tfaccel.runtime.cluster import open_mpi, slurm
from tfaccel.runtime.cluster.addresses import base_port
from tfaccel.runtime.cluster.place import Claim

# The variable in which an engine that chooses the port, and passes it as a flag, gives its name.
PORT_VARIABLE = "TFACCEL_LAUNCH_PORT_CHOSEN_BY"


def nodes(environment: Mapping[str, str], given: Mapping) -> dict:
    """Returns the values of the flags, completed by those of the scheduler.

    Args:
      environment: the environment of this process.
      given: the fields of Options that flags set.

    Raises:
      UserError: the scheduler does not run one task per node, or a flag contradicts it.
    """
    found = _found(environment)
    for flag, field in (("nnodes", "num_nodes"), ("node-rank", "node_rank")):
        both = field in given and field in found
        if both and given[field] != found[field]:
            raise UserError(
                f"--{flag}={given[field]}, but the scheduler's value is {found[field]}; remove the "
                "flag"
            )
    if "master_port" in given:
        found["port_chosen_by"] = environment.get(PORT_VARIABLE, "")
    return {**found, **given}


def _found(environment: Mapping[str, str]) -> dict:
    if claim := slurm.claim(environment):
        hosts = slurm.nodes(environment)
        _check_one_per_node(claim, len(hosts), "srun --ntasks-per-node=1")
        place = {
            "master_addr": hosts[0],
            "master_port": base_port(*slurm.job(environment), num_workers=1),
            "port_chosen_by": claim.source,
        }
    elif claim := open_mpi.claim(environment):
        num_local = int(environment.get("OMPI_COMM_WORLD_LOCAL_SIZE", "1"))
        _check_one_per_node(claim, claim.num_workers // num_local, "mpirun --map-by ppr:1:node")
        place = {}  # it does not tell the nodes' addresses
    else:
        return {}
    return {"num_nodes": claim.num_workers, "node_rank": claim.worker_index, **place}


def _check_one_per_node(claim: Claim, num_nodes: int, fix: str) -> None:
    if claim.num_workers != num_nodes:
        raise UserError(
            f"{claim.source} has {claim.num_workers} tasks on {num_nodes} node(s); start only one "
            f"launcher per node, which then starts the ranks: `{fix} tfaccel launch "
            "--nproc-per-node=...`"
        )
