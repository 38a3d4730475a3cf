import socket

import pytest

from tfaccel import UserError
from tfaccel.common.errors import RunError
from tfaccel.runtime.cluster import addresses as room
from tfaccel.runtime.cluster.addresses import base_port, check_free, check_private

NAMES = {"n1": ["10.0.0.1"], "both": ["10.0.0.1", "8.8.8.8"], "six": ["2600::1"]}


@pytest.fixture(autouse=True)
def names(monkeypatch):
    """A name service that knows NAMES and, as any does, numbers; later, what is added."""
    known = dict(NAMES)

    def getaddrinfo(host, *_, **__):
        if ":" not in host and host[0].isalpha() and host not in known:
            raise socket.gaierror(-2, "Name or service not known")
        return [(None, None, None, "", (each, 0)) for each in known.get(host, [host])]

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    return known


def test_private_addresses():
    hosts = ("127.0.0.1", "10.1.2.3", "172.16.0.9", "192.168.1.1", "[::1]", "[fd00::2]", "n1")
    check_private([f"{host}:2222" for host in hosts])


@pytest.mark.parametrize("host", ["8.8.8.8", "[2600::1]", "both", "six"])
def test_a_public_address_is_refused(host):
    with pytest.raises(UserError, match=r"worker 1 .* public address .*allow_public_network"):
        check_private(["10.0.0.1:2222", f"{host}:2222"])


def test_a_host_without_a_name_yet_is_waited_for(names, monkeypatch, caplog):
    monkeypatch.setattr(room.time, "sleep", lambda _: names.update({"pod-1": ["10.0.0.7"]}))
    check_private(["pod-1:2222"])
    assert caplog.text.count("pod-1 has no address") == 1


def test_a_host_that_never_gets_a_name(monkeypatch):
    now = iter(range(0, 10000, 100))
    monkeypatch.setattr(room.time, "monotonic", lambda: next(now))
    monkeypatch.setattr(room.time, "sleep", lambda _: None)
    with pytest.raises(RunError, match="host nowhere has had no address for 300 s"):
        check_private(["nowhere:2222"])


def test_ports_are_those_of_no_outgoing_connection():
    firsts = [base_port("job", str(number), num_workers=1000) for number in range(1000)]
    assert min(firsts) >= 20000
    assert max(firsts) + 999 <= 31999
    assert len(set(firsts)) > 900


def test_whether_a_port_is_free():
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        with pytest.raises(RunError, match=f"port {port} of this worker .*in use"):
            check_free(f"10.0.0.1:{port}")
    check_free(f"10.0.0.1:{port}")
