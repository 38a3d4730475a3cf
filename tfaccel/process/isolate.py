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
import ctypes
import io
import json
import logging
import marshal
import os
import pathlib
import pickle
import selectors
import signal
import subprocess
import sys
import tempfile
import time
import traceback
import types
from collections.abc import Callable, Iterator
from typing import Any, BinaryIO, TextIO

import cloudpickle

from tfaccel.common.checks import check_number
from tfaccel.common.errors import RunError, UserError
from tfaccel.common.redact import shown
from tfaccel.common.tables import in_figures
from tfaccel.process import progress
from tfaccel.process.out_of_memory import is_out_of_memory

log = logging.getLogger("tfaccel")

CHILD = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1])\n"
    "from tfaccel.process import isolate\n"
    "isolate.serve(*map(int, sys.argv[2:4]), parent=int(sys.argv[4]))"
)
# Between SIGTERM and SIGKILL: a training that saves at SIGTERM has 30 s for it.
GRACE_S = 30.0
GO = b"go"
POLL_S = 0.05
KEPT_LETTERS = 2**16  # of what a child prints; TensorFlow's own traceback of an operation is 9,000
TAIL_LETTERS = 4000  # of them, in which one that died says why
TAIL_LINES = 15
PR_SET_PDEATHSIG = 1  # Linux, prctl(2)


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
        """Puts the sentence together; `outcome` is what `_report` makes, or how the child ended."""
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
    name = getattr(function, "__qualname__", repr(function))
    packed = _pack(name, function, args, kwargs)
    with (
        _opened(log) as written,
        open(os.memfd_create("task"), "r+b") as task,
        open(os.memfd_create("result"), "r+b") as result,
    ):
        task.write(packed)
        task.seek(0)
        outcome, tail = _run(task, result, written, timeout_s)
        if "value" not in outcome:
            raise IsolatedError(name, outcome, log=pathlib.Path(written.name), tail=tail)
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


@contextlib.contextmanager
def _opened(path: str | os.PathLike | None) -> Iterator[BinaryIO]:
    try:
        if path is None:
            number, path = tempfile.mkstemp(prefix="tfaccel-", suffix=".log")
            os.close(number)
        opened = pathlib.Path(path).expanduser().absolute().open("ab", buffering=0)
    except OSError as error:
        raise UserError(
            f"log {path} cannot be written ({error.strerror}); give another file"
        ) from error
    with opened:
        yield opened


def _run(
    task: BinaryIO, result: BinaryIO, log: BinaryIO, timeout_s: float | None
) -> tuple[dict, str]:
    """Runs the task in a child and returns its outcome and the last that it printed."""
    options = ["-P", "-u", "-X", "faulthandler"]
    files = [task.fileno(), result.fileno()]
    arguments = [json.dumps(sys.path), *map(str, files), str(os.getpid())]
    progress.let_go()  # the child speaks for a rank that waits for it
    process = subprocess.Popen(
        [sys.executable, *options, "-c", CHILD, *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        pass_fds=files,
        process_group=0,
    )
    output = _Output(process, log)
    try:
        # It begins when it is told to: interrupted before, it ends by itself. (The task itself
        # would fill the pipe of a child that does not read, and no time limit would hold here.)
        with contextlib.suppress(BrokenPipeError), process.stdin:
            process.stdin.write(GO)
        in_time = output.follow(timeout_s)
    finally:
        _end(process, output)
    return _outcome(process.returncode, result, None if in_time else timeout_s), output.tail


def _outcome(exit_code: int, result: BinaryIO, exceeded_s: float | None) -> dict:
    if exceeded_s is not None:
        return {"reason": f"did not end within {in_figures(exceeded_s)} s and was stopped"}
    result.seek(0)
    try:
        outcome = pickle.load(result)
    except Exception as error:  # e.g. a class that this process does not have
        if exit_code or isinstance(error, EOFError):  # it wrote nothing, or not all of it
            return {"reason": _how_it_ended(exit_code)}
        return {"reason": f"returned what cannot be read here ({type(error).__name__}: {error})"}
    if exit_code and "value" in outcome:
        log.warning("isolated: the result is there, then the child %s", _how_it_ended(exit_code))
    return outcome


def _how_it_ended(exit_code: int) -> str:
    if exit_code >= 0:
        return f"ended with exit code {exit_code} before it returned"
    try:
        name = signal.Signals(-exit_code).name
    except ValueError:
        name = f"signal {-exit_code}"
    hint = " (perhaps the machine was out of memory)" if name == "SIGKILL" else ""
    return f"was ended by {name}{hint}"


def _end(process: subprocess.Popen, output: "_Output") -> None:
    """Ends the child, if it still runs, and with it all processes of its group."""
    try:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGTERM)
            output.follow(GRACE_S)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        output.close()


class _Output:
    """What a child prints: shown here as it comes, and kept.

    Attributes:
      tail: the last of it.
    """

    def __init__(self, process: subprocess.Popen, log: BinaryIO):
        self.tail = ""
        self._process, self._log = process, log
        self._selector = selectors.DefaultSelector()
        for pipe, terminal in ((process.stdout, sys.stdout), (process.stderr, sys.stderr)):
            os.set_blocking(pipe.fileno(), False)
            decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
            self._selector.register(pipe, selectors.EVENT_READ, (decoder, terminal))

    def follow(self, timeout_s: float | None) -> bool:
        """Shows what comes until the child has ended; returns False if it has not in time."""
        ends = None if timeout_s is None else time.monotonic() + timeout_s
        while self._process.poll() is None:
            if ends is not None and time.monotonic() >= ends:
                return False
            self._copy(POLL_S)
        return True

    def close(self) -> None:
        """Shows what is left in the pipes of a child that has ended."""
        while self._copy(0):
            pass
        self._selector.close()
        self._process.stdout.close()
        self._process.stderr.close()

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


def serve(task_fd: int, result_fd: int, *, parent: int) -> None:
    """Runs a task, once standard input says so, and writes its outcome. For the child alone.

    Args:
      task_fd: where the task is.
      result_fd: where the outcome goes.
      parent: the process that waits for it.
    """
    _die_with(parent)
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


def _die_with(parent: int) -> None:
    """Lets the kernel end this process when the thread that started it, and waits, has ended."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)  # it had ended before


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
