"""An arm, seen from the driver: a process that is set up once, and timed again and again.

This module takes a command and settings, and returns the answers of the arm. protocol.py is the
other side.

    with ArmProcess("ours", [python, "ours.py"], settings, environment=os.environ) as arm:
        arm.ready(limit_s=600)
        arm.stretch(limit_s=600)["images_per_second"]

If the driver ends for any reason, the arm and all its child processes end too. After a SIGKILL of
the driver, the kernel ends the arm. If the arm is a launcher, the launcher's guard ends the ranks.
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

END_S = 20  # how long an arm may take to end by itself; a launcher ends its ranks first
LOG_LINES = 30
FRAME = re.compile(r" +@ +0x")  # a line of the stack that TensorFlow prints after a crash's reason


class ArmError(Exception):
    """An arm failed, died, or did not answer in time."""


class ArmProcess:
    """A running arm.

    Attributes:
      name: the name of the arm, for messages.
      child: the process.
    """

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        settings: Mapping[str, object],
        *,
        environment: Mapping[str, str],
    ):
        """Starts the arm.

        Args:
          name: the name of the arm, for messages.
          command: the command to run. The folder of protocol.py is added as its last argument.
          settings: what the arm shall do, as values for JSON.
          environment: the environment of the process.
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
        """Returns this object."""
        return self

    def __exit__(self, kind, *_):
        """Lets the arm end by itself; after an error, ends it at once."""
        try:
            if kind is None:
                self.tell_end()
                self.child.wait(END_S)
        finally:
            self.kill()

    def tell_end(self) -> None:
        """Asks the arm to end, and does not wait."""
        with contextlib.suppress(FileNotFoundError):  # the arm has ended, and its folder is gone
            (self._folder / "end").touch()

    def ready(self, *, limit_s: float) -> dict:
        """Waits until the arm is set up, and returns its settings, environment and first figures.

        Raises:
          ArmError: the arm died, or took longer than `limit_s`.
        """
        return self._answer("ready.json", limit_s)

    def stretch(self, *, limit_s: float) -> dict:
        """Lets the arm train a stretch, and returns the figures.

        Raises:
          ArmError: the arm died, or took longer than `limit_s`.
        """
        number, self._num_stretches = self._num_stretches, self._num_stretches + 1
        (self._folder / f"go-{number}").touch()
        return self._answer(f"result-{number}.json", limit_s)

    def kill(self) -> None:
        """Ends the arm and its child processes, if they are still alive."""
        try:
            self.child.end()
        finally:
            self._temporary.cleanup()

    def _answer(self, name: str, limit_s: float) -> dict:
        path, began = self._folder / name, time.monotonic()
        try:
            in_time = self.child.wait(limit_s, until=path.exists)
        except (KeyboardInterrupt, SystemExit):  # show the log now; it is deleted with its folder
            with contextlib.suppress(OSError):  # the terminal may be gone
                waited = f"had not answered after {time.monotonic() - began:.0f} s"
                print(f"bench: {self._why(waited)}", file=sys.stderr, flush=True)
            raise
        if path.exists():
            return json.loads(path.read_text())
        silent = f"did not answer within {limit_s:g} s"
        how = how_it_ended(self.child.exit_code()) if in_time else silent
        raise ArmError(self._why(how))

    def _why(self, what: str) -> str:
        return f"arm '{self.name}' {what}{said_last(self._log)}"


def said_last(log: pathlib.Path) -> str:
    """Returns the last lines of a log, as the end of a message; without the stack of a crash."""
    lines = log.read_text(errors="replace").splitlines()
    said = [line for line in lines if not FRAME.match(line)][-LOG_LINES:]
    return "\n  ".join(["; its last lines:", *said])
