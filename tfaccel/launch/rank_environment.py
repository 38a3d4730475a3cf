"""The free ports of this machine, and the environment that gives a rank its place.

with free_ports(2) as ports:
    ...     # (21034, 25110), reserved until the context ends
environment(["10.0.0.1:21034", "10.0.0.2:25110"], rank=1)["TF_CONFIG"]
"""

import contextlib
import json
import os
import random
import socket
from collections.abc import Iterator, Sequence

from tfaccel.common.errors import RunError
from tfaccel.launch.rendezvous import TOKEN_VARIABLE
from tfaccel.runtime.cluster.addresses import FIRST_PORT, LAST_PORT

# Variables of a job that is not the launcher's, which would contradict a rank's TF_CONFIG.
FOREIGN = ("SLURM_", "OMPI_", "PMIX_", "PMI_", "PRTE_")


@contextlib.contextmanager
def free_ports(count: int) -> Iterator[tuple[int, ...]]:
    """Yields free ports of this machine, which no other process can take within the context."""
    with contextlib.ExitStack() as stack:
        ports = []
        candidates = random.SystemRandom().sample(range(FIRST_PORT, LAST_PORT + 1), 100 + 2 * count)
        for port in candidates:
            bound = stack.enter_context(socket.socket())
            try:
                bound.bind(("", port))
            except OSError:
                continue
            ports.append(port)
            if len(ports) == count:
                break
        else:
            raise RunError(
                f"fewer than {count} ports are free in {FIRST_PORT}..{LAST_PORT}; end processes "
                "that use them"
            )
        yield tuple(ports)


def alone() -> dict[str, str]:
    """Returns this process's environment for a process that is no part of its job."""
    return {name: value for name, value in _without_job().items() if name != "TF_CONFIG"}


def environment(addresses: Sequence[str], rank: int) -> dict[str, str]:
    """Returns a rank's environment: the launcher's without its job's variables, with TF_CONFIG."""
    kept = _without_job()
    if len(addresses) == 1:
        return kept
    task = {"type": "worker", "index": rank}
    return kept | {"TF_CONFIG": json.dumps({"cluster": {"worker": addresses}, "task": task})}


def _without_job() -> dict[str, str]:
    return {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(FOREIGN) and name != TOKEN_VARIABLE
    }
