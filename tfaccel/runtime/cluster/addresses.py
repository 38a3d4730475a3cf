"""Checks workers' addresses, chooses ports, and finds the workers of one host.

    base_port("slurm", "12", "0", num_workers=4)    # 25817: workers have 25817 to 25820
    check_private(("10.0.0.1:2222", "n2:2222"))     # UserError for a public address
    check_free("10.0.0.1:2222")                     # RunError if the port is taken here

TensorFlow's ports have no password and listen on every interface of the host. Whoever reaches one
can read files and run code there.
"""

import hashlib
import ipaddress
import logging
import re
import socket
import time
from collections.abc import Iterable, Sequence

from tfaccel.common.errors import RunError, UserError

log = logging.getLogger("tfaccel")

# Linux uses ports from 32768 for outgoing connections, and services have the low ones.
FIRST_PORT, LAST_PORT = 20000, 31999

# A pod of Kubernetes gets its name only when it is placed on a node.
NAME_TIMEOUT_S = 300.0
RETRY_S = 1.0


def is_address(value) -> bool:
    """Returns whether `value` is host:port."""
    named = isinstance(value, str) and re.fullmatch(r"[^\s,]+:\d{1,5}", value)
    return bool(named) and 0 < port_of(value) < 2**16


def check_addresses(addresses: Sequence[str], *, of: str) -> None:
    """Raises UserError unless every address, from source `of`, is a different host:port."""
    for each in addresses:
        if not is_address(each):
            raise UserError(
                f"{of} has the address {each!r}; expected host:port, the port from 1 to 65535"
            )
    if len(set(addresses)) < len(addresses):
        raise UserError(
            f"{of} has an address twice ({', '.join(addresses)}); give every worker its own "
            "host:port"
        )


def host_of(address: str) -> str:
    """Returns the host of host:port, such as ::1 for [::1]:2222."""
    return address.rpartition(":")[0].strip("[]")


def port_of(address: str) -> int:
    """Returns the port of host:port."""
    return int(address.rpartition(":")[2])


def in_url(host: str) -> str:
    """Returns a host in the form that a port can follow, such as [::1] for ::1."""
    return f"[{host}]" if ":" in host else host


def is_loopback(host: str) -> bool:
    """Returns whether this is an IP address that no other machine can reach."""
    address = _parsed(host)
    return address is not None and address.is_loopback


def is_any(host: str) -> bool:
    """Returns whether this is 0.0.0.0 or ::, which mean all addresses of a machine."""
    address = _parsed(host)
    return address is not None and address.is_unspecified


def _parsed(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    """Returns a host as an IP address; None if it is a name."""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return None
    return getattr(address, "ipv4_mapped", None) or address


def public(found: Iterable[str]) -> list[str]:
    """Returns those IP addresses that may be reached from the internet."""
    return [each for each in found if ipaddress.ip_address(each).is_global]


def look_up(host: str) -> set[str]:
    """Returns a host's IP addresses.

    Raises:
      OSError: the host has no address.
    """
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except UnicodeError as error:  # "a..b"
        raise OSError(f"{host!r} is not a host name") from error
    return {each[4][0].partition("%")[0] for each in found}


def neighbours(addresses: Sequence[str], worker_index: int) -> tuple[int, int]:
    """Returns a worker's index among the workers of its host, from 0, and their number."""
    hosts = list(map(host_of, addresses))
    own = hosts[worker_index]
    return hosts[:worker_index].count(own), hosts.count(own)


def base_port(*shared: str, num_workers: int) -> int:
    """Returns the port of worker 0. Worker i has the port that is i higher.

    Args:
      *shared: texts that all workers of this job share, and other jobs do not.
      num_workers: number of processes in the job.
    """
    digest = hashlib.blake2b("\n".join(shared).encode(), digest_size=8).digest()
    return FIRST_PORT + int.from_bytes(digest) % (LAST_PORT - FIRST_PORT + 2 - num_workers)


def check_private(addresses: Sequence[str]) -> None:
    """Checks that all hosts have private addresses, and waits for hosts without an address.

    Raises:
      UserError: a host has a public address.
      RunError: a host has no address after 5 minutes.
    """
    for worker_index, address in enumerate(addresses):
        host = host_of(address)
        open_to_all = public(_wait_for(host))
        if open_to_all:
            where = host if host == open_to_all[0] else f"{host}, {open_to_all[0]}"
            raise UserError(
                f"worker {worker_index} ({address}) has a public address ({where}), and "
                "TensorFlow's ports have no password: whoever reaches one can run code there; use "
                "private addresses or, if a firewall closes the ports, set "
                "runtime.allow_public_network"
            )


def _wait_for(host: str) -> set[str]:
    """Returns the host's addresses, and waits until there is one."""
    ends = None
    while True:
        try:
            return look_up(host)
        except OSError as error:
            if ends is None:
                log.warning("cluster: %s has no address (%s); waiting for it", host, error)
                ends = time.monotonic() + NAME_TIMEOUT_S
            if time.monotonic() > ends:
                raise RunError(
                    f"host {host} has had no address for {NAME_TIMEOUT_S:.0f} s ({error}); check "
                    "the name, or use another"
                ) from error
            time.sleep(RETRY_S)


def check_free(address: str) -> None:
    """Raises RunError if this process cannot listen on the address's port.

    This is not a UserError, because another start with other ports may succeed. TensorFlow listens
    on every interface, whatever the host.
    """
    port = port_of(address)
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # TensorFlow sets it, too
        try:
            probe.bind(("", port))
        except OSError as error:
            raise RunError(
                f"port {port} of this worker ({address}) cannot be used ({error.strerror}); end "
                "the process that uses it, or choose another port"
            ) from error
