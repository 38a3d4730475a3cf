"""Node 0's port: who is answered, and who is not."""

import dataclasses
import http.client
import logging
import socket

import pytest

from tfaccel.common.errors import RunError, UserError
from tfaccel.launch.coordinator import Coordinator
from tfaccel.launch.gang import RankState
from tfaccel.launch.messages import Arrival, Report
from tfaccel.launch.options import Options
from tfaccel.launch.rendezvous import Client, check_reach, serving
from tfaccel.runtime.cluster.addresses import is_loopback


def options_with_port(**more):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    return Options(num_nodes=2, master_addr="127.0.0.1", master_port=port, **more)


def link_to(port, *, token="", host="127.0.0.1"):
    return Client(Options(num_nodes=2, master_addr=host, master_port=port), token=token)


def arrival_of(node, ports=(21000,)):
    return Arrival(node, "127.0.0.1", ports, "digest", f"launcher {node}")


@pytest.fixture
def served():
    options = options_with_port(node_timeout_s=0.2)
    coordinator = Coordinator(options, "digest")
    with serving(coordinator, options, token="secret"):
        yield coordinator, options.master_port


def test_all_values_travel_both_ways(served):
    coordinator, port = served
    coordinator.join(arrival_of(0))
    link = link_to(port, token="secret")
    begun = link.join(arrival_of(1, (21001,)))
    assert begun.action == "start"
    assert begun.addresses == ("127.0.0.1:21000", "127.0.0.1:21001")
    failed = RankState(exit_code=3, step=7, tail=("Error: é", "last"))
    end = link.report(Report(1, 0, {1: failed}, "launcher 1"))
    assert end.is_final
    assert (end.exit_code, end.tail) == (3, ("Error: é", "last"))


@pytest.mark.parametrize("token", ["", "Secret", "schlüssel", "鍵"])
def test_who_has_not_the_token_is_refused(served, token):
    _, port = served
    with pytest.raises(UserError, match="rejects the token"):
        link_to(port, token=token).join(arrival_of(1))


def test_a_token_may_be_of_any_letters():
    options = options_with_port(node_timeout_s=0.2)
    coordinator = Coordinator(options, "digest")
    with serving(coordinator, options, token="schlüssel 鍵"):
        link = link_to(options.master_port, token="schlüssel 鍵")
        assert link.join(arrival_of(1)).action == "wait"


@pytest.mark.skipif(not socket.has_dualstack_ipv6(), reason="needs IPv6")
def test_nodes_meet_by_ipv6():
    options = options_with_port(node_timeout_s=0.2)
    options = dataclasses.replace(options, master_addr="::1")
    coordinator = Coordinator(options, "digest")
    with serving(coordinator, options, token=""):
        coordinator.join(arrival_of(0))
        begun = link_to(options.master_port, host="::1").join(arrival_of(1))
    assert begun.addresses == ("[::1]:21000", "[::1]:21000")


def test_a_request_takes_a_part_of_what_a_node_may_be_silent(monkeypatch):
    given, connection = [], http.client.HTTPConnection

    def noted(*args, timeout):
        given.append(timeout)
        return connection(*args, timeout=timeout / 10)

    monkeypatch.setattr(http.client, "HTTPConnection", noted)
    with socket.create_server(("127.0.0.1", 0)) as mute:
        port = mute.getsockname()[1]
        options = Options(num_nodes=2, master_addr="127.0.0.1", master_port=port, node_timeout_s=4)
        with pytest.raises(TimeoutError):
            Client(options, token="").join(arrival_of(1))
    assert given == [1]


@pytest.mark.parametrize("host", ["8.8.8.8", "2600::1"])
def test_a_public_address_needs_a_token(host):
    options = Options(num_nodes=2, master_addr=host)
    with pytest.raises(UserError, match=r"is public.*TFACCEL_LAUNCH_TOKEN"):
        check_reach(options, token="")
    check_reach(options, token="secret")


@pytest.mark.parametrize(
    ("host", "token", "warns"),
    [
        ("10.0.0.1", "", True),
        ("10.0.0.1", "secret", False),
        ("127.0.0.1", "", False),
        ("::1", "", False),
        ("no-such-host.invalid", "", False),  # it may get its address later
    ],
)
def test_a_network_without_a_token_is_said(host, token, warns, caplog):
    with caplog.at_level(logging.WARNING, "tfaccel"):
        check_reach(Options(num_nodes=2, master_addr=host), token=token)
    assert ("TFACCEL_LAUNCH_TOKEN" in caplog.text) == warns


@pytest.mark.parametrize(
    ("body", "length", "status"),
    [
        (b"{}", "2", 400),
        (b"[]", "2", 400),
        (b"no json", "7", 400),
        (b'{"node": 1, "ports": "x"}', "25", 400),
        (b"", "99999999999", 400),
        (b"", "-1", 400),
    ],
)
def test_what_is_no_message_does_no_harm(served, body, length, status):
    coordinator, port = served
    for path in ("/join", "/report"):
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=300)
        headers = {"Authorization": "Bearer secret", "Content-Length": length}
        connection.request("POST", path, body, headers)
        assert connection.getresponse().status == status
        connection.close()
    assert coordinator.join(arrival_of(0)).action == "wait"


def test_nobody_there_is_an_os_error():
    options = options_with_port()
    with pytest.raises(OSError, match="refused"):
        link_to(options.master_port).join(arrival_of(1))


@pytest.mark.parametrize(
    ("chosen_by", "error", "cure"),
    [
        ("", UserError, "a free --master-port"),
        ("Slurm step 12.0", RunError, "Slurm step 12.0 chose.*start the job again"),
    ],
)
def test_a_port_that_is_taken_is_a_sentence(chosen_by, error, cure):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        options = Options(
            num_nodes=2, master_addr="127.0.0.1", master_port=port, port_chosen_by=chosen_by
        )
        with (
            pytest.raises(error, match=rf"cannot listen on 127\.0\.0\.1:.*{cure}"),
            serving(Coordinator(options, ""), options, token=""),
        ):
            pass


def test_an_address_of_another_machine_is_a_sentence():
    options = Options(num_nodes=2, master_addr="192.0.2.1", master_port=29400)
    with (
        pytest.raises(UserError, match="give this machine's address as --master-addr"),
        serving(Coordinator(options, ""), options, token=""),
    ):
        pass


# A machine's own name, as Debian has it.


@pytest.fixture
def own_name(monkeypatch):
    """`node0` is 127.0.1.1 here."""
    real = socket.getaddrinfo

    def getaddrinfo(host, *args, **kwargs):
        return real("127.0.1.1" if host == "node0" else host, *args, **kwargs)

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)


def test_a_name_that_leads_here_from_here_alone_needs_a_token(own_name):
    options = Options(num_nodes=2, master_addr="node0")
    with pytest.raises(UserError, match=r"node0 is 127\.0\.1\.1 on this machine.*TFACCEL_LAUNCH"):
        check_reach(options, token="")
    check_reach(options, token="secret")
    check_reach(dataclasses.replace(options, node_rank=1), token="")  # its own name is another


@pytest.mark.parametrize(("token", "others_come_in"), [("", False), ("secret", True)])
def test_without_a_token_only_the_address_that_was_asked_for_is_bound(
    own_name, caplog, token, others_come_in
):
    options = dataclasses.replace(options_with_port(node_timeout_s=0.2), master_addr="node0")
    coordinator = Coordinator(options, "digest")
    with serving(coordinator, options, token=token):
        socket.create_connection(("127.0.1.1", options.master_port), 300).close()
        try:
            socket.create_connection(("127.0.0.1", options.master_port), 300).close()
            came_in = True
        except ConnectionRefusedError:
            came_in = False
    assert came_in == others_come_in
    assert ("listens on all addresses" in caplog.text) == others_come_in


@pytest.mark.parametrize("host", ["0.0.0.0", "::"])
def test_all_addresses_are_none_to_reach_node_0_by(host):
    options = dataclasses.replace(options_with_port(), master_addr=host)
    for token in ("", "secret"):
        with pytest.raises(UserError, match="does not lead to node 0"):
            check_reach(options, token=token)
    with (
        pytest.raises(UserError, match="all addresses of this machine"),
        serving(Coordinator(options, "digest"), options, token=""),
    ):
        pass


def test_a_name_that_begins_as_a_loopback_address_is_none():
    assert [is_loopback(each) for each in ("127.0.0.1", "::1", "::ffff:127.0.0.1")] == [True] * 3
    assert not any(map(is_loopback, ("127.example.org", "10.0.0.1", "localhost")))
