"""Checks the addresses of this host and of the job's workers.

check(read_network(), workers)
"""

from collections.abc import Mapping, Sequence

from tfaccel.diagnostics.doctor.facts.network import Network
from tfaccel.diagnostics.doctor.facts.workers import Workers
from tfaccel.diagnostics.doctor.table import Finding, error, merged, ok, warning
from tfaccel.runtime.cluster.addresses import is_loopback

NAME = "network"
MOST_SHOWN = 6


def check(facts: Network, workers: Workers | None) -> Finding:
    """Checks whether the other hosts of the job can reach this worker, as far as this host knows.

    Args:
      facts: the interfaces of this host.
      workers: the hosts of the job; None if the environment names no job.
    """
    running = [each for each in facts.interfaces if each.is_running and each.addresses]
    shown = listed([f"{each.name} {each.addresses[0]}" for each in running])
    if workers is None:
        return ok(NAME, f"{shown or 'no interface has an address'}; only several hosts need it")
    this = f"this is worker {workers.worker_index} of {workers.num_workers}, at {workers.own}"
    if not workers.has_other_hosts:
        return ok(NAME, f"{this}; all workers are on this host")
    faults = [*_own_address(facts, workers, this), *_routes(facts, workers)]
    held = [facts.holder(each) for each in workers.own_addresses]
    interface = next((f" on {each.name}" for each in held if each), "")
    others = len(workers.routes)
    return merged(NAME, faults, f"{this}{interface}; it has a route to {others} other host(s)")


def _own_address(facts: Network, workers: Workers, this: str) -> list[Finding]:
    """Returns the fault of this worker's own address, if there is one."""
    if workers.problem:
        said = f"{this}, whose address is not known: {workers.problem}"
        return [warning(NAME, said, _getent(workers.own))]
    addresses = workers.own_addresses
    if all(map(is_loopback, addresses)):
        said = f"{this}, which is {addresses[0]} here; no other host can use that address"
        fix = "name this worker by its address in the network that all hosts share"
        judge = error if workers.own in addresses else warning  # others may know the name better
        return [judge(NAME, said, fix)]
    held = [each for each in map(facts.holder, addresses) if each]
    if not held:
        said = f"{this} ({', '.join(addresses)}), but no interface of this host has that address"
        fix = (
            "check whether this worker's index and addresses are those of another host; if the "
            "ports are forwarded to a container, nothing is wrong"
        )
        return [warning(NAME, said, fix)]
    if not any(each.is_running for each in held):
        name = held[0].name
        fix = f"`ip link set {name} up`, check the cable, or use the address of another interface"
        return [error(NAME, f"{this}, on {name}, which is down", fix)]
    return []


def _routes(facts: Network, workers: Workers) -> list[Finding]:
    """Returns the hosts to which there is no way, or a way from another address of this host."""
    faults = []
    for why, hosts in _by_value(workers.unreachable).items():
        fix = f"check `ip route get {hosts[0]}`, or use addresses of a network that all hosts share"
        faults.append(error(NAME, f"this host cannot send to {listed(hosts)}: {why}", fix))
    for why, hosts in _by_value(workers.unknown).items():
        said = f"the address of {listed(hosts)} is not known: {why}"
        faults.append(warning(NAME, said, _getent(hosts[0])))
    own = [each for each in map(facts.holder, workers.own_addresses) if each]
    for source, hosts in _by_value(workers.routes).items():
        used = facts.holder(source)
        if own and used and used not in own and not is_loopback(source):
            said = (
                f"packets to {listed(hosts)} leave by {used.name} ({source}), but this worker's "
                f"address, {workers.own}, is on {own[0].name}; it may not be reached there"
            )
            fix = f"give this worker the address {source}, or check `ip route get {hosts[0]}`"
            faults.append(warning(NAME, said, fix))
    return faults


def _by_value(said: Mapping[str, str]) -> dict[str, list[str]]:
    """Returns the hosts of which the same is said."""
    hosts = {}
    for host, each in said.items():
        hosts.setdefault(each, []).append(host)
    return hosts


def _getent(host: str) -> str:
    return f"check `getent hosts {host}`, or name workers by their IP addresses"


def listed(names: Sequence[str]) -> str:
    """Returns the first names, and how many follow."""
    more = f" and {len(names) - MOST_SHOWN} more" if len(names) > MOST_SHOWN else ""
    return ", ".join(names[:MOST_SHOWN]) + more
