"""The network interfaces of the host.

network = read_network()
network.interfaces[0].name, network.holder("10.0.0.1")

Linux describes the files in Documentation/ABI/testing/sysfs-class-net.
"""

import dataclasses
import pathlib
import socket
from collections.abc import Iterator, Mapping, Sequence

import psutil

from tfaccel.diagnostics.doctor.facts.files import ROOT, entries, number, text

IP = (socket.AF_INET, socket.AF_INET6)
UP = 0x1  # IFF_UP of a network interface's flags


@dataclasses.dataclass(frozen=True)
class Interface:
    """A network interface.

    Attributes:
      name: such as "eth0".
      is_running: whether it is up and has a link.
      mtu: the largest packet in bytes; 0 if it is unknown.
      addresses: its IP addresses, those of IPv4 first.
    """

    name: str
    is_running: bool
    mtu: int
    addresses: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Network:
    """The interfaces of this host, in the order in which NCCL looks at them."""

    interfaces: tuple[Interface, ...]

    def holder(self, address: str) -> Interface | None:
        """Returns the interface that has this IP address."""
        return next((each for each in self.interfaces if address in each.addresses), None)


def read_network(
    root: pathlib.Path = ROOT, addresses: Mapping[str, Sequence[str]] | None = None
) -> Network:
    """Reads the interfaces from the kernel.

    Args:
      root: the folder of /sys.
      addresses: the IP addresses of each interface; by default those of this machine.
    """
    addresses = _addresses() if addresses is None else addresses
    return Network(tuple(_interfaces(root / "sys/class/net", addresses)))


def _addresses() -> dict[str, list[str]]:
    """Returns the IP addresses of this machine's interfaces, those of IPv4 first."""
    try:
        found = psutil.net_if_addrs()
    except OSError:
        return {}
    # An address that holds for one link has the interface's name after a percent sign.
    return {
        name: [each.address.partition("%")[0] for each in several if each.family in IP]
        for name, several in found.items()
    }


def _interfaces(
    folder: pathlib.Path, addresses: Mapping[str, Sequence[str]]
) -> Iterator[Interface]:
    """Yields the interfaces as getifaddrs orders them: by number, those with IPv4 first."""
    found = [each for each in entries(folder) if (each / "flags").is_file()]
    for each in sorted(found, key=lambda each: (_is_ipv6(addresses, each.name), _index(each))):
        is_up = number(text(each / "flags"), base=16) & UP
        has_link = text(each / "operstate") in ("up", "unknown")  # lo's is unknown
        yield Interface(
            name=each.name,
            is_running=bool(is_up and has_link),
            mtu=number(text(each / "mtu")),
            addresses=tuple(addresses.get(each.name, ())),
        )


def _is_ipv6(addresses: Mapping[str, Sequence[str]], name: str) -> bool:
    return all(":" in each for each in addresses.get(name, ()))


def _index(interface: pathlib.Path) -> int:
    return number(text(interface / "ifindex"))
