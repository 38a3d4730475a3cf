"""The ranks of one machine: started, watched and ended as process groups that leave no orphan.

Takes a program and each rank's environment; gives how each stands.

    with Ranks(argv, environments, first_rank=2, log_dir=...) as ranks:     # ended on the way out
        ranks.states()          # {2: RankState(...), 3: RankState(...)}
        ranks.send(signal.SIGTERM)
"""

import contextlib
import os
import pathlib
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence

from tfaccel import progress
from tfaccel.launch.gang import RankState
from tfaccel.launch.output import Output

# The kernel ends a rank whose launcher has died: PR_SET_PDEATHSIG outlives the exec.
DIES_WITH = (
    "import ctypes, os, sys; ctypes.CDLL(None).prctl(1, 9); "
    "os.getppid() == int(sys.argv[1]) or os._exit(1); os.execv(sys.argv[2], sys.argv[2:])"
)
POLL_S = 0.05
DRAIN_S = 1.0  # for the last lines of a rank that has ended


class Ranks:
    """Processes of one attempt. Start them in a thread that outlives them: they die with it."""

    def __init__(
        self,
        argv: Sequence[str],
        environments: Sequence[Mapping[str, str]],
        *,
        first_rank: int,
        log_dir: pathlib.Path,
        grace_s: float,
        hurries: Callable[[], bool] = bool,
    ):
        """Starts them.

        Args:
          argv: the program.
          environments: one for each rank.
          first_rank: the first one's rank.
          log_dir: of this attempt, for each rank's output; made if it is not there.
          grace_s: from SIGTERM to SIGKILL.
          hurries: whether SIGKILL is to come at once.
        """
        self._grace_s, self._hurries, self._ranks = grace_s, hurries, {}
        self._heartbeats = tempfile.TemporaryDirectory(prefix="tfaccel-launch-")
        log_dir.mkdir(parents=True, exist_ok=True)
        try:
            for rank, environment in enumerate(environments, first_rank):
                path = pathlib.Path(self._heartbeats.name, str(rank))
                log = log_dir / f"rank-{rank}.log"
                self._ranks[rank] = _Rank(rank, argv, environment, heartbeat=path, log=log)
        except BaseException:
            self.end()
            raise

    def __enter__(self) -> "Ranks":
        """Returns the ranks."""
        return self

    def __exit__(self, *_):
        """Ends them."""
        self.end()

    def states(self) -> dict[int, RankState]:
        """Returns how each stands, by rank."""
        return {rank: each.state() for rank, each in self._ranks.items()}

    def send(self, number: signal.Signals, *, unless_asked: bool = False) -> None:
        """Sends a signal to each rank's whole group.

        Args:
          number: the signal.
          unless_asked: leave out those that have heard one: a second one would end them at once.
        """
        for each in self._ranks.values():
            if not (unless_asked and each.state().asked):
                each.send(number)

    def end(self) -> None:
        """Ends all: SIGTERM, and after the grace SIGKILL, to whole groups."""
        self.send(signal.SIGTERM, unless_asked=True)
        ends = time.monotonic() + self._grace_s
        while time.monotonic() < ends and not self._hurries():
            if not any(each.is_running for each in self._ranks.values()):
                break
            time.sleep(POLL_S)
        for each in self._ranks.values():
            each.kill()
        self._heartbeats.cleanup()


class _Rank:
    """One process, and its group."""

    def __init__(self, rank, argv, environment, *, heartbeat: pathlib.Path, log: pathlib.Path):
        self._heartbeat, self._ended_at = heartbeat, None
        progress.write(heartbeat, progress.Progress(since=time.monotonic()))
        self._process = subprocess.Popen(
            [sys.executable, "-ISc", DIES_WITH, str(os.getpid()), *argv],
            env={**environment, progress.VARIABLE: str(heartbeat), "PYTHONUNBUFFERED": "1"},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            process_group=0,
        )
        self._output = Output(self._process, prefix=f"[rank {rank}] ", log=log)

    @property
    def is_running(self) -> bool:
        return self._process.poll() is None

    def state(self) -> RankState:
        code = self._process.poll()
        if code is not None and self._ended_at is None:
            self._ended_at = time.monotonic()
            self._output.wait(DRAIN_S)
        now = progress.read(self._heartbeat)
        failed = bool(code)
        return RankState(
            beats=now.beats,
            phase=now.phase,
            step=now.step,
            age_s=time.monotonic() - (now.since if code is None else self._ended_at),
            exit_code=128 - code if failed and code < 0 else code,
            lost=now.lost,
            asked=now.asked,
            tail=self._output.tail() if failed else (),
        )

    def send(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, number)

    def kill(self) -> None:
        """Ends the group: its leader may have ended before what it started."""
        self.send(signal.SIGKILL)
        self._process.wait()
        self._output.close()
