"""Checks the ports of InfiniBand and RoCE cards, and the settings with which NCCL uses them.

check(read_cards(), read_network(), nccl_settings(os.environ), has_other_hosts=True)

NCCL takes active ports of link layer InfiniBand or Ethernet (RoCE). If there is none, it uses TCP,
which is slower and loads the CPU (src/transport/net_ib in NCCL).
"""

from collections.abc import Mapping, Sequence

from tfaccel.diagnostics.doctor.checks import roce
from tfaccel.diagnostics.doctor.checks.name_filter import NameFilter
from tfaccel.diagnostics.doctor.checks.network import listed
from tfaccel.diagnostics.doctor.checks.roce import as_number, names_of
from tfaccel.diagnostics.doctor.facts.infiniband import Cards, Port
from tfaccel.diagnostics.doctor.facts.nccl_settings import Setting
from tfaccel.diagnostics.doctor.facts.network import Network
from tfaccel.diagnostics.doctor.table import Finding, error, merged, ok, warning

NAME, NET = "InfiniBand", "NCCL_NET"
DISABLE, HCA = "NCCL_IB_DISABLE", "NCCL_IB_HCA"
# NCCL names no number, and clusters lift the limit. A buffer has 4 MiB, and each channel has some.
LOCKED_WANTED = 2**30


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
        return ok(
            NAME, f"{plugin}: that plugin decides how NCCL uses {names_of(usable) or 'cards'}"
        )
    if not usable:
        faults = _without_ports(facts, settings, has_other_hosts=has_other_hosts)
        return merged(NAME, faults, "no active port; NCCL would use TCP between hosts")
    if off := _switched_off(settings):
        said = f"{off}: NCCL uses TCP, and not {names_of(usable)} ({usable[0].rate} each)"
        return warning(NAME, said, off.removal)
    if not facts.has_device_files:
        said = f"{names_of(usable)} are active, but /dev/infiniband has no uverbs; NCCL uses TCP"
        fix = "give the container the device files: docker run --device=/dev/infiniband"
        return warning(NAME, said, fix)
    used = _allowed(usable, settings)
    if not used:
        return _no_such_card(facts, usable, settings[HCA], settings)
    faults = [*roce.addresses(used, settings), *_locked_memory(facts)]
    return merged(NAME, faults, _fine(facts, network, used))


def uses_cards(facts: Cards, settings: Mapping[str, Setting]) -> bool:
    """Returns whether NCCL, or a plugin of it, sends its data by cards, and not by TCP."""
    if _plugin(settings):
        return True
    usable = [each for each in facts.ports if each.is_usable]
    can_open = facts.has_device_files and not _switched_off(settings)
    return can_open and bool(_allowed(usable, settings))


def _allowed(ports: Sequence[Port], settings: Mapping[str, Setting]) -> list[Port]:
    """Returns the ports that NCCL_IB_HCA leaves."""
    names = NameFilter(settings[HCA].value if HCA in settings else "")
    return [each for each in ports if names.matches(each.device, each.number)]


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
    return off if off and as_number(off) else None


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
    said = f"{named} leaves no port of {names_of(usable)}"
    if idle:
        said = f"{named} leaves only {names_of(idle)}, which is {idle[0].state}"
    judge = error if _is_forced(settings) else warning
    then = "NCCL does not start" if judge is error else "NCCL uses TCP between hosts"
    fix = f"{named.removal}, or name active ports, as in {HCA}=={usable[0].name}"
    return judge(NAME, f"{said}; {then}", fix)


def _locked_memory(facts: Cards) -> list[Finding]:
    if facts.locked_memory >= LOCKED_WANTED:
        return []
    said = f"this process may lock only {facts.locked_memory / 2**20:.1f} MiB of memory"
    fix = "ulimit -l unlimited, docker run --ulimit=memlock=-1, or LimitMEMLOCK=infinity in slurmd"
    return [warning(NAME, f"{said}; cards can send and receive only in locked memory", fix)]


def _fine(facts: Cards, network: Network, used: Sequence[Port]) -> str:
    """Returns what is told about ports without a fault."""
    kinds = dict.fromkeys(f"{'RoCE' if each.is_roce else each.link_layer}" for each in used)
    said = [f"{names_of(used)}, {' and '.join(kinds)}, {used[0].rate}"]
    said += roce.packets(used, network)
    if not facts.has_peer_memory:
        said.append(
            "nvidia_peermem is not loaded, so the card reaches GPU memory only by DMA-BUF "
            "(NCCL_DEBUG=INFO then shows GDRDMA)"
        )
    return "; ".join(said)
