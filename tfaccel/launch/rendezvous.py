"""The connection of other nodes' launchers to node 0's: JSON over HTTP, one message per request.

Node 0 serves its Coordinator, and the Client of another node has the same two methods.

    check_reach(options, token="")          # UserError for a public address
    with serving(coordinator, options, token=""): ...
    link = Client(options, token="")
    link.join(arrival); link.report(report)     # an Answer, or ConnectionError

Whoever can reach the port can send messages. With a token, in TFACCEL_LAUNCH_TOKEN on every node,
only requests with that token are answered. Messages contain only values, and never a program.
"""

import contextlib
import dataclasses
import errno
import hmac
import http.client
import http.server
import json
import logging
import socket
import threading
import time
from collections.abc import Iterable, Iterator

from tfaccel.common.errors import RunError, UserError
from tfaccel.launch.coordinator import Coordinator
from tfaccel.launch.gang import RankState
from tfaccel.launch.messages import Answer, Arrival, Report
from tfaccel.launch.options import Options
from tfaccel.runtime.cluster.addresses import in_url, is_any, is_loopback, look_up, public

log = logging.getLogger("tfaccel")

TOKEN_VARIABLE = "TFACCEL_LAUNCH_TOKEN"
REQUEST_TIMEOUT_S = 5.0
LARGEST_BODY = 2**22  # bytes; a rank may send 16 lines of 500 characters
POLL_S = 0.1


class Client:
    """The side of a node other than node 0."""

    def __init__(self, options: Options, *, token: str):
        """Does not connect yet."""
        self._host, self._port = options.master_addr, options.master_port
        # The timeout of one request is only a part of the time for which a node may be silent.
        self._timeout_s = min(REQUEST_TIMEOUT_S, options.node_timeout_s / 4)
        self._headers = {"Content-Type": "application/json"}
        if token:
            self._headers["Authorization"] = _bearer(token)

    def join(self, arrival: Arrival) -> Answer:
        """Calls Coordinator.join on node 0, with the address at which node 0 sees this node.

        Raises:
          OSError: node 0 cannot be reached.
          UserError: node 0 rejects the token.
        """
        return self._ask("/join", arrival)

    def report(self, report: Report) -> Answer:
        """Calls Coordinator.report on node 0; raises the errors of `join`."""
        return self._ask("/report", report)

    def _ask(self, path: str, what: Arrival | Report) -> Answer:
        connection = http.client.HTTPConnection(self._host, self._port, timeout=self._timeout_s)
        with contextlib.closing(connection):
            connection.connect()
            body = dataclasses.asdict(what)
            if path == "/join":
                body["host"] = connection.sock.getsockname()[0]
            try:
                connection.request("POST", path, json.dumps(body), self._headers)
                response = connection.getresponse()
                text = response.read(LARGEST_BODY)
            except http.client.HTTPException as error:
                raise ConnectionError(f"no answer in HTTP: {error!r}") from error
        if response.status == http.HTTPStatus.UNAUTHORIZED:
            raise UserError(
                f"node 0 at {in_url(self._host)}:{self._port} rejects the token of "
                f"{TOKEN_VARIABLE}; set the same token on all nodes"
            )
        if response.status != http.HTTPStatus.OK:
            raise ConnectionError(f"HTTP status {response.status}")
        try:
            return _answer(json.loads(text))
        except (KeyError, TypeError, ValueError) as error:
            raise ConnectionError("the answer is not from a launcher of tfaccel") from error


def check_reach(options: Options, *, token: str) -> None:
    """Checks who can reach node 0's port; skips a host that has no address yet.

    Raises:
      UserError: the port is public and there is no token, or other machines cannot reach node 0 at
        this address.
    """
    try:
        found = look_up(options.master_addr)
    except OSError:
        return
    if any(map(is_any, found)):
        raise UserError(
            f"--master-addr={options.master_addr} means all addresses of a machine, so it does not "
            "lead to node 0; give the address at which the other nodes reach node 0"
        )
    if token:
        return
    where = options.node_0
    if options.node_rank == 0 and _is_own_name(options.master_addr, found):
        raise UserError(
            f"--master-addr={options.master_addr} is {sorted(found)[0]} on this machine, which no "
            "other machine can reach; give this machine's network address instead of its name, or "
            f"set the same secret as {TOKEN_VARIABLE} on all nodes: node 0 then listens on all "
            "addresses"
        )
    if open_to_all := public(found):
        raise UserError(
            f"node 0's port {where} is public ({open_to_all[0]}), and without a token whoever "
            f"reaches it can end the job; set the same secret as {TOKEN_VARIABLE} on all nodes, or "
            "give a private address as --master-addr"
        )
    if not all(map(is_loopback, found)):
        log.warning(
            "launch: whoever reaches node 0's port %s can end the job; to close it, set the same "
            "secret as %s on all nodes",
            where,
            TOKEN_VARIABLE,
        )


@contextlib.contextmanager
def serving(coordinator: Coordinator, options: Options, *, token: str) -> Iterator[None]:
    """Answers the other nodes within the context. At the end, waits until all know the outcome.

    Raises:
      UserError: this machine does not have the address, the port of a flag is in use, or the
        address means all addresses and there is no token.
      RunError: a port that a scheduler chose is in use; another start has another port.
    """
    family, address = _listening_address(options, token=token)
    handler = type("Handler", (_Handler,), {"coordinator": coordinator, "token": token})
    server_class = type("Server", (http.server.ThreadingHTTPServer,), {"address_family": family})
    try:
        server = server_class((address, options.master_port), handler)
    except OSError as error:
        raise _cannot_listen(address, options, error) from error
    log.info("launch: node 0 listens on %s:%d", address or "all addresses", options.master_port)
    with server:
        thread = threading.Thread(target=server.serve_forever, args=(POLL_S,), daemon=True)
        thread.start()
        try:
            yield
            ends = time.monotonic() + options.node_timeout_s
            while not coordinator.all_told and time.monotonic() < ends:
                time.sleep(POLL_S)
        finally:
            server.shutdown()
            thread.join()


def _cannot_listen(address: str, options: Options, error: OSError) -> UserError | RunError:
    where = f"cannot listen on {in_url(address)}:{options.master_port} ({error.strerror})"
    if error.errno == errno.EADDRINUSE and options.port_chosen_by:
        return RunError(
            f"{where}, a port that {options.port_chosen_by} chose; start the job again to get "
            "another port"
        )
    return UserError(
        f"{where}; give this machine's address as --master-addr, and a free --master-port"
    )


def _bearer(token: str) -> bytes:
    return f"Bearer {token}".encode()


def _is_own_name(host: str, found: Iterable[str]) -> bool:
    """Returns whether a host is a name of this machine that other machines cannot use.

    Debian maps a machine's own name to 127.0.1.1, which no other machine can reach.
    """
    return host not in ("localhost", *found) and all(map(is_loopback, found))


def _listening_address(options: Options, *, token: str) -> tuple[int, str]:
    """Returns the family and the address on which node 0 listens: the one that other nodes use.

    The address is "", for all addresses, only if there is a token and other machines cannot use the
    name's address.
    """
    try:
        found = socket.getaddrinfo(
            options.master_addr, options.master_port, type=socket.SOCK_STREAM
        )
    except (OSError, UnicodeError) as error:
        raise UserError(
            f"--master-addr={options.master_addr} cannot be looked up ({error}); give node 0's "
            "address"
        ) from error
    family, *_, (address, *_) = found[0]
    if is_any(address) and not token:
        raise UserError(
            f"--master-addr={options.master_addr} is {address}, which means all addresses of this "
            "machine; give one of them"
        )
    if token and _is_own_name(options.master_addr, {each[4][0] for each in found}):
        log.warning(
            "launch: %s is %s on this machine, which no other machine can reach, so node 0 listens "
            "on all addresses, and answers only requests with the token",
            options.master_addr,
            address,
        )
        return family, ""
    return family, address


class _Handler(http.server.BaseHTTPRequestHandler):
    """Handles one request of a node."""

    coordinator: Coordinator
    token: str
    timeout = REQUEST_TIMEOUT_S

    def do_POST(self):
        """Answers a node."""
        # compare_digest takes non-ASCII only as bytes, and a client may send any bytes.
        given = self.headers.get("Authorization", "").encode("latin-1")
        if self.token and not hmac.compare_digest(given, _bearer(self.token)):
            self.send_error(http.HTTPStatus.UNAUTHORIZED)
            return
        try:
            answer = self._answer(self._body())
        except (KeyError, TypeError, ValueError) as error:
            self.send_error(http.HTTPStatus.BAD_REQUEST, type(error).__name__)
            return
        text = json.dumps(dataclasses.asdict(answer)).encode()
        self.send_response(http.HTTPStatus.OK)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def _body(self) -> dict:
        length = int(self.headers["Content-Length"])
        if not 0 < length <= LARGEST_BODY:
            raise ValueError("length")
        return json.loads(self.rfile.read(length))

    def _answer(self, body: dict) -> Answer:
        if self.path == "/join":
            reached_at = self.connection.getsockname()[0]
            ports = tuple(map(int, body["ports"]))
            arrival = Arrival(**body | {"ports": ports, "reached_at": reached_at})
            return self.coordinator.join(arrival)
        states = {int(rank): RankState(**each) for rank, each in body["states"].items()}
        return self.coordinator.report(Report(**body | {"states": states}))

    def log_message(self, *_):
        """Does not log requests."""


def _answer(body: dict) -> Answer:
    return Answer(**body | {name: tuple(body[name]) for name in ("addresses", "tail", "hung")})
