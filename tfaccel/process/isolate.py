"""A function in a process of its own: when it is over, so is all it held, GPU memory above all.

TensorFlow and CUDA give memory back when their process ends, and not before. Takes a function and
its arguments; gives what it returns, from a fresh interpreter (never a fork, which TensorFlow and
CUDA do not survive) with the same environment, sys.path and working folder.

    result = tfaccel.run_isolated(train, "data/", epochs=3)      # from a notebook too
    tfaccel.run_isolated(train, "data/", log="train.log", timeout_s=3600)

The function travels by value (cloudpickle) where it is a notebook's or script's own, else by its
module's name; only this process's own code goes, to its own child. It goes, and what the child
returns comes back, through memory that no other process has.
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
# Between SIGTERM and SIGKILL: a training that saves at SIGTERM has 30 s for it.
GRACE_S = 30.0
GO = b"go"
KEPT_LETTERS = 2**16  # of what a child prints; TensorFlow's own traceback of an operation is 9,000
TAIL_LETTERS = 4000  # of them, in which one that died says why
TAIL_LINES = 15


class IsolatedError(RunError):
    """The child failed; the message has its last lines.

    Attributes:
      type_name: of the exception that the function raised, e.g. "ValueError"; None where it ended
        otherwise.
      reason: that exception's message, or how the child ended.
      out_of_memory: whether the child says that memory was full.
      log: what the child printed.
    """

    def __init__(self, name: str, outcome: dict, *, log: pathlib.Path, tail: str):
        """Puts the sentence together; `outcome` is what `Task.outcome` returns."""
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
    """Runs `function(*args, **kwargs)` in a child process and returns what it returns.

    When this returns or raises, the child and all processes of its group have ended, and the GPU
    memory that they had is free. What the child prints is shown as it comes. The child dies with
    this process, even by SIGKILL; processes that it starts in turn are then on their own.

    Args:
      function: a function, a closure or a lambda; a notebook's own too. It sets up TensorFlow by
        itself (`tfaccel.setup`), and returns plain values: numbers, text, the paths of files that
        it wrote. A large array belongs in a file; a tensor would start TensorFlow here.
      *args: its arguments: plain values as well.
      log: a file to which what the child prints is added; by default a temporary one, which is kept
        if the child fails.
      timeout_s: seconds after which the child is ended; None for no limit.
      **kwargs: its arguments by name. (For ones called log or timeout_s: functools.partial.)

    Raises:
      IsolatedError: the function raised, the child died or ran too long, or what it returned cannot
        be sent.
      UserError: the function or its arguments cannot be sent, or the log cannot be written.
    """
    if not callable(function):
        raise UserError(f"function={function!r}; expected a function, and its arguments after it")
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
    """Returns what `run_isolated` does of a function of ours; shows nothing of what it prints.

    Raises:
      UserError: the function raised one: a mistake in the child is as one here.
      IsolatedError: as of `run_isolated`.
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
    """A function for a child, and what came of it.

    Attributes:
      name: of the function.
      child: the process, once it is started. Whoever starts it ends it.
    """

    def __init__(self, function: Callable, args: tuple, kwargs: Mapping | None = None):
        """Packs the function and its arguments: see `run_isolated`.

        Raises:
          UserError: they cannot be sent.
        """
        self.name = getattr(function, "__qualname__", repr(function))
        self._packed = _pack(self.name, function, args, kwargs or {})

    def start(self, *, grace_s: float = 0.0, **streams) -> Child:
        """Starts the child, and returns it.

        Args:
          grace_s: from SIGTERM to SIGKILL, where it is ended.
          **streams: where it prints: stdout and stderr, as subprocess.Popen takes them.
        """
        progress.let_go()  # the child speaks for a rank that waits for it
        python = [sys.executable, "-P", "-u", "-X", "faulthandler", "-c", CHILD]
        self._result = open(os.memfd_create("result"), "r+b")  # noqa: SIM115 (`outcome` closes it)
        with open(os.memfd_create("task"), "r+b") as task:
            task.write(self._packed)
            task.seek(0)
            files = [task.fileno(), self._result.fileno()]
            command = [*python, json.dumps(sys.path), *map(str, files)]
            own = {"stdin": subprocess.PIPE, "pass_fds": files, **streams}
            self.child = Child(command, grace_s=grace_s, killed_s=None, **own)
        # It begins when it is told to: interrupted before, it ends by itself. (The task itself
        # would fill the pipe of a child that does not read, and no time limit would hold here.)
        stdin = self.child.process.stdin
        with contextlib.suppress(BrokenPipeError), stdin:
            stdin.write(GO)
        return self.child

    def outcome(self, exceeded_s: float | None = None) -> dict:
        """Returns what came of it, once the child has ended: a "value", or the "reason" for none.

        Args:
          exceeded_s: the limit, where it was ended because the time was over.
        """
        if exceeded_s is not None:
            return {"reason": f"did not end within {in_figures(exceeded_s)} s and was stopped"}
        exit_code = self.child.exit_code()
        ended = how_it_ended(exit_code)
        self._result.seek(0)
        try:
            with self._result:
                outcome = pickle.load(self._result)
        except Exception as error:  # e.g. a class that this process does not have
            if exit_code or isinstance(error, EOFError):  # it wrote nothing, or not all of it
                return {"reason": ended if exit_code < 0 else f"{ended} before it returned"}
            reason = f"returned what cannot be read here ({type(error).__name__}: {error})"
            return {"reason": reason}
        if exit_code and "value" in outcome:
            log.warning("isolated: the result is there, then the child %s", ended)
        return outcome


class _Pickler(cloudpickle.Pickler):
    """Keeps the names of files in code, which cloudpickle leaves out since 3.1.3.

    Tracebacks and AutoGraph find the source by them. The child is of the same Python, so that
    marshal, which keeps all that code has, will do.
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
    except Exception as error:  # of whatever object it is that cannot be sent
        raise UserError(
            f"{name} cannot be sent to a process of its own ({type(error).__name__}: {error}); let "
            "it make models, data sets and open files itself, and take paths and plain values"
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
    """What a child prints: shown here as it comes, and kept.

    Attributes:
      tail: the last of it.
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
        """Shows what is left in the pipes of a child that has ended."""
        while self._copy(0):
            pass
        self._selector.close()
        for each in self._pipes:
            each.close()

    def _copy(self, timeout_s: float) -> bool:
        """Shows what there is, waiting for it; returns whether there was anything."""
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
    """Writes to a stream, which may be none (as of a service) or have fewer letters than UTF-8."""
    if terminal is None:
        return
    encoding = getattr(terminal, "encoding", None) or "utf-8"
    terminal.write(text.encode(encoding, errors="replace").decode(encoding))
    terminal.flush()


# In the child.


def serve(task_fd: int, result_fd: int) -> None:
    """Runs a task, once standard input says so, and writes its outcome. For the child alone.

    Args:
      task_fd: where the task is.
      result_fd: where the outcome goes.
    """
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
                f"({type(error).__name__}: {error}); let it write that to a file and return the "
                "path"
            }
        )
