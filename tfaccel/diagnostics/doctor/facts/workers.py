"""The addresses of this job's hosts, as this machine sees them.

answers = child.start("tfaccel.diagnostics.doctor.facts.workers", {...}, seconds=5).answers()
workers_of(cluster, answers)

They are asked for in a child, because a name server may not answer. No packet is sent to a worker.
"""

import dataclasses
import functools
import socket
from collections.abc import Callable, Mapping
from typing import Any

from tfaccel.diagnostics.doctor.facts.child import Answers
from tfaccel.runtime.cluster import Cluster
from tfaccel.runtime.cluster.addresses import host_of, look_up

OWN = "own host"
MOST_HOSTS = 64  # others are like these
PORT = 9  # any: a UDP socket that is connected sends nothing


@dataclasses.dataclass(frozen=True)
class Workers:
    """The hosts of a job.

    Attributes:
      worker_index: the index of this worker.
      num_workers: the number of all workers.
      own: this worker's host, as the job names it.
      own_addresses: the IP addresses of that host; empty if it has none.
      problem: why it has none; else "".
      routes: by other host, the address from which this machine sends to it.
      unreachable: by other host, why this machine cannot send to its address.
      unknown: by other host, why its address is not known.
    """

    worker_index: int
    num_workers: int
    own: str
    own_addresses: tuple[str, ...] = ()
    problem: str = ""
    routes: Mapping[str, str] = dataclasses.field(default_factory=dict)
    unreachable: Mapping[str, str] = dataclasses.field(default_factory=dict)
    unknown: Mapping[str, str] = dataclasses.field(default_factory=dict)

    @property
    def has_other_hosts(self) -> bool:
        """True if the job has workers on other hosts."""
        return bool(self.routes or self.unreachable or self.unknown)


def hosts(cluster: Cluster) -> tuple[str, list[str]]:
    """Returns this worker's host, and the other hosts of the job without repetitions."""
    several = list(dict.fromkeys(map(host_of, cluster.addresses)))
    own = host_of(cluster.addresses[cluster.worker_index])
    return own, [each for each in several if each != own][:MOST_HOSTS]


def workers_of(cluster: Cluster, answers: Answers) -> Workers:
    """Returns the hosts of a job from the answers of a child."""
    own, others = hosts(cluster)
    told = {each: answers.facts.get(each, {"unknown": answers.why_not(each)}) for each in others}
    return Workers(
        worker_index=cluster.worker_index,
        num_workers=cluster.num_workers,
        own=own,
        own_addresses=tuple(answers.facts.get(OWN, ())),
        problem=answers.why_not(OWN) or "",
        **{
            kind: {host: each[kind] for host, each in told.items() if kind in each}
            for kind in ("routes", "unreachable", "unknown")
        },
    )


def route(host: str) -> dict[str, str]:
    """Returns the field of `Workers` that a host belongs in, and what that field says of it."""
    try:
        address = min(look_up(host), key=lambda each: ":" in each)
    except OSError as error:
        return {"unknown": error.strerror or str(error)}
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((address, PORT))
            return {"routes": probe.getsockname()[0]}
    except OSError as error:
        return {"unreachable": error.strerror or str(error)}


def stages(arguments: Mapping) -> dict[str, Callable[[], Any]]:
    """Returns a child's stages: a look-up of its own host, and a route to each other host."""
    own = {OWN: lambda: sorted(look_up(arguments["own"]))}
    return own | {each: functools.partial(route, each) for each in arguments["others"]}
