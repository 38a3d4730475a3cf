"""Questions put to a process of its own, because an answer may be an abort, or never come.

Takes a module with `stages(arguments)`, which gives functions by name; gives what each returned,
and why those that did not return failed.

    told = start("tfaccel.diagnostics.doctor.facts.trial", {}, seconds=120).told()
    told.facts["TensorFlow"]["version"], told.failed.get("DALI plugin")
"""

import dataclasses
import importlib
import json
import os
import re
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from typing import Any, BinaryIO

from tfaccel.common.redact import shown
from tfaccel.common.tables import in_figures
from tfaccel.process.child import Child, how_it_ended

CHILD = (
    "import json, sys; path, module, arguments, number = json.loads(sys.argv[1])\n"
    "sys.path[:] = path\n"
    "from tfaccel.diagnostics.doctor.facts import child\n"
    "child.answer(module, arguments, number)"
)
_CHATTER = re.compile(r"[IW]\d{4} |\d{4}-\d\d-\d\d .*: [IW] |WARNING: All log messages")
MAX_WORDS = 300  # characters of what a process last wrote


@dataclasses.dataclass(frozen=True)
class Told:
    """What a child answered.

    Attributes:
      facts: of each stage that returned.
      failed: of each that did not, why: an exception, or how the process ended in it.
    """

    facts: Mapping[str, Any]
    failed: Mapping[str, str] = dataclasses.field(default_factory=dict)

    def why_not(self, stage: str) -> str | None:
        """Returns why a stage did not return; None if it did."""
        if stage in self.facts:
            return None
        before = next(iter(self.failed), "nothing")
        return self.failed.get(stage, f"was not tried, because {before} failed before")


class Asked:
    """The process, while it answers.

    Attributes:
      child: it.
    """

    def __init__(self, child: Child, answers: BinaryIO, output: BinaryIO, seconds: float):
        """Takes the process and what it writes to, from `start`."""
        self.child, self._answers, self._output = child, answers, output
        self._seconds, self._deadline = seconds, time.monotonic() + seconds

    def told(self) -> Told:
        """Waits for the answers, no longer than the limit, and ends the process."""
        with self._answers, self._output:
            with self.child:
                in_time = self.child.wait(self._deadline - time.monotonic())
            end = how_it_ended(self.child.exit_code()) if self.child.exit_code() else None
            if not in_time:
                end = f"gave no answer within {in_figures(self._seconds)} s"
            return _read(self._answers, end, self._output)

    def end(self) -> None:
        """Ends the process and its own, if any are left. A second call does nothing."""
        self.child.end()


def start(
    module: str, arguments: Mapping, *, seconds: float, path: Sequence[str] | None = None
) -> Asked:
    """Starts a process that goes through the stages of a module.

    Args:
      module: its name.
      arguments: JSON-ready values for its `stages`.
      seconds: after which it is ended.
      path: to import from; this process's own by default.
    """
    # Files, not pipes: whatever else a stage starts cannot hold them open.
    answers, output = (tempfile.TemporaryFile() for _ in range(2))  # noqa: SIM115 (Asked's)
    call = [list(path or sys.path), module, dict(arguments), answers.fileno()]
    # "1" keeps TensorFlow's warnings, which may be the last words before the end.
    environment = {"TF_CPP_MIN_LOG_LEVEL": "1", "TF_FORCE_GPU_ALLOW_GROWTH": "true"} | os.environ
    command = [sys.executable, "-c", CHILD, json.dumps(call)]
    files = {"stdout": output, "stderr": output, "pass_fds": [answers.fileno()]}
    return Asked(Child(command, env=environment, **files), answers, output, seconds)


def answer(module: str, arguments: Mapping, number: int) -> None:
    """Goes through the stages, in the child, and writes a line before and after each."""
    with os.fdopen(number, "w", buffering=1) as answers:
        # Each is tried, also where one before it failed: the caller knows which belong together.
        for name, stage in importlib.import_module(module).stages(arguments).items():
            begin = {"begin": name, "written": os.fstat(sys.stderr.fileno()).st_size}
            answers.write(json.dumps(begin) + "\n")
            try:
                told = {"done": name, "facts": stage()}
            except Exception as error:  # whatever it is, it is the finding
                told = {"failed": name, "why": f"{type(error).__name__}: {error}"}
            answers.write(json.dumps(told) + "\n")
    os._exit(0)  # what libraries do at exit is no question of ours


def _read(answers: BinaryIO, end: str | None, output: BinaryIO) -> Told:
    answers.seek(0)
    facts, failed, current, written = {}, {}, "start", 0
    for line in answers.read().decode(errors="replace").splitlines():
        try:
            said = json.loads(line)
        except ValueError:
            break  # cut off by the end
        if "done" in said:
            facts[said["done"]] = said["facts"]
        elif "failed" in said:
            failed[said["failed"]] = _short(said["why"], from_end=False)
        current, written = said.get("begin"), said.get("written")
    if end and current:
        last_words = _last_words(output, written)
        failed[current] = f"{end} ({last_words})" if last_words else end
    return Told(facts, failed)


def _last_words(output: BinaryIO, written: int) -> str:
    """Returns what was written since then, but for what libraries say of themselves."""
    output.seek(written)
    lines = output.read().decode(errors="replace").splitlines()
    lines = [each.strip() for each in lines if not _CHATTER.match(each)]
    return _short(" ".join(lines[-6:]), from_end=True)


def _short(text: str, *, from_end: bool) -> str:
    text = shown(" ".join(text.split()))
    if len(text) <= MAX_WORDS:
        return text
    return f"... {text[-MAX_WORDS:]}" if from_end else f"{text[:MAX_WORDS]} ..."
