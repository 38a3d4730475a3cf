"""An arm as the driver sees it: a process that is set up once and timed again and again.

Takes a command and settings; gives what the arm says. See protocol.py for the other side.

    with ArmProcess("ours", [python, "ours.py"], settings, environment=os.environ) as arm:
        arm.ready(limit_s=600)
        arm.stretch(limit_s=600)["images_per_second"]

Whatever ends the driver ends the arm, too, and all that it has started: after SIGKILL the kernel
ends the arm, and if that was a launcher, its guard ends the ranks.
"""

import contextlib
import json
import pathlib
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence

from bench_arms import protocol
from tfaccel.process.child import Child, how_it_ended

END_S = 20  # for an arm to end by itself; a launcher ends its ranks first
LOG_LINES = 30
FRAME = re.compile(r" +@ +0x")  # of the stack that a crash in TensorFlow prints, after its reason


class ArmError(Exception):
    """An arm failed, died, or said nothing for too long."""


class ArmProcess:
    """A running arm.

    Attributes:
      name: of the arm, for messages.
      child: its process.
    """

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        settings: Mapping[str, object],
        *,
        environment: Mapping[str, str],
    ):
        """Starts it.

        Args:
          name: of the arm, for messages.
          command: which is given one more argument, the folder to speak in.
          settings: JSON-ready, what the arm is to do.
          environment: of the process.
        """
        self.name, self._num_stretches = name, 0
        self._temporary = tempfile.TemporaryDirectory(prefix="bench-", ignore_cleanup_errors=True)
        self._folder = pathlib.Path(self._temporary.name)
        protocol.write(self._folder / "settings.json", {**settings, "started": time.time()})
        self._log = self._folder / "log.txt"
        with open(self._log, "wb") as log:
            self.child = Child(
                [*command, str(self._folder)],
                grace_s=END_S,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=dict(environment),
            )

    def __enter__(self):
        """Returns itself."""
        return self

    def __exit__(self, kind, *_):
        """Ends the arm: as it likes to, or where something went wrong at once."""
        try:
            if kind is None:
                self.tell_end()
                self.child.wait(END_S)
        finally:
            self.kill()

    def tell_end(self) -> None:
        """Lets the arm end, and does not wait for it."""
        with contextlib.suppress(FileNotFoundError):  # it has ended, and its folder is gone
            (self._folder / "end").touch()

    def ready(self, *, limit_s: float) -> dict:
        """Waits until the arm is set up and returns what it says of that.

        Raises:
          ArmError: it died, or took longer than `limit_s`.
        """
        return self._answer("ready.json", limit_s)

    def stretch(self, *, limit_s: float) -> dict:
        """Lets the arm train for a stretch and returns what came of it.

        Raises:
          ArmError: it died, or took longer than `limit_s`.
        """
        number, self._num_stretches = self._num_stretches, self._num_stretches + 1
        (self._folder / f"go-{number}").touch()
        return self._answer(f"result-{number}.json", limit_s)

    def kill(self) -> None:
        """Ends what is left of the arm, and of what it has started."""
        try:
            self.child.end()
        finally:
            self._temporary.cleanup()

    def _answer(self, name: str, limit_s: float) -> dict:
        path, began = self._folder / name, time.monotonic()
        try:
            in_time = self.child.wait(limit_s, until=path.exists)
        except (KeyboardInterrupt, SystemExit):  # its log goes with its folder
            with contextlib.suppress(OSError):  # as of a terminal that is gone
                waited = f"was still awaited after {time.monotonic() - began:.0f} s"
                print(f"bench: {self._why(waited)}", file=sys.stderr, flush=True)
            raise
        if path.exists():
            return json.loads(path.read_text())
        how = how_it_ended(self.child.exit_code()) if in_time else f"said nothing for {limit_s:g} s"
        raise ArmError(self._why(how))

    def _why(self, what: str) -> str:
        return f"arm '{self.name}' {what}{said_last(self._log)}"


def said_last(log: pathlib.Path) -> str:
    """Returns the last lines of a log, to end a sentence with; without the stack of a crash."""
    lines = log.read_text(errors="replace").splitlines()
    said = [line for line in lines if not FRAME.match(line)][-LOG_LINES:]
    return "\n  ".join(["; its last lines:", *said])
