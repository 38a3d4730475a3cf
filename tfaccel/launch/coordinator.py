"""Decides on node 0 for all nodes: when an attempt begins and ends, and whether to restart.

Nodes call it in any order and from several threads, and each call returns an Answer.

    coordinator = Coordinator(options, digest)
    answer = coordinator.join(Arrival(node=0, ports=(21034, 25110), digest=digest, ...))
    answer.action           # "wait" until all nodes have joined, then "start" with all addresses
    answer = coordinator.report(Report(node=0, attempt=0, states={0: ..., 1: ...}, ...))
    answer.action           # "go", or "end" with the reason; `is_final` if there is no restart

An attempt ends at the first verdict on any rank or node. All nodes then end their ranks and join
again, unless the verdict is final.
"""

import dataclasses
import logging
import threading
import time
from collections.abc import Callable

from tfaccel.common.tables import in_figures
from tfaccel.launch import gang
from tfaccel.launch.gang import RankState, Verdict
from tfaccel.launch.messages import Answer, Arrival, Report
from tfaccel.launch.options import Options
from tfaccel.runtime.cluster.addresses import in_url, is_loopback

log = logging.getLogger("tfaccel")

SAME = "give all nodes the same flags and command"


class Coordinator:
    """The state of the job. Each method may be called from any thread."""

    def __init__(
        self, options: Options, digest: str, *, clock: Callable[[], float] = time.monotonic
    ):
        """Waits for nodes of the job with this digest of its command."""
        self._options, self._digest, self._clock = options, digest, clock
        self._limits, self._lock = gang.limits_of(options), threading.RLock()
        self._attempt, self._running = 0, False
        self._arrivals: dict[int, Arrival] = {}
        self._begun: set[int] = set()  # nodes that have reported in this attempt
        self._heard: dict[int, float] = {}
        self._launchers: dict[int, str] = {}  # the launcher of each node that was heard
        self._states: dict[int, tuple[RankState, float]] = {}
        self._furthest: list[int] = []
        self._not_before = self._gathering_since = clock()
        self._stop_signal, self._stopping_since = 0, None
        self._end: Answer | None = None  # the end of the last attempt, or of the job
        self._told: set[int] = set()

    @property
    def all_told(self) -> bool:
        """True if every node that joined and is not lost knows that the job is over."""
        with self._lock:
            return self._told.issuperset(self._heard)

    def join(self, arrival: Arrival) -> Answer:
        """Takes a node that waits for an attempt. The node asks again until the attempt begins."""
        with self._lock:
            if reason := self._stranger(arrival) or self._misfit(arrival):
                return _rejection(reason)
            self._note(arrival)
            known = self._arrivals.get(arrival.node)
            if self._running and (arrival.node in self._begun or known.ports != arrival.ports):
                self._finish(Verdict(1, f"node {arrival.node} ({arrival.host}) left its ranks"))
            if not self._running:
                self._arrivals[arrival.node] = arrival
            self._advance()
            if self._is_over:
                return self._final(arrival.node)
            if self._running:
                return Answer("start", self._attempt, self._addresses())
            return Answer("wait", self._attempt)

    def report(self, report: Report) -> Answer:
        """Takes the states of a node's ranks, and judges the states of all ranks."""
        with self._lock:
            if reason := self._stranger(report):
                return _rejection(reason)
            self._note(report)
            if self._running and report.attempt == self._attempt:
                self._begun.add(report.node)
                now = self._clock()
                self._states |= {rank: (state, now) for rank, state in report.states.items()}
            self._advance()
            if self._is_over:
                return self._final(report.node)
            if self._running and report.attempt == self._attempt:
                return Answer("go", self._attempt)
            return self._end or Answer("end", report.attempt, reason="node 0 was restarted")

    def _stranger(self, what: Arrival | Report) -> str | None:
        """Returns why the sender is not a launcher of this job; None if it is one."""
        node, timeout_s = what.node, self._options.node_timeout_s
        if not 0 <= node < self._options.num_nodes:
            return f"node {node} in a job of --nnodes={self._options.num_nodes}; {SAME}"
        if self._launchers.get(node, what.launcher) == what.launcher:
            return None
        if self._clock() - self._heard[node] > timeout_s:
            return None  # a restart, after the first launcher was lost
        first = self._arrivals.get(node)
        where = f", the first one on {first.host}" if first else ""
        return (
            f"two launchers are node {node}{where}; give every machine its own --node-rank, or "
            f"restart a launcher {in_figures(timeout_s)} s after it ended"
        )

    def _misfit(self, arrival: Arrival) -> str | None:
        """Returns how a launcher that joins differs from node 0's; None if it does not."""
        expected = self._options.num_ranks_per_node
        if len(arrival.ports) != expected:
            received = f"--nproc-per-node={len(arrival.ports)}"
            return f"node {arrival.node} has {received}, node 0 {expected}; {SAME}"
        if arrival.digest != self._digest:
            return f"node {arrival.node} launches a different command than node 0; {SAME}"
        return None

    def _note(self, what: Arrival | Report) -> None:
        self._heard[what.node], self._launchers[what.node] = self._clock(), what.launcher
        if what.stop_signal and not self._stop_signal:
            self._stop_signal, self._stopping_since = what.stop_signal, self._clock()

    def _addresses(self) -> tuple[str, ...]:
        """Returns the addresses of all ranks. Node 0's host is the one that other nodes reached."""
        nodes = [self._arrivals[node] for node in range(self._options.num_nodes)]
        reached = [each.reached_at for each in nodes if each.reached_at]
        seen_from_afar = [each for each in reached if not is_loopback(each)]
        node_0 = [*seen_from_afar, *reached, nodes[0].host][0]
        hosts = [node_0 if is_loopback(each.host) else each.host for each in nodes]
        return tuple(
            f"{in_url(host)}:{port}"
            for host, each in zip(hosts, nodes, strict=True)
            for port in each.ports
        )

    @property
    def _is_over(self) -> bool:
        return self._end is not None and self._end.is_final

    def _final(self, node: int) -> Answer:
        self._told.add(node)
        return self._end

    def _advance(self) -> None:
        """Begins or ends the attempt, or ends the job, if it is time."""
        if self._is_over:
            return
        verdict = self._verdict() if self._running else self._gather()
        if verdict:
            self._finish(verdict)

    def _verdict(self) -> Verdict | None:
        now = self._clock()
        for node, arrival in sorted(self._arrivals.items()):
            silent_s = now - self._heard[node]
            if silent_s > self._options.node_timeout_s:
                self._told.add(node)  # do not wait for it any longer
                return Verdict(
                    1, f"node {node} ({arrival.host}) is lost: it was silent for {silent_s:.0f} s"
                )
        states = {
            rank: dataclasses.replace(state, age_s=state.age_s + now - at)
            for rank, (state, at) in sorted(self._states.items())
        }
        stopping_s = None if self._stopping_since is None else now - self._stopping_since
        return gang.judge(states, self._limits, stopping_s=stopping_s)

    def _gather(self) -> Verdict | None:
        """Begins the attempt if all nodes have joined; returns a verdict if it cannot begin."""
        now, options = self._clock(), self._options
        if self._stop_signal:
            return Verdict(128 + self._stop_signal, "no rank was running")
        missing = [
            node
            for node in range(options.num_nodes)
            if node not in self._arrivals or now - self._heard[node] > options.node_timeout_s
        ]
        if not missing and now >= self._not_before:
            self._running, self._begun, self._told = True, set(), set()
            self._states = {rank: (RankState(), now) for rank in range(options.num_ranks)}
            return None
        if missing and now - self._gathering_since > options.start_timeout_s:
            names = ", ".join(map(str, missing))
            return Verdict(
                1, f"node {names} did not join within {in_figures(options.start_timeout_s)} s"
            )
        return None

    def _finish(self, verdict: Verdict) -> None:
        """Ends the attempt, and prepares the next one or ends the job."""
        if self._running:
            self._furthest.append(max(state.step for state, _ in self._states.values()))
        why_not = gang.why_not_again(
            verdict,
            restarts=self._attempt,
            options=self._options,
            furthest=self._furthest,
            was_told_to_stop=bool(self._stop_signal),
        ) or (None if self._running else "not all nodes joined")
        wait_s = gang.backoff_s(self._attempt)
        self._end = Answer(
            "end",
            self._attempt,
            reason=verdict.reason + self._then(verdict, why_not, wait_s),
            tail=self._states[verdict.rank][0].tail if verdict.rank is not None else (),
            is_final=why_not is not None,
            exit_code=verdict.exit_code,
            in_order=verdict.in_order,
            hung=verdict.hung,
        )
        self._attempt, self._running, self._arrivals = self._attempt + 1, False, {}
        self._not_before = self._gathering_since = self._clock() + wait_s

    def _then(self, verdict: Verdict, why_not: str | None, wait_s: float) -> str:
        if why_not is None:
            again = f"restart {self._attempt + 1} of {self._options.max_restarts}"
            return f"; {again} from the last checkpoint in {in_figures(wait_s)} s"
        return f"; not restarted: {why_not}" if verdict.exit_code else ""


def _rejection(reason: str) -> Answer:
    """Returns the answer that ends a launcher which does not belong to the job."""
    log.warning("launch: %s: the launcher is rejected", reason)
    return Answer("end", reason=reason, is_final=True, exit_code=2)
