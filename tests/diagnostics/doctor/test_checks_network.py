"""The interfaces of a host, the addresses of a job, and NCCL's choice, by planted facts."""

import dataclasses
import json
import os
import pathlib
import re
import subprocess
import sys

import pytest
from planted_hosts import add_interface, plant

from tfaccel.diagnostics import doctor
from tfaccel.diagnostics.doctor.checks import nccl_interface, nccl_settings, network
from tfaccel.diagnostics.doctor.checks.name_filter import NameFilter
from tfaccel.diagnostics.doctor.facts import nccl_settings as setting_facts
from tfaccel.diagnostics.doctor.facts.child import Answers
from tfaccel.diagnostics.doctor.facts.nccl_settings import Setting
from tfaccel.diagnostics.doctor.facts.network import Interface, Network, read_network
from tfaccel.diagnostics.doctor.facts.workers import Workers, hosts, route, workers_of
from tfaccel.runtime.cluster import Cluster

LO = Interface("lo", True, 65536, ("127.0.0.1", "::1"))
ETH0 = Interface("eth0", True, 1500, ("10.0.0.2", "fd00::2"))
ETH1 = Interface("eth1", True, 9000, ("10.1.0.2",))
DOWN = Interface("eth2", False, 1500, ("10.2.0.2",))
DOCKER = Interface("docker0", True, 1500, ("172.17.0.1",))
IB = Interface("ib0", True, 2044, ("10.3.0.2",))
HOST = Network((LO, ETH0, ETH1, DOWN, DOCKER))
JOB = Workers(1, 2, "10.0.0.2", ("10.0.0.2",), routes={"10.0.0.1": "10.0.0.2"})


def settings(**values):
    return {f"NCCL_{name}": Setting(f"NCCL_{name}", each) for name, each in values.items()}


# ----- Facts.


def test_interfaces_are_read_in_the_order_in_which_nccl_finds_them(tmp_path):
    add_interface(tmp_path, "lo", 1, state="unknown", mtu=65536)
    add_interface(tmp_path, "eth0", 12)
    add_interface(tmp_path, "eth1", 3, mtu=9000)
    add_interface(tmp_path, "eth2", 2, flags="0x1002")  # not up
    add_interface(tmp_path, "docker0", 4, state="down")  # up, but without a container
    add_interface(tmp_path, "six", 1)
    plant(tmp_path / "sys/class/net", {"bonding_masters": ""})  # a file among the folders
    addresses = {"lo": ["127.0.0.1"], "eth0": ["10.0.0.2"], "eth1": ["10.1.0.2"], "six": ["fd::1"]}
    addresses |= {"eth2": ["10.2.0.2"], "docker0": ["172.17.0.1"]}
    found = read_network(tmp_path, addresses).interfaces
    assert [each.name for each in found] == ["lo", "eth2", "eth1", "docker0", "eth0", "six"]
    assert [each.name for each in found if not each.is_running] == ["eth2", "docker0"]
    assert found[2] == Interface("eth1", True, 9000, ("10.1.0.2",))


def test_a_machine_that_hides_its_interfaces_has_none(tmp_path):
    assert read_network(tmp_path, {}).interfaces == ()


def test_the_interfaces_of_this_machine_have_the_loopback_address():
    assert "lo" in {each.name for each in read_network().interfaces}
    assert read_network().holder("127.0.0.1").name == "lo"


def test_the_first_value_of_a_setting_counts_and_names_its_file(tmp_path):
    plant(tmp_path, {"etc/nccl.conf": "# NCCL_IB_TC=1\nNCCL_IB_HCA=mlx5_9\nNCCL_DEBUG=INFO"})
    plant(tmp_path, {".nccl.conf": "NCCL_DEBUG=WARN\nno setting\nOTHER=1", "own": "NCCL_IB_SL=3"})
    environment = {"HOME": str(tmp_path), "NCCL_SOCKET_IFNAME": "=eth0", "PATH": "/bin"}
    found = setting_facts.nccl_settings(environment, tmp_path)
    assert {name: str(each) for name, each in found.items()} == {
        "NCCL_SOCKET_IFNAME": "NCCL_SOCKET_IFNAME==eth0",
        "NCCL_DEBUG": f"NCCL_DEBUG=WARN (in {tmp_path}/.nccl.conf)",
        "NCCL_IB_HCA": f"NCCL_IB_HCA=mlx5_9 (in {tmp_path}/etc/nccl.conf)",
    }
    assert found["NCCL_DEBUG"].removal == f"remove NCCL_DEBUG from {tmp_path}/.nccl.conf"
    found = setting_facts.nccl_settings({"NCCL_CONF_FILE": str(tmp_path / "own")}, tmp_path)
    assert found["NCCL_IB_SL"].value == "3"
    assert found["NCCL_DEBUG"].value == "INFO"


def test_a_file_of_settings_that_is_a_pipe_is_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    found = setting_facts.nccl_settings({"NCCL_CONF_FILE": str(tmp_path / "pipe")}, tmp_path)
    assert list(found) == ["NCCL_CONF_FILE"]


def test_a_route_tells_the_address_that_packets_have():
    assert route("127.0.0.1") == {"routes": "127.0.0.1"}
    assert list(route("no.such.host.invalid")) == ["unknown"]


def test_hosts_of_a_job_are_those_that_a_child_was_asked_for():
    job = Cluster(("a:1", "b:1", "b:2", "c:1", "a:2", "d:1"), worker_index=1)
    assert hosts(job) == ("b", ["a", "c", "d"])
    told = {"own host": ["10.0.0.2"], "a": {"routes": "10.0.0.2"}, "c": {"unreachable": "no way"}}
    found = workers_of(job, Answers(told, {"d": "gave no answer within 5 s"}))
    assert found.own_addresses == ("10.0.0.2",)
    assert (found.routes, found.unreachable) == ({"a": "10.0.0.2"}, {"c": "no way"})
    assert found.unknown == {"d": "gave no answer within 5 s"}
    assert workers_of(job, Answers({}, {"own host": "no name"})).problem == "no name"


# ----- The addresses of the job.


def test_without_a_job_of_several_hosts_the_interfaces_are_told():
    found = network.check(HOST, None)
    assert found.status == "ok"
    assert "eth0 10.0.0.2, eth1 10.1.0.2" in found.found
    assert "eth2" not in found.found  # it is down
    assert "only several hosts need it" in found.found
    one_host = Workers(0, 2, "localhost", ("127.0.0.1",))
    assert "all workers are on this host" in network.check(HOST, one_host).found
    assert network.check(Network(()), None).status == "ok"


ADDRESSES = [
    ({}, "ok", "worker 1 of 2, at 10.0.0.2 on eth0; it has a route to 1 other host(s)"),
    ({"own_addresses": (), "problem": "no name"}, "warning", "getent hosts 10.0.0.2"),
    ({"own": "127.0.0.1", "own_addresses": ("127.0.0.1",)}, "error", "no other host can use that"),
    ({"own": "n9", "own_addresses": ("127.0.1.1",)}, "warning", "at n9, which is 127.0.1.1 here"),
    ({"own_addresses": ("10.9.0.2",)}, "warning", "no interface of this host has that address"),
    ({"own_addresses": ("10.2.0.2",)}, "error", "on eth2, which is down"),
    (
        {"routes": {"10.0.0.1": "10.1.0.2"}},
        "warning",
        "leave by eth1 (10.1.0.2), but this worker's",
    ),
    (
        {"routes": {}, "unreachable": {"b": "No route", "c": "No route"}},
        "error",
        "to b, c: No route",
    ),
    ({"unknown": {"n8": "no answer"}}, "warning", "the address of n8 is not known: no answer"),
]


@pytest.mark.parametrize(("plant", "status", "words"), ADDRESSES)
def test_an_address_that_others_cannot_reach_is_named(plant, status, words):
    found = network.check(HOST, dataclasses.replace(JOB, **plant))
    assert (found.status, bool(found.fix)) == (status, status != "ok")
    assert words in f"{found.found} {found.fix}"


# ----- NCCL's interface.

MATCHES = [
    ("eth", ["eth0", "eth1"]),
    ("=eth", []),
    ("=eth0,lo", ["eth0", "lo"]),
    ("^eth", ["lo"]),
    ("^=eth0", ["eth1", "lo"]),
    ("eth1,lo", ["eth1", "lo"]),
    ("=lo,=eth0", ["lo"]),  # the second sign is part of a name
    ("eth1, eth0", ["eth1"]),
    ("eth0:1", ["eth0"]),  # a port has no meaning here
    (",,", ["eth0", "eth1", "lo"]),
]


@pytest.mark.parametrize(("listed", "names"), MATCHES)
def test_a_list_of_names_is_read_as_nccl_reads_it(listed, names):
    assert [each for each in ("eth0", "eth1", "lo") if NameFilter(listed).matches(each)] == names


def test_a_list_of_cards_may_name_ports():
    assert NameFilter("=mlx5_1:2").matches("mlx5_1", 2)
    assert not NameFilter("=mlx5_1:2").matches("mlx5_1", 1)
    assert not NameFilter("=mlx5_1").matches("mlx5_10", 1)
    assert NameFilter("mlx5_1").matches("mlx5_10", 1)
    assert not NameFilter("^mlx5_1:2").matches("mlx5_1", 2)


INTERFACES = [
    (HOST, JOB, {}, "warning", "NCCL uses eth0, eth1, which NCCL chooses itself, but this host"),
    (HOST, JOB, {"SOCKET_IFNAME": "=eth0"}, "ok", "eth0 10.0.0.2, set by NCCL_SOCKET_IFNAME==eth0"),
    (HOST, JOB, {"SOCKET_IFNAME": "^"}, "warning", "which NCCL chooses itself"),  # does not count
    (HOST, JOB, {"SOCKET_IFNAME": "=eth1"}, "warning", "cannot be reached by eth1"),
    (HOST, JOB, {"SOCKET_IFNAME": "ib0"}, "error", "(there are: lo, eth0, eth1, docker0)"),
    (HOST, JOB, {"SOCKET_IFNAME": "eth2"}, "error", "matches eth2, which is down"),
    (HOST, JOB, {"SOCKET_IFNAME": "=eth0,=eth1"}, "warning", "takes '=eth1' for a name"),
    (HOST, JOB, {"SOCKET_IFNAME": "eth0, eth1"}, "warning", "takes ' eth1' for a name"),
    (HOST, JOB, {"SOCKET_IFNAME": "docker,lo"}, "error", "none of them can reach it there"),
    (HOST, JOB, {"SOCKET_IFNAME": "^docker"}, "error", "its address on lo, set by"),
    (HOST, JOB, {"SOCKET_IFNAME": "=eth0", "SOCKET_FAMILY": "inet"}, "warning", "set AF_INET or"),
    (HOST, JOB, {"SOCKET_IFNAME": "=eth0", "SOCKET_FAMILY": "AF_INET6"}, "ok", "eth0 fd00::2"),
    (HOST, JOB, {"SOCKET_IFNAME": "=eth1", "SOCKET_FAMILY": "AF_INET6"}, "error", "no IP address"),
    (HOST, JOB, {"SOCKET_IFNAME": "lo", "SOCKET_FAMILY": "AF_INET6"}, "error", "no IP address"),
    (HOST, None, {}, "ok", "eth0 10.0.0.2, eth1 10.1.0.2, NCCL's own choice"),
    (HOST, None, {"SOCKET_IFNAME": "lo"}, "ok", "; no other host can reach lo"),
    (Network((LO, ETH0)), JOB, {}, "ok", "eth0 10.0.0.2, NCCL's own choice"),
    (Network((LO, ETH0, IB)), JOB, {}, "warning", "export NCCL_SOCKET_IFNAME==eth0"),
    (Network((LO, DOCKER)), None, {}, "ok", "docker0 172.17.0.1"),
    (Network((DOWN,)), None, {}, "error", "no interface is up"),
]


@pytest.mark.parametrize(("facts", "job", "values", "status", "words"), INTERFACES)
def test_the_interface_of_nccl_is_told_and_judged(facts, job, values, status, words):
    found = nccl_interface.check(facts, job, settings(**values), is_needed=True, uses_cards=False)
    assert (found.status, bool(found.fix)) == (status, status != "ok")
    assert words in f"{found.found} {found.fix}"


def test_nccl_uses_one_interface_beside_cards():
    found = nccl_interface.check(HOST, JOB, {}, is_needed=True, uses_cards=True)
    assert found.found == "eth0 10.0.0.2, NCCL's own choice"
    values = settings(SOCKET_IFNAME="=eth1")
    found = nccl_interface.check(HOST, JOB, values, is_needed=True, uses_cards=True)
    assert (found.status, "cannot be reached by eth1" in found.found) == ("warning", True)


QUIET = [
    ({}, None),
    ({"SOCKET_IFNAME": "=eth0"}, None),
    ({"SOCKET_IFNAME": "ib0"}, "warning"),  # an error only where NCCL is used
    ({"SOCKET_IFNAME": "=eth0,=eth1"}, "warning"),
]


@pytest.mark.parametrize(("values", "status"), QUIET)
def test_where_no_job_uses_nccl_only_a_plain_mistake_has_a_line(values, status):
    found = nccl_interface.check(HOST, None, settings(**values), is_needed=False, uses_cards=False)
    assert (found.status if found else None) == status


# ----- NCCL's other settings.

SETTINGS = [
    ({"TIMEOUT": "1800"}, "warning", "NCCL has no such setting"),
    ({"BLOCKING_WAIT": "1"}, "warning", "peer_timeout_s"),
    ({"IB_TIMEOUT": "60"}, "warning", "expected at most 31"),
    ({"IB_TIMEOUT": "22"}, None, ""),
    ({"IB_RETRY_CNT": "10"}, "warning", "expected at most 7"),
    ({"ALGO": "Ring"}, "warning", "NCCL_ALGO=Ring: one choice for all"),
    ({"PROTO": "Simple"}, "warning", "NCCL_PROTO=Simple: one choice for all"),
    ({"NET_GDR_LEVEL": "LOC"}, "warning", "never reach the GPUs' memory"),
    ({"NET_GDR_LEVEL": "PHB"}, None, ""),
    ({"DEBUG": "INFO"}, "ok", "Using network"),
    ({"DEBUG": "WARN"}, None, ""),
]


@pytest.mark.parametrize(("values", "status", "words"), SETTINGS)
def test_a_setting_that_matters_has_a_line(values, status, words):
    found = nccl_settings.check(settings(**values), is_needed=True, has_other_hosts=False)
    assert [each.status for each in found] == ([status] if status else [])
    assert words in " ".join(each.found for each in found)


def test_settings_are_quiet_where_no_job_uses_nccl_except_for_plain_mistakes():
    values = settings(ALGO="Ring", DEBUG="INFO", TIMEOUT="9", IB_TIMEOUT="60")
    found = nccl_settings.check(values, is_needed=False, has_other_hosts=False)
    assert [each.found.split("=")[0] for each in found] == ["NCCL_TIMEOUT", "NCCL_IB_TIMEOUT"]


def test_a_job_of_several_hosts_is_told_how_to_see_its_network():
    (found,) = nccl_settings.check({}, is_needed=True, has_other_hosts=True)
    assert (found.status, "NCCL_DEBUG=INFO" in found.found) == ("ok", True)
    gloo = {"GLOO_SOCKET_IFNAME": Setting("GLOO_SOCKET_IFNAME", "eth9")}
    (found,) = nccl_settings.check(gloo, is_needed=True, has_other_hosts=False)
    assert (found.status, "only PyTorch reads this" in found.found) == ("ok", True)


# ----- As a user calls it.


def test_the_environment_of_a_job_is_examined(monkeypatch):
    workers = ["192.0.2.1:20000", "127.0.0.1:20000", "no.such.host.invalid:20000"]
    job = {"cluster": {"worker": workers}, "task": {"type": "worker", "index": 1}}
    monkeypatch.setenv("TF_CONFIG", json.dumps(job))
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "no-such")
    lines = {each.name: each for each in doctor.examine(quick=True).findings}
    assert lines["network"].status == "error"
    assert "this is worker 1 of 3, at 127.0.0.1" in lines["network"].found
    assert "the address of no.such.host.invalid is not known" in lines["network"].found
    assert "NCCL_SOCKET_IFNAME=no-such matches no interface" in lines["NCCL interface"].found
    monkeypatch.setenv("TF_CONFIG", "{bad")
    assert "network" in {each.name for each in doctor.examine(quick=True).findings}


# ----- As NCCL itself does it.

CALL = """
import ctypes, sys
sys.exit(ctypes.CDLL(sys.argv[1]).ncclGetUniqueId(ctypes.create_string_buffer(128)))
"""


def library():
    files = (pathlib.Path(each) / "nvidia/nccl/lib/libnccl.so.2" for each in sys.path)
    found = next(filter(pathlib.Path.exists, files), None)
    if not found:
        pytest.skip("needs NCCL (the extra gpu), but no GPU")
    return found


@pytest.mark.parametrize("value", ["", "=lo", "lo,eth", "^lo", "=et", "lo, eth0", "=lo,=eth0", "^"])
def test_nccl_chooses_the_interface_that_doctor_tells(value):
    environment = os.environ | {"NCCL_DEBUG": "INFO", "NCCL_SOCKET_IFNAME": value}
    command = [sys.executable, "-c", CALL, str(library())]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    said = done.stdout + done.stderr
    usable = [each for each in read_network().interfaces if each.is_running and each.addresses]
    expected = nccl_interface.chosen(usable, value if len(value) > 1 else "")
    using = re.search(r"Bootstrap: Using (\S+?):", said)
    assert (using and using[1]) == (expected[0].name if expected else None), said
    assert ("no socket interface found" in said) == (not expected), said
    assert done.returncode == (0 if expected else 5)  # ncclInvalidUsage
