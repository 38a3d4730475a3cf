"""One variant's process, seen from the comparison: it stays alive, and trains on request.

    arm = ArmProcess(config, settings, log=pathlib.Path("1.log"), limit=lambda: (600, False))
    arm.first_step_s; arm.stretch(); arm.losses; arm.close()

`tfaccel.process.isolate` starts the child, and child.py runs in it. Both sides talk through the
files of protocol.py. This module does not import TensorFlow.
"""

import itertools
import pathlib
import subprocess

from tfaccel.common import temporary
from tfaccel.common.errors import UserError
from tfaccel.common.tables import cleaned, in_figures
from tfaccel.config import Config
from tfaccel.diagnostics.compare import protocol
from tfaccel.diagnostics.compare.pace import Pace, Settings
from tfaccel.process.isolate import KEPT_LETTERS, IsolatedError, Task

MAX_LETTERS = 300  # of an error message


class ArmError(Exception):
    """A variant's process failed; the message is a sentence for the variant's row.

    Attributes:
      out_of_memory: whether the process ran out of memory.
    """

    def __init__(self, reason: str, *, out_of_memory: bool = False):
        """Takes the message."""
        super().__init__(reason)
        self.out_of_memory = out_of_memory


class OutOfTimeError(ArmError):
    """The time for the whole comparison was over before the process answered.

    Attributes:
      start_s: seconds from the start of the process to the end of its first step; None if the first
        step had not ended.
      pace: the pace of the first steps; None if they had not ended.
    """

    def __init__(self, reason: str, *, start_s: float | None = None, pace: Pace | None = None):
        """Takes the message, and how far the process had come."""
        super().__init__(reason)
        self.start_s, self.pace = start_s, pace


class ArmProcess:
    """A variant's process that has trained its first steps.

    Attributes:
      first_step_s: seconds from the start of the process to the end of its first step.
      losses: the loss of each step so far.
      peak_mib: the peak memory of each GPU.
      waited: the share of the last stretch in which steps waited for their batches, from 0 to 1.
      pace: the pace of the first steps.
    """

    def __init__(self, config: Config, settings: Settings, *, log: pathlib.Path, limit):
        """Starts the process, and waits until it has trained its first steps.

        Args:
          config: the variant's config.
          settings: how the process trains.
          log: a new file for the output of the process.
          limit: returns the seconds within which the process must answer, and whether they are all
            the time that is left for the comparison.

        Raises:
          ArmError: the process failed.
        """
        self._held = temporary.Held("compare")
        self._folder = self._held.path
        self._log, self._limit = log, limit
        self.losses, self.peak_mib, self.waited = [], (), 0.0
        self._numbers, self._child = itertools.count(), None
        try:
            self._start(config, settings)
            ready = self._answer("ready.json")
        except BaseException:
            self.close()
            raise
        self.first_step_s, self.pace = ready["first_step_s"], Pace(**ready["pace"])
        self._take(ready)

    def stretch(self) -> float:
        """Trains some untimed steps and one stretch; returns the stretch's images per second."""
        number = next(self._numbers)
        (self._folder / f"go-{number}").touch()
        result = self._answer(f"result-{number}.json")
        self.waited = result["waited"]
        self._take(result)
        return result["images_per_second"]

    def close(self) -> None:
        """Ends the process at once, because it holds nothing worth saving."""
        if self._child:
            self._child.end()
        self._held.remove()

    def _start(self, config: Config, settings: Settings) -> None:
        try:
            self._task = Task(_in_child, (config, settings, str(self._folder)))
            with open(self._log, "ab") as log:
                self._child = self._task.start(stdout=log, stderr=subprocess.STDOUT)
        except (OSError, UserError) as error:
            raise ArmError(f"{type(error).__name__}: {error}") from error

    def _take(self, answer: dict) -> None:
        self.losses += answer["losses"]
        self.peak_mib = tuple(answer["peak_mib"])

    def _answer(self, name: str) -> dict:
        """Waits for an answer file of the child, and returns its contents.

        Raises:
          ArmError: the child ended, or did not answer in time.
        """
        path = self._folder / name
        seconds, is_all = self._limit()
        in_time = self._child.wait(seconds, until=path.exists)
        if path.exists():
            return protocol.read(path)
        if in_time:
            raise self._failure()
        if is_all:
            raise self._out_of_time()
        raise ArmError(f"its process did not answer within {seconds:.0f} s; log: {self._log}")

    def _out_of_time(self) -> OutOfTimeError:
        """Returns the error, with what the first steps have shown so far."""
        first = protocol.read(self._folder / "first.json")
        if not first:
            return OutOfTimeError("the time was over before its first step ended")
        start_s, pace = first["first_step_s"], None
        why = f"the time was over: its first step ended after {start_s:.0f} s"
        if values := protocol.read(self._folder / "pace.json"):
            pace = Pace(**values)
            why += f", and each further step takes {in_figures(pace.step_s)} s"
        return OutOfTimeError(why, start_s=start_s, pace=pace)

    def _failure(self) -> ArmError:
        """Returns the error that says why the process ended."""
        self._child.end()
        outcome = self._task.outcome()
        if "value" in outcome:
            return ArmError("its process ended without an error message")
        printed = self._log.read_text(errors="replace")[-KEPT_LETTERS:]
        error = IsolatedError(self._task.name, outcome, log=self._log, tail=printed)
        return ArmError(_sentence(error), out_of_memory=error.out_of_memory)


def _sentence(error: IsolatedError) -> str:
    reason = cleaned(error.reason)
    if error.type_name not in (None, "UserError", "RunError"):
        first = next(iter(error.reason.strip().splitlines()), "")
        reason = f"{error.type_name}: {cleaned(first)}"
    if not error.type_name:
        reason = f"its process {reason}"
    shortened = reason if len(reason) <= MAX_LETTERS else f"{reason[:MAX_LETTERS]}..."
    return f"out of memory: {shortened}" if error.out_of_memory else shortened


def _in_child(config: Config, settings: Settings, folder: str) -> None:
    from tfaccel.diagnostics.compare import child  # imports TensorFlow

    child.serve(config, settings, pathlib.Path(folder))
