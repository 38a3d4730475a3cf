"""The ports of cards for InfiniBand and RoCE, and what programs need to use them.

cards = read_cards()
cards.ports[0].gids, cards.locked_memory

Linux describes the files in Documentation/ABI/stable/sysfs-class-infiniband.
"""

import dataclasses
import math
import pathlib
import resource
from typing import NamedTuple

from tfaccel.diagnostics.doctor.facts.files import ROOT, entries, number, text

# A kernel module that lets network cards read and write the memory of GPUs; the last two files are
# those of its predecessor.
PEER_MEMORY = (
    "sys/module/nvidia_peermem",
    "sys/kernel/mm/memory_peers/nv_mem/version",
    "sys/kernel/mm/memory_peers/nv_mem_nc/version",
)
MAY_LOCK_ALL = 1 << 14  # CAP_IPC_LOCK: the limit on locked memory does not hold for this process


class Gid(NamedTuple):
    """An entry of a port's table of addresses.

    Attributes:
      address: eight groups of four hexadecimal digits; zeros if the entry is empty.
      kind: "RoCE v2", "IB/RoCE v1", or "" if the entry is empty.
    """

    address: str
    kind: str

    @property
    def is_empty(self) -> bool:
        """True if the entry has no address."""
        return not self.kind or not self.address.strip("0:")

    @property
    def is_ipv4(self) -> bool:
        """True if the entry stands for an IPv4 address."""
        return self.address.startswith("0000:0000:0000:0000:0000:ffff:")


@dataclasses.dataclass(frozen=True)
class Port:
    """A port of a card for InfiniBand or RoCE.

    Attributes:
      device: the name of the card, such as "mlx5_0".
      number: counted from 1.
      state: "ACTIVE", "DOWN" and others.
      link_layer: "InfiniBand", or "Ethernet" for RoCE.
      rate: such as "400 Gb/sec (4X NDR)".
      gids: the table of addresses.
      interface: the network interface of a RoCE port; "" if it is unknown.
    """

    device: str
    number: int
    state: str
    link_layer: str
    rate: str
    gids: tuple[Gid, ...]
    interface: str

    @property
    def name(self) -> str:
        """The name as NCCL writes it, such as "mlx5_0:1"."""
        return f"{self.device}:{self.number}"

    @property
    def is_usable(self) -> bool:
        """True if NCCL would use the port."""
        return self.state == "ACTIVE" and self.link_layer in ("InfiniBand", "Ethernet")

    @property
    def is_roce(self) -> bool:
        """True if the port is one of Ethernet."""
        return self.link_layer == "Ethernet"


@dataclasses.dataclass(frozen=True)
class Cards:
    """The facts about the cards.

    Attributes:
      ports: of all cards.
      has_device_files: whether programs can open the cards; a container may hide these files.
      has_peer_memory: whether the module nvidia_peermem or its predecessor is loaded.
      locked_memory: bytes that this process may lock; infinite without a limit.
    """

    ports: tuple[Port, ...] = ()
    has_device_files: bool = False
    has_peer_memory: bool = False
    locked_memory: float = math.inf


def read_cards(root: pathlib.Path = ROOT) -> Cards:
    """Reads the facts from the kernel; `root` is the folder of /sys, /proc and /dev."""
    cards = entries(root / "sys/class/infiniband")
    files = entries(root / "dev/infiniband")
    return Cards(
        ports=tuple(_port(each) for card in cards for each in entries(card / "ports")),
        has_device_files=any(each.name.startswith("uverbs") for each in files),
        has_peer_memory=any((root / each).exists() for each in PEER_MEMORY),
        locked_memory=_locked_memory(root / "proc/self/status"),
    )


def _port(folder: pathlib.Path) -> Port:
    is_roce = text(folder / "link_layer") == "Ethernet"
    listed = sorted(entries(folder / "gids"), key=lambda each: number(each.name))
    attributes = folder / "gid_attrs"
    gids = tuple(Gid(text(each), text(attributes / "types" / each.name)) for each in listed)
    interfaces = (text(attributes / "ndevs" / each.name) for each in listed if is_roce)
    return Port(
        device=folder.parents[1].name,
        number=number(folder.name),
        state=text(folder / "state").rpartition(":")[2].strip(),  # "4: ACTIVE"
        link_layer=text(folder / "link_layer"),
        rate=text(folder / "rate"),
        gids=gids,
        interface=next(filter(None, interfaces), ""),
    )


def _locked_memory(status: pathlib.Path) -> float:
    fields = dict(line.split(":", 1) for line in text(status).splitlines() if ":" in line)
    if number(fields.get("CapEff", "").strip(), base=16) & MAY_LOCK_ALL:
        return math.inf
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return math.inf if soft == resource.RLIM_INFINITY else soft
