"""Runs questions in a child process, because a question may abort or hang the process.

The child imports a module with `stages(arguments)`, which returns functions by name. The answers
hold what each function returned, or why it failed.

    answers = start("tfaccel.diagnostics.doctor.facts.trial", {}, seconds=120).answers()
    answers.facts["TensorFlow"]["version"], answers.failed.get("DALI plugin")
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
MAX_WORDS = 300  # characters of the child's last output that are kept


@dataclasses.dataclass(frozen=True)
class Answers:
    """The answers of a child.

    Attributes:
      facts: what each stage returned, for the stages that returned.
      failed: why each other stage failed: its exception, or how the process ended in the stage.
    """

    facts: Mapping[str, Any]
    failed: Mapping[str, str] = dataclasses.field(default_factory=dict)

    def why_not(self, stage: str) -> str | None:
        """Returns why a stage did not return, or None if it returned."""
        if stage in self.facts:
            return None
        before = next(iter(self.failed), "nothing")
        return self.failed.get(stage, f"was not tried, because {before} failed")


class AskedChild:
    """A child that is answering. `child` is the process."""

    def __init__(self, child: Child, answers: BinaryIO, output: BinaryIO, seconds: float):
        """Takes the process and the files that it writes to."""
        self.child, self._answers, self._output = child, answers, output
        self._seconds, self._deadline = seconds, time.monotonic() + seconds

    def answers(self) -> Answers:
        """Waits for the answers, up to the time limit, and ends the process."""
        with self._answers, self._output:
            with self.child:
                in_time = self.child.wait(self._deadline - time.monotonic())
            end = how_it_ended(self.child.exit_code()) if self.child.exit_code() else None
            if not in_time:
                end = f"gave no answer within {in_figures(self._seconds)} s"
            return _read(self._answers, end, self._output)


def start(
    module: str, arguments: Mapping, *, seconds: float, path: Sequence[str] | None = None
) -> AskedChild:
    """Starts a process that runs the stages of a module.

    Args:
      module: the name of the module.
      arguments: the arguments of its `stages`, as values for JSON.
      seconds: the time limit, after which the process is ended.
      path: the import path of the process; by default this process's sys.path.
    """
    # Files, not pipes: a process that a stage starts could hold a pipe open.
    answers, output = (tempfile.TemporaryFile() for _ in range(2))  # noqa: SIM115 (AskedChild's)
    call = [list(path or sys.path), module, dict(arguments), answers.fileno()]
    # "1" keeps TensorFlow's warnings, which may be the last output before an abort.
    environment = {"TF_CPP_MIN_LOG_LEVEL": "1", "TF_FORCE_GPU_ALLOW_GROWTH": "true"} | os.environ
    command = [sys.executable, "-c", CHILD, json.dumps(call)]
    files = {"stdout": output, "stderr": output, "pass_fds": [answers.fileno()]}
    return AskedChild(Child(command, env=environment, **files), answers, output, seconds)


def answer(module: str, arguments: Mapping, number: int) -> None:
    """Runs the stages, in the child, and writes a line before and after each stage."""
    with os.fdopen(number, "w", buffering=1) as answers:
        # A stage runs even if an earlier one failed: the caller knows which ones depend on others.
        for name, stage in importlib.import_module(module).stages(arguments).items():
            begin = {"begin": name, "written": os.fstat(sys.stderr.fileno()).st_size}
            answers.write(json.dumps(begin) + "\n")
            try:
                outcome = {"done": name, "facts": stage()}
            except Exception as error:  # any exception is an answer
                outcome = {"failed": name, "why": f"{type(error).__name__}: {error}"}
            answers.write(json.dumps(outcome) + "\n")
    os._exit(0)  # skips the exit handlers of libraries, which may fail


def _read(answers: BinaryIO, end: str | None, output: BinaryIO) -> Answers:
    answers.seek(0)
    facts, failed, current, written = {}, {}, "start", 0
    for line in answers.read().decode(errors="replace").splitlines():
        try:
            entry = json.loads(line)
        except ValueError:
            break  # the process ended within this line
        if "done" in entry:
            facts[entry["done"]] = entry["facts"]
        elif "failed" in entry:
            failed[entry["failed"]] = _short(entry["why"], from_end=False)
        current, written = entry.get("begin"), entry.get("written")
    if end and current:
        last_words = _last_words(output, written)
        failed[current] = f"{end} ({last_words})" if last_words else end
    return Answers(facts, failed)


def _last_words(output: BinaryIO, written: int) -> str:
    """Returns the output after the first `written` bytes, without log messages of libraries."""
    output.seek(written)
    lines = output.read().decode(errors="replace").splitlines()
    lines = [each.strip() for each in lines if not _CHATTER.match(each)]
    return _short(" ".join(lines[-6:]), from_end=True)


def _short(text: str, *, from_end: bool) -> str:
    text = shown(" ".join(text.split()))
    if len(text) <= MAX_WORDS:
        return text
    return f"... {text[-MAX_WORDS:]}" if from_end else f"{text[:MAX_WORDS]} ..."
