"""The launcher of one machine: starts its ranks, reports their states, and ends them.

Node 0 decides; a launcher without other machines is node 0 itself.

    exit_code = run(options, ["train", "--config=configs/digits.py", "--workdir=runs/a"])
"""

import contextlib
import dataclasses
import logging
import math
import os
import pathlib
import secrets
import signal
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence

from tfaccel.common.errors import RunError, UserError
from tfaccel.common.redact import Redacted
from tfaccel.launch.coordinator import Coordinator
from tfaccel.launch.messages import Answer, Arrival, Report
from tfaccel.launch.options import Options, argv_of, digest_of
from tfaccel.launch.rank_environment import environment, free_ports
from tfaccel.launch.ranks import Ranks
from tfaccel.launch.rendezvous import TOKEN_VARIABLE, Client, check_reach, serving
from tfaccel.launch.stop import Stop, hear_no_more
from tfaccel.launch.terminal import Terminal, Terminals

log = logging.getLogger("tfaccel")

POLL_S = 0.1
REPORT_S = 1.0  # between reports to another node; the end of a rank is reported at once
# A scheduler may send its signal to the ranks, too, and a second signal would end a rank at once.
# Waiting shows which ranks have already received one.
PASS_ON_AFTER_S = 1.0


def run(options: Options, command: Sequence[str]) -> int:
    """Runs this node's ranks until the job is over, and returns the job's exit code.

    Raises:
      UserError: the command cannot run.
      RunError: node 0 was lost, or never started.
    """
    # If a parent ignored SIGCHLD, processes would have no exit codes.
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    argv, digest = argv_of(command), digest_of(command)
    token = os.environ.get(TOKEN_VARIABLE, "")
    _make(options.log_dir)
    with contextlib.ExitStack() as stack:
        terminals = stack.enter_context(Terminals())
        stack.enter_context(_shown_log(options, terminals.err))
        log.info("launch: the output of the ranks is kept in %s", options.log_dir)
        stop = stack.enter_context(Stop())
        stack.push(_hear_no_more_of_a_code)  # before `stop` restores handlers that end the process
        if options.num_nodes > 1:
            check_reach(options, token=token)
        if options.node_rank == 0:
            link = Coordinator(options, digest)
            if options.num_nodes > 1:
                stack.enter_context(serving(link, options, token=token))
        else:
            link = Client(options, token=token)
        return _Node(options, argv, digest, link, stop, terminals).run()


def _hear_no_more_of_a_code(error: type | None, *_) -> None:
    """Ignores late signals, so that they cannot change the exit code; not after an error."""
    if error is None:
        hear_no_more()


class _Node:
    """Joins, runs an attempt, and joins again, until an answer is final."""

    def __init__(
        self,
        options: Options,
        argv: Sequence[str],
        digest: str,
        link: Coordinator | Client,
        stop: Stop,
        terminals: Terminals,
    ):
        self._options, self._argv, self._digest = options, argv, digest
        self._terminals = terminals
        self._link, self._stop, self._is_local = link, stop, isinstance(link, Coordinator)
        self._launcher = secrets.token_hex(8)
        self._silent_since, self._trouble, self._has_joined = None, None, False

    def run(self) -> int:
        while True:
            with free_ports(self._options.num_ranks_per_node) as ports:
                answer = self._join(ports)
            if answer.action == "start":
                answer = self._attempt(answer)
            _show(answer)
            if answer.is_final:
                return answer.exit_code

    def _join(self, ports: tuple[int, ...]) -> Answer:
        """Returns when the next attempt begins, or when it is certain that none will.

        Raises:
          RunError: node 0 was silent for too long.
        """
        arrival = Arrival(self._options.node_rank, "127.0.0.1", ports, self._digest, self._launcher)
        while True:
            arrival = dataclasses.replace(arrival, stop_signal=self._stop.signal)
            answer = self._ask(self._link.join, arrival)
            if answer and answer.action != "wait":
                self._has_joined = True
                return answer
            if not answer:
                self._check_silence()
            time.sleep(POLL_S if self._is_local else REPORT_S / 2)

    def _check_silence(self) -> None:
        """Raises if node 0 was silent for too long, or this node was told to stop meanwhile."""
        if self._stop.signal:
            raise SystemExit(128 + self._stop.signal)
        # The machine answers but has no launcher any more; before joining, it may yet start.
        gone = self._has_joined and isinstance(self._trouble, ConnectionRefusedError)
        limit_s = self._options.node_timeout_s if gone else self._options.start_timeout_s
        if self._silent_s > limit_s:
            raise RunError(f"{self._lost()}; see its log")

    def _attempt(self, begun: Answer) -> Answer:
        """Runs the ranks of this node until node 0 ends the attempt or is lost."""
        options = self._options
        first_rank = options.node_rank * options.num_ranks_per_node
        log_dir = options.log_dir / f"attempt-{begun.attempt}"
        with Ranks(
            self._argv,
            [
                environment(begun.addresses, first_rank + index)
                for index in range(options.num_ranks_per_node)
            ],
            first_rank=first_rank,
            log_dir=log_dir,
            grace_s=options.grace_s,
            terminals=self._terminals,
            hurries=lambda: self._stop.count > 1,
        ) as ranks:
            answer = self._follow(ranks, begun.attempt)
            shown = ranks.show_stacks(answer.hung)  # now, because leaving the context ends them
            if not shown:
                return answer
            names = ", ".join(map(str, shown))
            where = f"the stacks of rank {names} are in its log in {log_dir}"
            return dataclasses.replace(answer, reason=f"{answer.reason}; {where}")

    def _follow(self, ranks: Ranks, attempt: int) -> Answer:
        passed_on, reported_at, reported = 0, -math.inf, None
        while True:
            passed_on = self._pass_on(ranks, passed_on)
            states, now = ranks.states(), time.monotonic()
            ended = [each.exit_code for each in states.values()]
            if self._is_local or ended != reported or now - reported_at >= REPORT_S:
                reported_at, reported = now, ended
                report = Report(
                    self._options.node_rank, attempt, states, self._launcher, self._stop.signal
                )
                answer = self._ask(self._link.report, report)
                if answer and answer.action != "go":
                    return answer
                if self._silent_s > self._options.node_timeout_s:
                    is_final = self._options.max_restarts == 0
                    return Answer(
                        "end", attempt, reason=self._lost(), is_final=is_final, exit_code=1
                    )
            time.sleep(POLL_S)

    def _pass_on(self, ranks: Ranks, passed_on: int) -> int:
        """Passes signals on to the ranks; returns how many were passed on."""
        if self._stop.count > 1 and passed_on < 2:
            ranks.send(signal.SIGKILL)
            return 2
        if self._stop.count and not passed_on and self._stop.age_s > PASS_ON_AFTER_S:
            ranks.send(self._stop.signal, unless_asked=True)
            return 1
        return passed_on

    def _ask(self, call: Callable, what: Arrival | Report) -> Answer | None:
        """Returns node 0's answer; None if there is none."""
        try:
            answer = call(what)
        except OSError as error:
            if self._silent_since is None:
                self._silent_since = time.monotonic()
                log.warning(
                    "launch: no answer yet from node 0 at %s (%s)", self._options.node_0, error
                )
            self._trouble = error
            return None
        self._silent_since = None
        return answer

    @property
    def _silent_s(self) -> float:
        return 0.0 if self._silent_since is None else time.monotonic() - self._silent_since

    def _lost(self) -> str:
        return (
            f"node 0's launcher at {self._options.node_0} is lost: no answer for "
            f"{self._silent_s:.0f} s ({self._trouble})"
        )


@contextlib.contextmanager
def _shown_log(options: Options, terminal: Terminal) -> Iterator[None]:
    """Shows the launcher's log within the context."""
    name = f"node {options.node_rank}" if options.num_nodes > 1 else "launch"
    handler = _Handler(terminal)
    handler.setFormatter(Redacted(f"[{name}] %(message)s"))
    level = log.level
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    try:
        yield
    finally:
        log.removeHandler(handler)
        log.setLevel(level)


class _Handler(logging.Handler):
    def __init__(self, terminal: Terminal):
        super().__init__()
        self._terminal = terminal

    def emit(self, record: logging.LogRecord) -> None:
        self._terminal.say(f"{self.format(record)}\n".encode(errors="replace"))


def _make(log_dir: pathlib.Path) -> None:
    """Makes the folder for the ranks' output.

    Raises:
      UserError: the folder cannot be written to.
    """
    try:
        log_dir.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=log_dir):
            pass
    except OSError as error:
        raise UserError(
            f"cannot write the ranks' output to {log_dir} ({error.strerror}); give a writable "
            "folder by --log-dir=DIR"
        ) from error


def _show(answer: Answer) -> None:
    """Logs why an attempt is over, and the last lines of the faulty rank."""
    if not answer.exit_code or answer.in_order:
        log.info("launch: %s", answer.reason)
        return
    log.error("launch: %s", answer.reason)
    if answer.tail:
        first_error, *last = answer.tail
        if first_error:
            log.error("launch: its first error: %s", first_error)
        log.error("launch: its last lines:\n%s", "\n".join(f"    {each}" for each in last))
