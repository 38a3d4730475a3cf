"""One variant's process, as the comparison sees it: it stays alive, and trains when it is told to.

    arm = ArmProcess(config, settings, log=pathlib.Path("1.log"), limit=lambda: (600, False))
    arm.first_step_s; arm.stretch(); arm.losses; arm.close()

The child is `tfaccel.process.isolate`'s. Both speak by the files of protocol.py; child.py is the
other side. Nothing of TensorFlow is imported here.
"""

import itertools
import pathlib
import subprocess
from typing import Protocol

from tfaccel.common import temporary
from tfaccel.common.errors import UserError
from tfaccel.common.tables import cleaned, in_figures
from tfaccel.config import Config
from tfaccel.diagnostics.compare import protocol
from tfaccel.diagnostics.compare.pace import Pace, Settings
from tfaccel.process.isolate import KEPT_LETTERS, IsolatedError, Task

MOST_LETTERS = 300  # of what an error says


class ArmError(Exception):
    """A variant's process failed; the message is a sentence for its row.

    Attributes:
      out_of_memory: whether memory was full.
    """

    def __init__(self, reason: str, *, out_of_memory: bool = False):
        """Takes the sentence."""
        super().__init__(reason)
        self.out_of_memory = out_of_memory


class OutOfTimeError(ArmError):
    """The time for all was over before it answered.

    Attributes:
      start_s: seconds from its process's start to its first step's end; None before that.
      pace: what its first steps showed; None before that.
    """

    def __init__(self, reason: str, *, start_s: float | None = None, pace: Pace | None = None):
        """Takes the sentence, and what is known of the process."""
        super().__init__(reason)
        self.start_s, self.pace = start_s, pace


class Arm(Protocol):
    """A variant's process, whose first steps are trained.

    Attributes:
      first_step_s: seconds from its start to its first step's end.
      losses: of each step so far.
      peak_mib: of each GPU.
      waited: part of the last stretch in which steps waited for their batches.
      pace: of its first steps.
    """

    first_step_s: float
    losses: list[float]
    peak_mib: tuple[int, ...]
    waited: float
    pace: Pace

    def stretch(self) -> float:
        """Returns the images per second of some more steps."""

    def close(self) -> None:
        """Ends the process."""


class ArmProcess:
    """A variant's process. Attributes and methods are those of `Arm`."""

    def __init__(self, config: Config, settings: Settings, *, log: pathlib.Path, limit):
        """Starts it, and returns when its first steps are trained.

        Args:
          config: the experiment as the variant does it.
          settings: how it trains.
          log: a new file, for what it prints.
          limit: gives the seconds that it may take, now, for what it is asked; and whether they are
            what is left for all.

        Raises:
          ArmError: it failed.
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
        """Returns the images per second of some more steps, after some that are not timed."""
        number = next(self._numbers)
        (self._folder / f"go-{number}").touch()
        result = self._answer(f"result-{number}.json")
        self.waited = result["waited"]
        self._take(result)
        return result["images_per_second"]

    def close(self) -> None:
        """Ends the process at once: there is nothing in it to keep."""
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
        """Waits for a file of the child's.

        Raises:
          ArmError: it ended, or was silent for too long.
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
        raise ArmError(f"it did not answer within {seconds:.0f} s; log: {self._log}")

    def _out_of_time(self) -> OutOfTimeError:
        """Returns the error, with what its first steps had shown by then."""
        names = ("first", "pace")
        said = {name: protocol.read(self._folder / f"{name}.json") for name in names}
        if said["pace"]:
            pace = Pace(**said["pace"])
            took = f"its first step ended after {pace.start_s:.0f} s, and one more takes "
            why = f"the time was over: {took}{in_figures(pace.step_s)} s"
            return OutOfTimeError(why, start_s=pace.start_s, pace=pace)
        if said["first"]:
            start_s = said["first"]["first_step_s"]
            why = f"the time was over: its first step ended after {start_s:.0f} s"
            return OutOfTimeError(why, start_s=start_s)
        return OutOfTimeError("the time was over before its first step had ended")

    def _failure(self) -> ArmError:
        """Returns why its process has ended."""
        self._child.end()
        outcome = self._task.outcome()
        if "value" in outcome:
            return ArmError("its process ended without a word")
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
    shortened = reason if len(reason) <= MOST_LETTERS else f"{reason[:MOST_LETTERS]}..."
    return f"out of memory: {shortened}" if error.out_of_memory else shortened


def _in_child(config: Config, settings: Settings, folder: str) -> None:
    from tfaccel.diagnostics.compare import child  # and TensorFlow

    child.serve(config, settings, pathlib.Path(folder))
