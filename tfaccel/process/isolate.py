"""Runs a function in a process of its own, so that all of its memory is free afterwards.

TensorFlow and CUDA return GPU memory only when their process ends. The child is a fresh interpreter
with the same environment, sys.path and working folder. It is not a fork, because TensorFlow and
CUDA do not survive one.

    result = tfaccel.run_isolated(train, "data/", epochs=3)      # works in a notebook, too
    tfaccel.run_isolated(train, "data/", log="train.log", timeout_s=3600)

A function that a notebook or script defines is sent by value (cloudpickle), any other by its
module's name. Only this process's own code is sent, and only to its own child. The function and its
result are passed through memory that no other process has.
"""

import codecs
import contextlib
import io
import json
import logging
import marshal
import os
import pathlib
import pickle
import selectors
import subprocess
import sys
import tempfile
import traceback
import types
from collections.abc import Callable, Mapping
from typing import Any, BinaryIO, TextIO

import cloudpickle

from tfaccel.common.checks import check_number
from tfaccel.common.errors import RunError, UserError
from tfaccel.common.redact import shown
from tfaccel.common.tables import in_figures
from tfaccel.process import progress
from tfaccel.process.child import Child, how_it_ended
from tfaccel.process.out_of_memory import is_out_of_memory

log = logging.getLogger("tfaccel")

CHILD = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1])\n"
    "from tfaccel.process import isolate\n"
    "isolate.serve(*map(int, sys.argv[2:4]))"
)
GRACE_S = 30.0  # from SIGTERM to SIGKILL; a training that saves at SIGTERM has 30 s for it
GO = b"go"
KEPT_LETTERS = 2**16  # of a child's output; TensorFlow's traceback of an operation has 9,000
TAIL_LETTERS = 4000  # of the kept output, in which a child that died says why
TAIL_LINES = 15


class IsolatedError(RunError):
    """The child failed. The message has its last lines.

    Attributes:
      type_name: the type of the exception that the function raised, such as "ValueError"; None if
        the child ended in another way.
      reason: the exception's message, or how the child ended.
      out_of_memory: whether the child's output says that memory was full.
      log: the file with the child's output.
    """

    def __init__(self, name: str, outcome: dict, *, log: pathlib.Path, tail: str):
        """Makes the message; `outcome` is the result of `Task.outcome`."""
        self.type_name, self.reason = outcome.get("type_name"), outcome["reason"]
        said = outcome.get("traceback", tail[-TAIL_LETTERS:])
        self.out_of_memory = is_out_of_memory(said, log=tail)
        self.log = log
        raised = f"raised {self.type_name}: " if self.type_name else ""
        full = " (out of memory)" if self.out_of_memory else ""
        last = outcome.get("traceback") or tail
        lines = "\n".join(last.strip().splitlines()[-TAIL_LINES:])
        last = f"; its last lines:\n{lines}" if lines else ""
        super().__init__(f"{name} in its own process {raised}{self.reason}{full}; log: {log}{last}")


def run_isolated(
    function: Callable,
    *args,
    log: str | os.PathLike | None = None,
    timeout_s: float | None = None,
    **kwargs,
) -> Any:
    """Runs `function(*args, **kwargs)` in a child process and returns its result.

    When this returns or raises, the child and all processes of its group have ended, and their GPU
    memory is free. The child's output is shown as it comes. The child dies with this process, even
    if that is killed by SIGKILL. Processes that the child starts do not.

    Args:
      function: a function, a closure or a lambda; a notebook may define it. It must set up
        TensorFlow itself (`tfaccel.setup`), and return plain values: numbers, text, or paths of
        files. Write a large array to a file; a tensor would start TensorFlow in this process.
      *args: positional arguments; also plain values.
      log: a file to which the child's output is appended. By default this is a temporary file,
        which is kept only if the child fails.
      timeout_s: seconds after which the child is ended; None for no limit.
      **kwargs: keyword arguments. (Use functools.partial for arguments called log or timeout_s.)

    Returns:
      What the function returns.

    Raises:
      IsolatedError: the function raised an error, the child died or ran too long, or the result
        cannot be sent.
      UserError: the function or its arguments cannot be sent, or the log cannot be written.
    """
    if not callable(function):
        raise UserError(f"function={function!r}; expected a function, followed by its arguments")
    if timeout_s is not None:
        check_number("timeout_s", timeout_s, above=0)
    task = Task(function, args, kwargs)
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with (
        _opened(log) as written,
        contextlib.closing(_Output(task.start(grace_s=GRACE_S, **pipes), written)) as output,
        task.child,
    ):
        in_time = task.child.wait(timeout_s)
    outcome = task.outcome(None if in_time else timeout_s)
    if "value" not in outcome:
        raise IsolatedError(task.name, outcome, log=pathlib.Path(written.name), tail=output.tail)
    if log is None:
        os.unlink(written.name)
    return outcome["value"]


def run_quietly(function: Callable, *args, **kwargs) -> Any:
    """Calls `run_isolated` for a function of tfaccel, without showing its output.

    Raises:
      UserError: the function raised UserError in the child.
      IsolatedError: see `run_isolated`.
    """
    with (
        open(os.devnull, "w") as nowhere,
        contextlib.redirect_stdout(nowhere),
        contextlib.redirect_stderr(nowhere),
    ):
        try:
            return run_isolated(function, *args, **kwargs)
        except IsolatedError as error:
            if error.type_name != UserError.__name__:
                raise
            error.log.unlink(missing_ok=True)
            raise UserError(error.reason) from error


class Task:
    """A function to run in a child, and its outcome.

    Attributes:
      name: the name of the function.
      child: the process, after `start`. The caller of `start` must end it.
    """

    def __init__(self, function: Callable, args: tuple, kwargs: Mapping | None = None):
        """Packs the function and its arguments; see `run_isolated`.

        Raises:
          UserError: they cannot be sent.
        """
        self.name = getattr(function, "__qualname__", repr(function))
        self._packed = _pack(self.name, function, args, kwargs or {})

    def start(self, *, grace_s: float = 0.0, **streams) -> Child:
        """Starts the child and returns it.

        Args:
          grace_s: seconds from SIGTERM to SIGKILL when the child is ended.
          **streams: stdout and stderr for subprocess.Popen.
        """
        progress.let_go()  # the child may now send this rank's heartbeats
        python = [sys.executable, "-P", "-u", "-X", "faulthandler", "-c", CHILD]
        self._result = open(os.memfd_create("result"), "r+b")  # noqa: SIM115 (`outcome` closes it)
        with open(os.memfd_create("task"), "r+b") as task:
            task.write(self._packed)
            task.seek(0)
            files = [task.fileno(), self._result.fileno()]
            command = [*python, json.dumps(sys.path), *map(str, files)]
            own = {"stdin": subprocess.PIPE, "pass_fds": files, **streams}
            self.child = Child(command, grace_s=grace_s, killed_s=None, **own)
        # The child waits for GO. If this process is interrupted before, the child ends by itself.
        # (Sending the task itself could block if the child does not read, beyond any time limit.)
        stdin = self.child.process.stdin
        with contextlib.suppress(BrokenPipeError), stdin:
            stdin.write(GO)
        return self.child

    def outcome(self, exceeded_s: float | None = None) -> dict:
        """Returns the outcome after the child has ended: its "value", or the "reason" for none.

        Args:
          exceeded_s: the time limit, if it was exceeded.
        """
        if exceeded_s is not None:
            return {"reason": f"did not end within {in_figures(exceeded_s)} s and was stopped"}
        exit_code = self.child.exit_code()
        ended = how_it_ended(exit_code)
        self._result.seek(0)
        try:
            with self._result:
                outcome = pickle.load(self._result)
        except Exception as error:  # such as a class that is missing here
            if exit_code or isinstance(error, EOFError):  # the result is missing or cut off
                return {"reason": ended if exit_code < 0 else f"{ended} before it returned"}
            reason = f"returned a value that cannot be read ({type(error).__name__}: {error})"
            return {"reason": reason}
        if exit_code and "value" in outcome:
            log.warning("isolated: the child returned its result, then it %s", ended)
        return outcome


class _Pickler(cloudpickle.Pickler):
    """Keeps the file names in code objects, which cloudpickle removes since 3.1.3.

    Tracebacks and AutoGraph need them to find the source. marshal keeps everything, and works here
    because the child has the same version of Python.
    """

    def reducer_override(self, obj):
        if isinstance(obj, types.CodeType):
            return marshal.loads, (marshal.dumps(obj),)
        return super().reducer_override(obj)


def _pack(name: str, *task) -> bytes:
    try:
        packed = io.BytesIO()
        _Pickler(packed).dump(task)
        return packed.getvalue()
    except Exception as error:  # any object may fail in its own way
        raise UserError(
            f"{name} cannot be sent to another process ({type(error).__name__}: {error}); make "
            "models, data sets and open files in the function, and pass only paths and plain values"
        ) from error


def _opened(path: str | os.PathLike | None) -> BinaryIO:
    try:
        if path is None:
            own = {"prefix": "tfaccel-", "suffix": ".log", "delete": False}
            return tempfile.NamedTemporaryFile("ab", buffering=0, **own)
        return pathlib.Path(path).expanduser().absolute().open("ab", buffering=0)
    except OSError as error:
        raise UserError(
            f"log {path} cannot be written ({error.strerror}); give another file"
        ) from error


class _Output:
    """The output of a child. It is shown as it comes, and kept.

    Attributes:
      tail: the end of the output.
    """

    def __init__(self, child: Child, log: BinaryIO):
        self.tail = ""
        self._pipes, self._log = (child.process.stdout, child.process.stderr), log
        self._selector = selectors.DefaultSelector()
        for pipe, terminal in zip(self._pipes, (sys.stdout, sys.stderr), strict=True):
            os.set_blocking(pipe.fileno(), False)
            decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
            self._selector.register(pipe, selectors.EVENT_READ, (decoder, terminal))
        child.pause = self._copy

    def close(self) -> None:
        """Shows the rest of the output of a child that has ended."""
        while self._copy(0):
            pass
        self._selector.close()
        for each in self._pipes:
            each.close()

    def _copy(self, timeout_s: float) -> bool:
        """Waits for output and shows it; returns whether there was any."""
        ready = self._selector.select(timeout_s)
        for key, _ in ready:
            data = key.fileobj.read(2**16)
            if not data:
                self._selector.unregister(key.fileobj)
                continue
            decoder, terminal = key.data
            text = decoder.decode(data)
            self._log.write(data)
            self.tail = (self.tail + text)[-KEPT_LETTERS:]
            _show(text, terminal)
        return bool(ready)


def _show(text: str, terminal: TextIO | None) -> None:
    """Writes to a stream, which may be None (in a service) or have fewer characters than UTF-8."""
    if terminal is None:
        return
    encoding = getattr(terminal, "encoding", None) or "utf-8"
    terminal.write(text.encode(encoding, errors="replace").decode(encoding))
    terminal.flush()


# The rest runs in the child.


def serve(task_fd: int, result_fd: int) -> None:
    """Runs a task when standard input says so, and writes its outcome. Only the child calls it."""
    del sys.argv[1:]
    told = sys.stdin.buffer.read()
    os.dup2(os.open(os.devnull, os.O_RDONLY), sys.stdin.fileno())
    if told != GO:
        return  # the parent was interrupted
    try:
        with open(task_fd, "rb") as task:
            function, args, kwargs = pickle.load(task)
        outcome = {"value": function(*args, **kwargs)}
    except Exception as error:
        outcome = _report(error)
    with open(result_fd, "wb") as result:
        result.write(_packed(outcome))


def _report(error: Exception) -> dict:
    text = shown("".join(traceback.format_exception(error)))
    print(text, file=sys.stderr, end="", flush=True)
    return {"type_name": type(error).__name__, "reason": str(error), "traceback": text}


def _packed(outcome: dict) -> bytes:
    try:
        return cloudpickle.dumps(outcome)
    except Exception as error:
        return cloudpickle.dumps(
            {
                "reason": f"returned a {type(outcome['value']).__name__} that cannot be sent back "
                f"({type(error).__name__}: {error}); write it to a file, and return the path"
            }
        )
