"""Checks which network interface NCCL uses.

check(read_network(), workers, nccl_settings(os.environ), is_needed=True, uses_cards=False)

TensorFlow's workers and launchers reach each other at the workers' addresses. NCCL does not use
these. It chooses an interface itself, and tells the other workers its address there.
"""

from collections.abc import Mapping, Sequence

from tfaccel.diagnostics.doctor.checks.name_filter import NameFilter
from tfaccel.diagnostics.doctor.checks.network import listed
from tfaccel.diagnostics.doctor.facts.nccl_settings import Setting
from tfaccel.diagnostics.doctor.facts.network import Interface, Network
from tfaccel.diagnostics.doctor.facts.workers import Workers
from tfaccel.diagnostics.doctor.table import Finding, error, merged, warning

NAME = "NCCL interface"
IFNAME, FAMILY = "NCCL_SOCKET_IFNAME", "NCCL_SOCKET_FAMILY"
FAMILIES = {"AF_INET": 4, "AF_INET6": 6}
# What NCCL looks for if nothing is set, in this order (ncclFindInterfaces in src/misc/socket.cc).
AUTOMATIC = ("ib", "^docker,lo,virbr", "docker", "lo", "virbr")
SYNTAX = f"{IFNAME} takes prefixes (eth,ib), exact names (=eth0,eth1) or exclusions (^lo)"
OF_ONE_HOST = NameFilter("docker,lo,virbr")


def check(
    facts: Network,
    workers: Workers | None,
    settings: Mapping[str, Setting],
    *,
    is_needed: bool,
    uses_cards: bool,
) -> Finding | None:
    """Checks which interfaces NCCL uses for its connections; None if there is nothing to tell.

    Args:
      facts: the interfaces of this host.
      workers: the hosts of the job; None if the environment names no job.
      settings: NCCL's settings.
      is_needed: whether a job on this machine would use NCCL.
      uses_cards: whether data goes by InfiniBand or RoCE. NCCL then uses one interface, to connect;
        by TCP it sends data over all of them.
    """
    setting, family = settings.get(IFNAME), settings.get(FAMILY)
    if setting and len(setting.value) < 2:
        setting = None  # NCCL does not count a single character
    faults = _values(setting, family)
    usable = [each for each in facts.interfaces if each.is_running and _address(each, family)]
    used = chosen(usable, setting.value if setting else "")[: 1 if uses_cards else None]
    if not used and setting:
        faults.append(_none(facts, usable, setting, is_needed=is_needed))
    elif not used and is_needed:
        said = "no interface is up and has an address, so NCCL does not start, on one host neither"
        faults.append(error(NAME, said, "`ip link set lo up`, or start the network"))
    if used and is_needed and workers and workers.routes:
        faults += _reach(facts, workers, used, setting)
    if not is_needed and not faults:
        return None
    names = listed([f"{each.name} {_address(each, family)}" for each in used])
    why = f"set by {setting}" if setting else "NCCL's own choice"
    note = (
        f"; no other host can reach {used[0].name}"
        if used and OF_ONE_HOST.matches(used[0].name)
        else ""
    )
    return merged(NAME, faults, f"{names}, {why}{note}")


def chosen(usable: Sequence[Interface], names: str) -> list[Interface]:
    """Returns the interfaces that NCCL uses, the one of its first connections first.

    Args:
      usable: the interfaces that are up and have an address, in the kernel's order.
      names: the text of NCCL_SOCKET_IFNAME; "" if it is not set.
    """
    for wanted in map(NameFilter, [names] if names else AUTOMATIC):
        if found := [each for each in usable if wanted.matches(each.name)]:
            return found
    return []


def _values(setting: Setting | None, family: Setting | None) -> list[Finding]:
    """Returns the values that NCCL does not read as they were meant."""
    faults = []
    if setting and (wrong := NameFilter(setting.value).misspelt):
        said = f"{setting}: NCCL takes '{wrong[0]}' for a name, with its sign or space"
        fix = "write = and ^ only at the start of the list, and no spaces"
        faults.append(warning(NAME, said, fix))
    if family and family.value not in FAMILIES:
        faults.append(
            warning(NAME, f"{family}: NCCL ignores this value", "set AF_INET or AF_INET6")
        )
    return faults


def _none(
    facts: Network, usable: Sequence[Interface], setting: Setting, *, is_needed: bool
) -> Finding:
    """Returns the fault of a list that leaves NCCL no interface."""
    names = NameFilter(setting.value)
    down = [each.name for each in facts.interfaces if names.matches(each.name)]
    present = ", ".join(each.name for each in usable) or "none"
    said = f"{setting} matches no interface that NCCL can use here (there are: {present})"
    if down:
        said = f"{setting} matches {listed(down)}, which is down or has no IP address"
    judge = error if is_needed else warning
    fix = f"{setting.removal}, or choose one of these; {SYNTAX}"
    return judge(NAME, f"{said}; NCCL ends with 'no socket interface found'", fix)


def _reach(
    facts: Network, workers: Workers, used: Sequence[Interface], setting: Setting | None
) -> list[Finding]:
    """Returns the fault of an interface by which other hosts may not reach this one."""
    ways = {each.name for each in map(facts.holder, workers.routes.values()) if each}
    why = f"set by {setting}" if setting else "which NCCL chooses itself"
    fix = f"export {IFNAME}=={sorted(ways)[0]}" if ways else f"set {IFNAME} ({SYNTAX})"
    if OF_ONE_HOST.matches(used[0].name):  # also with NCCL_SOCKET_IFNAME=^ib, which leaves lo
        said = f"NCCL gives other hosts its address on {used[0].name}, {why}"
        return [error(NAME, f"{said}; none of them can reach it there", fix)]
    strange = [each.name for each in used if each.name not in ways]
    if not ways or not strange:
        return []
    said = (
        f"NCCL uses {listed([each.name for each in used])}, {why}, but this host reaches the "
        f"others by {listed(sorted(ways))}; if they cannot be reached by {listed(strange)}, too, "
        "NCCL waits or fails at the first sum"
    )
    return [warning(NAME, said, f"{fix}, on each host with its own name of the interface")]


def _address(interface: Interface, family: Setting | None) -> str:
    """Returns the address that NCCL would use, or ""; it skips ::1."""
    version = FAMILIES.get(family.value) if family else None
    for each in interface.addresses:
        if each != "::1" and version in (None, 6 if ":" in each else 4):
            return each
    return ""
