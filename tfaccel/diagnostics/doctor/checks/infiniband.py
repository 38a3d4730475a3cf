"""Checks the ports of InfiniBand and RoCE cards, and the settings with which NCCL uses them.

check(read_cards(), read_network(), nccl_settings(os.environ), has_other_hosts=True)

NCCL takes active ports of link layer InfiniBand or Ethernet (RoCE). If there is none, it uses TCP,
which is slower and loads the CPU (src/transport/net_ib in NCCL).
"""

from collections.abc import Mapping, Sequence

from tfaccel.diagnostics.doctor.checks.name_filter import NameFilter
from tfaccel.diagnostics.doctor.checks.network import listed
from tfaccel.diagnostics.doctor.facts.infiniband import Cards, Port
from tfaccel.diagnostics.doctor.facts.nccl_settings import Setting
from tfaccel.diagnostics.doctor.facts.network import Network
from tfaccel.diagnostics.doctor.table import Finding, error, merged, ok, warning

NAME, NET = "InfiniBand", "NCCL_NET"
DISABLE, HCA, GID_INDEX = "NCCL_IB_DISABLE", "NCCL_IB_HCA", "NCCL_IB_GID_INDEX"
# Choices with which NCCL looks for a RoCE address itself; the default is IPv4 and version 2.
OWN_CHOICES = ("NCCL_IB_ADDR_FAMILY", "NCCL_IB_ADDR_RANGE", "NCCL_IB_ROCE_VERSION_NUM")
# NCCL names no number, and clusters lift the limit. A buffer has 4 MiB, and each channel has some.
LOCKED_WANTED = 2**30
# The headers of a RoCE packet (iboe_get_mtu in Linux); its data is of a power of two, at most 4096.
HEADERS = 96


def check(
    facts: Cards, network: Network, settings: Mapping[str, Setting], *, has_other_hosts: bool
) -> Finding:
    """Checks all cards, on a machine whose jobs use NCCL.

    Args:
      facts: the cards of this host.
      network: its interfaces, which have the MTU of RoCE.
      settings: NCCL's settings.
      has_other_hosts: whether the environment names a job of several hosts.
    """
    usable = [each for each in facts.ports if each.is_usable]
    if plugin := _plugin(settings):
        return ok(NAME, f"{plugin}: that plugin decides how NCCL uses {_names(usable) or 'cards'}")
    if not usable:
        faults = _without_ports(facts, settings, has_other_hosts=has_other_hosts)
        return merged(NAME, faults, "no active port; NCCL would use TCP between hosts")
    if off := _switched_off(settings):
        said = f"{off}: NCCL uses TCP, and not {_names(usable)} ({usable[0].rate} each)"
        return warning(NAME, said, off.removal)
    if not facts.has_device_files:
        said = f"{_names(usable)} are active, but /dev/infiniband is missing, so NCCL uses TCP"
        fix = "give the container the device files: docker run --device=/dev/infiniband"
        return warning(NAME, said, fix)
    used = usable
    if named := settings.get(HCA):
        names = NameFilter(named.value)
        used = [each for each in usable if names.matches(each.device, each.number)]
        if not used:
            return _no_such_card(facts, usable, named, settings)
    faults = [*_gids(used, settings), *_locked_memory(facts)]
    return merged(NAME, faults, _fine(facts, network, used))


def _plugin(settings: Mapping[str, Setting]) -> Setting | None:
    """Returns the setting that names a network plugin, which may use cards in its own way."""
    net, plugin = settings.get(NET), settings.get("NCCL_NET_PLUGIN")
    if net and net.value.lower() not in ("", "ib", "socket"):
        return net
    return plugin if plugin and plugin.value not in ("", "none") else None


def _switched_off(settings: Mapping[str, Setting]) -> Setting | None:
    """Returns the setting with which NCCL uses TCP in spite of cards."""
    net, off = settings.get(NET), settings.get(DISABLE)
    if net and net.value.lower() == "socket":
        return net
    return off if off and _number(off) else None


def _is_forced(settings: Mapping[str, Setting]) -> bool:
    return NET in settings and settings[NET].value.lower() == "ib"


def _without_ports(
    facts: Cards, settings: Mapping[str, Setting], *, has_other_hosts: bool
) -> list[Finding]:
    """Returns the faults of a machine on which NCCL finds no port."""
    named = settings.get(HCA)
    states = listed([f"{each.name} {each.state}" for each in facts.ports])
    why = f"no port is active ({states})" if facts.ports else "this host has no card"
    faults = []
    if _is_forced(settings):
        fix = f"{settings[NET].removal}, or bring a port up (`ibstat` shows them)"
        faults.append(error(NAME, f"{settings[NET]}, but {why}; NCCL does not start", fix))
    elif facts.ports and has_other_hosts:
        fix = "check the cables and the subnet manager; `ibstat` shows the ports"
        faults.append(warning(NAME, f"{why}; NCCL uses TCP between hosts", fix))
    if named and not facts.ports and named.value[:1] != "^":
        fix = f"{named.removal}, or make the cards visible (docker run --device=/dev/infiniband)"
        faults.append(warning(NAME, f"{named}, but {why}; NCCL uses TCP between hosts", fix))
    return faults


def _no_such_card(
    facts: Cards, usable: Sequence[Port], named: Setting, settings: Mapping[str, Setting]
) -> Finding:
    """Returns the fault of a list that leaves NCCL no port."""
    names = NameFilter(named.value)
    idle = [each for each in facts.ports if names.matches(each.device, each.number)]
    said = f"{named} leaves no port of {_names(usable)}"
    if idle:
        said = f"{named} leaves only {_names(idle)}, which is {idle[0].state}"
    judge = error if _is_forced(settings) else warning
    then = "NCCL does not start" if judge is error else "NCCL uses TCP between hosts"
    fix = f"{named.removal}, or name active ports, as in {HCA}=={usable[0].name}"
    return judge(NAME, f"{said}; {then}", fix)


def _gids(used: Sequence[Port], settings: Mapping[str, Setting]) -> list[Finding]:
    """Returns the faults of the addresses that RoCE ports use; InfiniBand chooses its own."""
    roce = [each for each in used if each.is_roce]
    forced = settings.get(GID_INDEX)
    if forced and (index := _number(forced)) is not None and index >= 0:
        return [fault for each in roce if (fault := _forced_gid(each, forced, index))][:1]
    if any(each in settings for each in OWN_CHOICES):
        return []
    without = [each for each in roce if each.gids and not _version_2(each)]
    if not without:
        return []
    said = (
        f"{_names(without)}: no address of RoCE v2 with IPv4, which NCCL looks for, so it takes "
        f"entry 0 ({without[0].gids[0].kind or 'empty'})"
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


def _locked_memory(facts: Cards) -> list[Finding]:
    if facts.locked_memory >= LOCKED_WANTED:
        return []
    said = f"this process may lock only {facts.locked_memory / 2**20:.1f} MiB of memory"
    fix = "ulimit -l unlimited, docker run --ulimit=memlock=-1, or LimitMEMLOCK=infinity in slurmd"
    return [warning(NAME, f"{said}; cards can send and receive only in locked memory", fix)]


def _fine(facts: Cards, network: Network, used: Sequence[Port]) -> str:
    """Returns what is told about ports without a fault."""
    kinds = dict.fromkeys(f"{'RoCE' if each.is_roce else each.link_layer}" for each in used)
    said = [f"{_names(used)}, {' and '.join(kinds)}, {used[0].rate}"]
    mtus = {each.name: each.mtu for each in network.interfaces}
    by_mtu = {}
    for each in used:
        if mtu := each.is_roce and mtus.get(each.interface):
            by_mtu.setdefault(mtu, []).append(each.interface)
    said += [
        f"{listed(names)} has MTU {mtu:,}, so packets carry {_payload(mtu):,} bytes"
        for mtu, names in by_mtu.items()
    ]
    if not facts.has_peer_memory:
        said.append(
            "nvidia_peermem is not loaded, so the card reaches GPU memory only by DMA-BUF "
            "(NCCL_DEBUG=INFO then shows GDRDMA)"
        )
    return "; ".join(said)


def _payload(mtu: int) -> int:
    """Returns the bytes of data in a RoCE packet."""
    return next((each for each in (4096, 2048, 1024, 512) if each + HEADERS <= mtu), 256)


def _names(ports: Sequence[Port]) -> str:
    return listed([each.name for each in ports])


def _number(setting: Setting) -> int | None:
    """Returns the setting as a number; None if it is none."""
    try:
        return int(setting.value, 0)
    except ValueError:
        return None
