"""Checks the addresses that NCCL uses on RoCE ports, and the size of their packets.

addresses(ports, settings), packets(ports, read_network())
"""

from collections.abc import Mapping, Sequence

from tfaccel.diagnostics.doctor.checks.network import listed
from tfaccel.diagnostics.doctor.facts.infiniband import Port
from tfaccel.diagnostics.doctor.facts.nccl_settings import Setting
from tfaccel.diagnostics.doctor.facts.network import Network
from tfaccel.diagnostics.doctor.table import Finding, error, warning

NAME = "InfiniBand"
GID_INDEX = "NCCL_IB_GID_INDEX"
# Choices with which NCCL looks for an address itself; the default is IPv4 and version 2.
OWN_CHOICES = ("NCCL_IB_ADDR_FAMILY", "NCCL_IB_ADDR_RANGE", "NCCL_IB_ROCE_VERSION_NUM")
# The headers of a RoCE packet (iboe_get_mtu in Linux); its data is of a power of two, at most 4096.
HEADERS = 96


def addresses(used: Sequence[Port], settings: Mapping[str, Setting]) -> list[Finding]:
    """Returns the faults of the addresses that RoCE ports use; InfiniBand chooses its own."""
    roce = [each for each in used if each.is_roce]
    forced = settings.get(GID_INDEX)
    if forced and (index := as_number(forced)) is not None and index >= 0:
        return [fault for each in roce if (fault := _forced_gid(each, forced, index))][:1]
    if any(each in settings for each in OWN_CHOICES):
        return []
    without = [each for each in roce if each.gids and not _version_2(each)]
    if not without:
        return []
    gids = without[0].gids
    taken = next((index for index, each in enumerate(gids) if each.is_ipv4), 0)
    said = (
        f"{names_of(without)}: no address of RoCE v2 with IPv4, which NCCL looks for, so it takes "
        f"entry {taken} ({gids[taken].kind or 'of an unknown version'})"
    )
    where = without[0].interface or "the port's network interface"
    fix = f"give {where} an IPv4 address, or set NCCL_IB_ADDR_FAMILY=AF_INET6"
    return [warning(NAME, said, fix)]


def _forced_gid(port: Port, forced: Setting, index: int) -> Finding | None:
    """Returns the fault of an entry that a setting forces; None if it is good."""
    better = _version_2(port)
    number = len(port.gids)
    fix = f"{forced.removal}: NCCL chooses an entry itself" + (
        f"; or set {GID_INDEX}={better[0]}, which is RoCE v2" if better else ""
    )
    if index >= number:
        said = f"{forced}, but {port.name} has only the entries 0 to {number - 1}"
        return error(NAME, f"{said}; NCCL cannot connect", fix)
    gid = port.gids[index]
    if gid.is_empty:
        return error(
            NAME, f"{forced}: this entry of {port.name} is empty, or not of this container", fix
        )
    if "v2" not in gid.kind and better:
        said = f"{forced} is {gid.kind} on {port.name}, which routers do not pass on"
        return warning(NAME, said, fix)
    return None


def _version_2(port: Port) -> list[int]:
    """Returns the entries of a port with an IPv4 address of RoCE v2."""
    return [
        index
        for index, each in enumerate(port.gids)
        if each.kind == "RoCE v2" and each.is_ipv4 and not each.is_empty
    ]


def packets(used: Sequence[Port], network: Network) -> list[str]:
    """Returns what is told about the packets of each MTU."""
    mtus = {each.name: each.mtu for each in network.interfaces}
    by_mtu = {}
    for each in used:
        if mtu := each.is_roce and mtus.get(each.interface):
            by_mtu.setdefault(mtu, []).append(each.interface)
    return [
        f"the MTU of {listed(names)} is {mtu:,}, so packets carry {_payload(mtu):,} bytes"
        for mtu, names in by_mtu.items()
    ]


def _payload(mtu: int) -> int:
    """Returns the bytes of data in a RoCE packet."""
    return next((each for each in (4096, 2048, 1024, 512) if each + HEADERS <= mtu), 256)


def names_of(ports: Sequence[Port]) -> str:
    """Returns the names of ports as NCCL writes them."""
    return listed([each.name for each in ports])


def as_number(setting: Setting) -> int | None:
    """Returns the setting as a number; None if it is none."""
    try:
        return int(setting.value, 0)
    except ValueError:
        return None
