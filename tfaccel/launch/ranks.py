"""The ranks of one machine: started, watched, and ended with everything that they started.

with Ranks(argv, environments, first_rank=2, ...) as ranks:     # ended on the way out
    ranks.states()          # {2: RankState(...), 3: RankState(...)}
    ranks.send(signal.SIGTERM)
    ranks.show_stacks([2])  # prints where it hangs
"""

import contextlib
import datetime
import logging
import os
import pathlib
import shlex
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence

from tfaccel.common import temporary
from tfaccel.common.redact import escaped, redacted_command
from tfaccel.launch.gang import RankState
from tfaccel.launch.guard import Guard
from tfaccel.launch.output import Output
from tfaccel.launch.terminal import Terminals
from tfaccel.process import progress
from tfaccel.process.child import KILLED_S, Child

log = logging.getLogger("tfaccel")

POLL_S = 0.05
DRAIN_S = 1.0  # for the last lines of a rank that has ended
STACKS_S = 1.0  # for a hung rank to print its stacks, which have no recognizable last line
CLOSE_S = 5.0  # for all pipes that processes outside the ranks' groups keep open


class Ranks(contextlib.AbstractContextManager):
    """The processes of one attempt. They die with the thread that starts them.

    Everything that they started dies too, unless it left its rank's process group (setsid).
    """

    def __init__(
        self,
        argv: Sequence[str],
        environments: Sequence[Mapping[str, str]],
        *,
        first_rank: int,
        log_dir: pathlib.Path,
        terminals: Terminals,
        grace_s: float,
        hurries: Callable[[], bool] = bool,
    ):
        """Starts the ranks.

        Args:
          argv: the program.
          environments: the environment of each rank.
          first_rank: the rank of the first one.
          log_dir: the attempt's folder for each rank's output; it is made if it does not exist.
          terminals: where the output is shown, too.
          grace_s: seconds from SIGTERM to SIGKILL.
          hurries: returns whether to send SIGKILL without waiting.
        """
        self._grace_s, self._hurries, self._ranks = grace_s, hurries, {}
        self._heartbeats = temporary.Held("launch")
        self._guard = Guard()
        try:
            for rank, environment in enumerate(environments, first_rank):
                heartbeat = self._heartbeats.path / str(rank)
                each = self._ranks[rank] = _Rank(argv, environment, heartbeat)
                self._guard.watch(each.pid)
                each.show(f"[rank {rank}] ", log_dir / f"rank-{rank}.log", terminals)
        except BaseException:
            self.end()
            raise

    def __exit__(self, *_):
        """Ends the ranks."""
        self.end()

    def states(self) -> dict[int, RankState]:
        """Returns the states by rank."""
        return {rank: each.state() for rank, each in self._ranks.items()}

    def send(self, number: signal.Signals, *, unless_asked: bool = False) -> None:
        """Sends a signal to each rank's process group.

        Args:
          number: the signal.
          unless_asked: leave out ranks that have heard a signal; a second would end them at once.
        """
        for each in self._ranks.values():
            if not (unless_asked and each.state().asked):
                each.send(number)

    def show_stacks(self, hung: Sequence[int]) -> list[int]:
        """Makes ranks print the stacks of their threads, before they are ended.

        Args:
          hung: the ranks. Those of other machines, and those that cannot print, are ignored.

        Returns:
          The ranks that printed. A frozen rank does not.
        """
        before = {
            rank: each.num_stacks
            for rank, each in self._ranks.items()
            if rank in hung and each.asks_for_stacks()
        }
        if before:
            time.sleep(STACKS_S)
        return [rank for rank, count in before.items() if self._ranks[rank].num_stacks > count]

    def end(self) -> None:
        """Ends all process groups: with SIGTERM, and with SIGKILL after the grace."""
        self.send(signal.SIGTERM, unless_asked=True)
        ends = time.monotonic() + self._grace_s
        while time.monotonic() < ends and not self._hurries():
            if all(each.exit_code() is not None for each in self._ranks.values()):
                break
            time.sleep(POLL_S)
        self.send(signal.SIGKILL)  # also to groups without their leader
        self._wait()
        ends = time.monotonic() + CLOSE_S
        for each in self._ranks.values():
            each.close(ends)
        self._guard.close()
        self._heartbeats.remove()

    def _wait(self) -> None:
        ends = time.monotonic() + KILLED_S
        for rank, each in self._ranks.items():
            if not each.wait(ends):
                log.error(
                    "launch: rank %d did not end: process %d still runs %g s after SIGKILL, "
                    "perhaps in a driver or on a lost disk; check it with ps",
                    *(rank, each.pid, KILLED_S),
                )


class _Rank:
    """One process and its group."""

    def __init__(
        self, argv: Sequence[str], environment: Mapping[str, str], heartbeat: pathlib.Path
    ):
        self._heartbeat, self._ended_at = heartbeat, None
        self._argv, self._output = argv, None
        progress.write(heartbeat, progress.Progress(since=time.monotonic()))
        # The rank dies with its launcher. The guard ends what the rank has started.
        self._child = Child(
            argv,
            env={**environment, progress.VARIABLE: str(heartbeat), "PYTHONUNBUFFERED": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        self.pid, self.send = self._child.pid, self._child.send

    def show(self, prefix: str, log: pathlib.Path, terminals: Terminals) -> None:
        now = datetime.datetime.now().astimezone().isoformat(timespec="seconds")
        header = f"--- launched {now}: {_in_words(self._argv)}"
        self._output = Output(
            self._child.process, prefix=prefix, log=log, header=header, terminals=terminals
        )

    def exit_code(self) -> int | None:
        """Returns the exit code, 128 + n for signal n; None while the process runs."""
        code = self._child.exit_code()
        if code is not None and self._ended_at is None:
            self._ended_at = time.monotonic()
        return code if code is None or code >= 0 else 128 - code

    def state(self) -> RankState:
        code = self.exit_code()
        # Report the end only when the last lines are copied, so that the caller need not wait.
        if code is not None and not self._output.is_done:
            code = None if time.monotonic() - self._ended_at < DRAIN_S else code
        now = progress.read(self._heartbeat)
        return RankState(
            beats=now.beats,
            phase=now.phase,
            step=now.step,
            age_s=time.monotonic() - (now.since if code is None else self._ended_at),
            exit_code=code,
            lost=now.lost,
            asked=now.asked,
            tail=self._output.tail() if code else (),
        )

    @property
    def num_stacks(self) -> int:
        return self._output.num_stacks

    def asks_for_stacks(self) -> bool:
        """Asks for the stacks, unless the signal would end the process or has another handler."""
        # The process id in the heartbeat may be a child's, which may have ended since.
        says_so = progress.read(self._heartbeat).shows_stacks == self.pid
        # The script may have restored the default handler since its last beat.
        if not (says_so and progress.catches(self.pid, progress.STACKS_SIGNAL)):
            return False
        os.kill(self.pid, progress.STACKS_SIGNAL)  # not to the group: other processes would die
        return True

    def wait(self, ends: float) -> bool:
        """Waits until the process has ended or `ends` is past; returns whether it has ended."""
        try:
            self._child.process.wait(max(0.0, ends - time.monotonic()))
        except subprocess.TimeoutExpired:
            return False
        return True

    def close(self, ends: float) -> None:
        if self._output:
            self._output.close(max(0.0, ends - time.monotonic()))


def _in_words(argv: Sequence[str]) -> str:
    """Returns a command in one line, without secrets."""
    return escaped(shlex.join(redacted_command(argv)).replace("\n", " "))
