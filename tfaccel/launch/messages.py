"""What the launchers of a job say to each other; all of it is JSON-ready.

Arrival(node=1, host="10.0.0.2", ports=(21034, 25110), digest="5f0c...", launcher="9e1b...")
Report(node=1, attempt=0, states={2: RankState(...), 3: RankState(...)}, launcher="9e1b...")
Answer("end", reason="rank 3 was ended by SIGKILL, exit code 137; ...")
"""

import dataclasses
from collections.abc import Mapping

from tfaccel.launch.gang import RankState


@dataclasses.dataclass(frozen=True)
class Arrival:
    """A node that has no ranks and waits for an attempt.

    Attributes:
      node: which.
      host: by which the others reach it; a loopback address on node 0's own machine.
      ports: free there, one for each rank.
      digest: of the command, which is the same on all.
      launcher: which no other one is, though it may say that it is the same node.
      stop_signal: that told its launcher to stop; 0 for none.
      reached_at: the address at which it has reached node 0; node 0's port writes it.
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
    """How a node's ranks stand in an attempt."""

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
      attempt: that it is about.
      addresses: of all ranks, to start.
      reason: of an end.
      tail: what the rank at fault printed: its first error, then its last lines.
      is_final: whether the launcher ends too, with `exit_code`.
      exit_code: of the job.
      in_order: whether the ranks stopped as a signal asked them to, although that is not 0.
      hung: ranks whose stacks tell why they come no further.
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
