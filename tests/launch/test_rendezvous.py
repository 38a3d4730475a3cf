"""Node 0's port: who is answered, and who is not."""

import http.client
import socket

import pytest

from tfaccel.errors import UserError
from tfaccel.launch.coordinator import Coordinator
from tfaccel.launch.gang import RankState
from tfaccel.launch.messages import Arrival, Report
from tfaccel.launch.options import Options
from tfaccel.launch.rendezvous import Client, serving


def options_with_port(**more):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    return Options(num_nodes=2, master_addr="127.0.0.1", master_port=port, **more)


@pytest.fixture
def served():
    options = options_with_port(node_timeout_s=0.2)
    coordinator = Coordinator(options, "digest")
    with serving(coordinator, options, token="secret"):
        yield coordinator, options.master_port


def test_all_values_travel_both_ways(served):
    coordinator, port = served
    coordinator.join(Arrival(0, "127.0.0.1", (21000,), "digest"))
    link = Client("127.0.0.1", port, token="secret")
    begun = link.join(Arrival(1, "", (21001,), "digest"))
    assert begun.action == "start"
    assert begun.addresses == ("127.0.0.1:21000", "127.0.0.1:21001")
    failed = RankState(exit_code=3, step=7, tail=("Error: é", "last"))
    end = link.report(Report(1, 0, {1: failed}))
    assert end.is_final
    assert (end.rank, end.exit_code, end.tail) == (1, 3, ("Error: é", "last"))


def test_who_has_not_the_token_is_refused(served):
    _, port = served
    with pytest.raises(UserError, match="refuses the token"):
        Client("127.0.0.1", port, token="").join(Arrival(1, "", (21001,), "digest"))


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
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
        headers = {"Authorization": "Bearer secret", "Content-Length": length}
        connection.request("POST", path, body, headers)
        assert connection.getresponse().status == status
        connection.close()
    assert coordinator.join(Arrival(0, "127.0.0.1", (21000,), "digest")).action == "wait"


def test_nobody_there_is_an_os_error():
    options = options_with_port()
    with pytest.raises(OSError, match="refused"):
        Client("127.0.0.1", options.master_port, token="").join(Arrival(1, "", (1,), "digest"))


def test_a_port_that_is_taken_is_a_sentence():
    with socket.create_server(("127.0.0.1", 0)) as server:
        options = Options(num_nodes=2, master_addr="127.0.0.1", master_port=server.getsockname()[1])
        with (
            pytest.raises(UserError, match=r"cannot listen on 127\.0\.0\.1:"),
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
