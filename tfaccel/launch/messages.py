"""The messages between the launchers of a job. All values are ready for JSON.

Arrival(node=1, host="10.0.0.2", ports=(21034, 25110), digest="5f0c...", launcher="9e1b...")
Report(node=1, attempt=0, states={2: RankState(...), 3: RankState(...)}, launcher="9e1b...")
Answer("end", reason="rank 3 was ended by SIGKILL, exit code 137; ...")
"""

import dataclasses
from collections.abc import Mapping

from tfaccel.launch.gang import RankState


@dataclasses.dataclass(frozen=True)
class Arrival:
    """A node without ranks that waits for an attempt.

    Attributes:
      node: the node's index.
      host: the address at which other nodes reach it; a loopback address on node 0's machine.
      ports: free ports of the node, one for each rank.
      digest: the digest of the command, which must be the same on all nodes.
      launcher: a unique name of this launcher; another one may wrongly have the same node index.
      stop_signal: the signal that told the launcher to stop; 0 for none.
      reached_at: the address at which it reached node 0, filled in by node 0.
    """

    node: int
    host: str
    ports: tuple[int, ...]
    digest: str
    launcher: str
    stop_signal: int = 0
    reached_at: str = ""


@dataclasses.dataclass(frozen=True)
class Report:
    """The states of a node's ranks in an attempt."""

    node: int
    attempt: int
    states: Mapping[int, RankState]
    launcher: str
    stop_signal: int = 0


@dataclasses.dataclass(frozen=True)
class Answer:
    """What a node does next.

    Attributes:
      action: "wait", "start", "go" or "end".
      attempt: the number of the attempt.
      addresses: the addresses of all ranks, to start.
      reason: the reason for an end.
      tail: output of the faulty rank: its first error, then its last lines.
      is_final: whether the launcher ends too, with `exit_code`.
      exit_code: the exit code of the job.
      in_order: whether the ranks stopped because a signal asked them to; the exit code is not 0.
      hung: ranks that make no progress, whose stacks should be printed.
    """

    action: str
    attempt: int = 0
    addresses: tuple[str, ...] = ()
    reason: str = ""
    tail: tuple[str, ...] = ()
    is_final: bool = False
    exit_code: int = 0
    in_order: bool = False
    hung: tuple[int, ...] = ()
