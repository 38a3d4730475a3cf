"""Cards for InfiniBand and RoCE, and NCCL's settings for them, judged by planted files."""

import math
import resource

import pytest
from planted_hosts import EMPTY, IPV4, IPV6, TABLE, add_interface, add_port, plant

from tfaccel.diagnostics.doctor.checks import infiniband
from tfaccel.diagnostics.doctor.facts.infiniband import Gid, read_cards
from tfaccel.diagnostics.doctor.facts.nccl_settings import Setting
from tfaccel.diagnostics.doctor.facts.network import read_network


@pytest.fixture
def root(tmp_path):
    """A host with everything that a card needs, but no card."""
    plant(tmp_path, {"dev/infiniband/uverbs0": "", "sys/module/nvidia_peermem/version": "580"})
    plant(tmp_path, {"proc/self/status": "Name:\tpython\nCapEff:\t0000000000004000"})
    add_interface(tmp_path, "eth1", 3, mtu=9000)
    return tmp_path


def examine(root, *, has_other_hosts=True, **values):
    settings = {f"NCCL_{name}": Setting(f"NCCL_{name}", each) for name, each in values.items()}
    return infiniband.check(
        read_cards(root), read_network(root, {}), settings, has_other_hosts=has_other_hosts
    )


# ----- Facts.


def test_ports_and_their_tables_are_read(root):
    add_port(root, "mlx5_1", 2, layer="InfiniBand", state="1: DOWN", gids=((IPV6, None),))
    add_port(root, "mlx5_0", 1)
    roce, ib = read_cards(root).ports
    assert (roce.name, roce.state, roce.interface) == ("mlx5_0:1", "ACTIVE", "eth1")
    assert roce.gids == (*(Gid(*each) for each in TABLE[:4]), Gid(EMPTY, ""))
    assert [each.is_empty for each in roce.gids] == [False] * 4 + [True]
    assert (roce.is_roce, roce.is_usable, ib.is_roce, ib.is_usable) == (True, True, False, False)
    assert ib.name == "mlx5_1:2"


def test_entries_are_in_the_order_of_their_numbers(root):
    add_port(root, gids=[(f"{IPV4[:-2]}{index:02}", "RoCE v2") for index in range(12)])
    assert [each.address[-2:] for each in read_cards(root).ports[0].gids][-2:] == ["10", "11"]


def test_the_limit_on_locked_memory_holds_unless_the_process_has_the_right(root, monkeypatch):
    monkeypatch.setattr(resource, "getrlimit", lambda _: (8 << 20, resource.RLIM_INFINITY))
    assert read_cards(root).locked_memory == math.inf  # CAP_IPC_LOCK
    plant(root, {"proc/self/status": "CapEff:\t00000000a80425fb"})  # what Docker gives
    assert read_cards(root).locked_memory == 8 << 20
    (root / "proc/self/status").unlink()
    assert read_cards(root).locked_memory == 8 << 20
    monkeypatch.setattr(resource, "getrlimit", lambda _: (resource.RLIM_INFINITY,) * 2)
    assert read_cards(root).locked_memory == math.inf


def test_a_machine_without_cards_has_no_ports(tmp_path):
    cards = read_cards(tmp_path)
    assert (cards.ports, cards.has_device_files, cards.has_peer_memory) == ((), False, False)


# ----- Cards.


def test_a_sound_host_tells_its_ports_and_the_size_of_packets(root):
    add_port(root)
    found = examine(root)
    assert (found.status, found.fix) == ("ok", "")
    ports, packets = found.found.split("; ")
    assert ports == "mlx5_0:1, RoCE, 400 Gb/sec (4X NDR)"
    assert packets == "the MTU of eth1 is 9,000, so packets carry 4,096 bytes"
    add_interface(root, "eth1", 3, mtu=1500)
    assert "is 1,500, so packets carry 1,024 bytes" in examine(root).found
    (root / "sys/module/nvidia_peermem/version").unlink()
    (root / "sys/module/nvidia_peermem").rmdir()
    assert "nvidia_peermem is not loaded" in examine(root).found
    assert examine(root).status == "ok"


def test_infiniband_is_told_without_a_mtu(root):
    add_port(root, layer="InfiniBand", gids=((IPV6, "IB/RoCE v1"),))
    assert examine(root).found == "mlx5_0:1, InfiniBand, 400 Gb/sec (4X NDR)"


NO_PORT = [
    (None, {}, "ok", "no active port; NCCL would use TCP"),
    (None, {"IB_HCA": "mlx5"}, "warning", "NCCL_IB_HCA=mlx5, but this host has no card"),
    (None, {"IB_HCA": "^mlx5_9"}, "ok", "no active port"),
    (None, {"NET": "IB"}, "error", "NCCL_NET=IB, but this host has no card; NCCL does not start"),
    ("1: DOWN", {}, "warning", "no port is active (mlx5_0:1 DOWN)"),
    ("2: INIT", {"NET": "ib"}, "error", "no port is active (mlx5_0:1 INIT); NCCL does not start"),
]


@pytest.mark.parametrize(("state", "values", "status", "words"), NO_PORT)
def test_a_host_without_an_active_port_uses_tcp(root, state, values, status, words):
    if state:
        add_port(root, state=state)
    found = examine(root, **values)
    assert (found.status, bool(found.fix)) == (status, status != "ok")
    assert words in found.found


def test_an_idle_card_is_no_fault_on_one_host(root):
    add_port(root, state="1: DOWN")
    assert examine(root, has_other_hosts=False).status == "ok"


PORTS = [
    ({"IB_DISABLE": "1"}, "warning", "NCCL uses TCP, and not mlx5_0:1, mlx5_1:1 (400 Gb/sec"),
    ({"IB_DISABLE": "0"}, "ok", "mlx5_0:1, mlx5_1:1, RoCE"),
    ({"NET": "Socket"}, "warning", "NCCL_NET=Socket: NCCL uses TCP"),
    ({"NET": "AWS Libfabric"}, "ok", "that plugin decides"),
    ({"NET_PLUGIN": "aws-ofi", "IB_HCA": "x"}, "ok", "NCCL_NET_PLUGIN=aws-ofi: that plugin"),
    ({"NET_PLUGIN": "none"}, "ok", "mlx5_0:1, mlx5_1:1, RoCE"),
    ({"IB_HCA": "=mlx5_1"}, "ok", "mlx5_1:1, RoCE"),
    ({"IB_HCA": "^mlx5_1:1"}, "ok", "mlx5_0:1, RoCE"),
    ({"IB_HCA": "=mlx5"}, "warning", "NCCL_IB_HCA==mlx5 leaves no port of mlx5_0:1, mlx5_1:1"),
    ({"IB_HCA": "=mlx5", "NET": "IB"}, "error", "NCCL does not start"),
    ({"IB_HCA": "mlx5_2"}, "warning", "leaves only mlx5_2:1, which is DOWN; NCCL uses TCP"),
    ({"IB_HCA": "^mlx5"}, "warning", "or name active ports, as in NCCL_IB_HCA==mlx5_0:1"),
]


@pytest.mark.parametrize(("values", "status", "words"), PORTS)
def test_a_setting_that_leaves_ports_out_is_named(root, values, status, words):
    add_port(root, "mlx5_0")
    add_port(root, "mlx5_1")
    add_port(root, "mlx5_2", state="1: DOWN")
    found = examine(root, **values)
    assert (found.status, bool(found.fix)) == (status, status != "ok")
    assert words in f"{found.found} {found.fix}"
    named = {f"NCCL_{name}": Setting(f"NCCL_{name}", each) for name, each in values.items()}
    assert infiniband.uses_cards(read_cards(root), named) == (status == "ok")


def test_a_container_without_the_device_files_is_named(root):
    add_port(root)
    (root / "dev/infiniband/uverbs0").unlink()
    assert not infiniband.uses_cards(read_cards(root), {})
    found = examine(root)
    assert (found.status, "--device=/dev/infiniband" in found.fix) == ("warning", True)


V1_ONLY = ((IPV6, "IB/RoCE v1"), (IPV4, "IB/RoCE v1"))
ENTRIES = [
    (TABLE, "3", "ok", "mlx5_0:1, RoCE"),
    (TABLE, "1", "ok", "mlx5_0:1, RoCE"),
    (TABLE, "-1", "ok", "mlx5_0:1, RoCE"),
    (TABLE, "", "ok", "mlx5_0:1, RoCE"),
    (TABLE, "0", "warning", "NCCL_IB_GID_INDEX=0 is IB/RoCE v1 on mlx5_0:1, which routers do not"),
    (TABLE, "2", "warning", "or set NCCL_IB_GID_INDEX=3, which is RoCE v2"),
    (TABLE, "4", "error", "this entry of mlx5_0:1 is empty"),
    (TABLE, "5", "error", "but mlx5_0:1 has only the entries 0 to 4"),
    (V1_ONLY, "0", "ok", "mlx5_0:1, RoCE"),  # there is none of version 2
    (
        V1_ONLY,
        None,
        "warning",
        "no address of RoCE v2 with IPv4, which NCCL looks for, so it takes entry 1",
    ),
    (TABLE[:2], None, "warning", "entry 0 (IB/RoCE v1) give eth1 an IPv4 address"),
    ((*TABLE[:2], (IPV4, None)), None, "warning", "so it takes entry 2 (of an unknown version)"),
    (TABLE, None, "ok", "mlx5_0:1, RoCE"),
]


@pytest.mark.parametrize(("gids", "index", "status", "words"), ENTRIES)
def test_the_address_of_roce_is_judged(root, gids, index, status, words):
    add_port(root, gids=gids)
    found = examine(root, **({} if index is None else {"IB_GID_INDEX": index}))
    assert (found.status, bool(found.fix)) == (status, status != "ok")
    assert words in f"{found.found} {found.fix}"


def test_an_address_that_the_user_chose_otherwise_is_left_to_nccl(root):
    add_port(root, gids=TABLE[:2])
    assert examine(root, IB_ADDR_FAMILY="AF_INET6").status == "ok"
    add_port(root, layer="InfiniBand")  # which has no such choice
    assert examine(root, IB_GID_INDEX="77").status == "ok"


def test_little_locked_memory_is_named(root, monkeypatch):
    add_port(root)
    plant(root, {"proc/self/status": "CapEff:\t0000000000000000"})
    monkeypatch.setattr(resource, "getrlimit", lambda _: (8 << 20, resource.RLIM_INFINITY))
    found = examine(root)
    assert (found.status, "ulimit -l unlimited" in found.fix) == ("warning", True)
    assert "only 8.0 MiB" in found.found
