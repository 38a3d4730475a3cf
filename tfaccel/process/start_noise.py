"""Hides the lines that TensorFlow's libraries print at their start and that do not help the reader.

    with start_noise.left_out():
        import tensorflow

All other lines are shown, even those of a process that dies meanwhile.

TensorFlow 2.21 reads TF_CPP_MIN_LOG_LEVEL too late: whatever its value, it first prints four lines
of information and a remark about them (2026-11-27). Here these lines obey the level, too. The
filter is a process, because a thread would lose the last lines before an abort.
"""

import contextlib
import gc
import importlib
import os
import subprocess
import sys
import types
from collections.abc import Iterator

from tfaccel.common import run_log
from tfaccel.process import progress, waits

LEVEL = "TF_CPP_MIN_LOG_LEVEL"  # 0 shows all, 1 no information, 2 no warnings, 3 no errors
OUR_LEVEL = "2"  # if the user has not set a level
STDERR = 2
# What Keras 3.15 imports for galleries of images, which few programs draw.
OF_GALLERIES = ("matplotlib.patches", "matplotlib.pyplot")
END_S = 2.0  # to wait for the last lines, which are already in the pipe

_PREFIX = r"\d{4} \d\d:\d\d:[\d.]+ +\d+ [\w.-]+:\d+\] "  # a line of absl, after its first letter
_REMARK = r"WARNING: All log messages before absl::InitializeLog\(\) is called are written to "
_NO_DRIVER = rf"E{_PREFIX}failed call to cuInit: "
_SORTER = """
import os, re, sys
noise = re.compile(sys.argv[1].encode())
for line in iter(sys.stdin.buffer.readline, b""):
    if not noise.match(line):
        os.write(2, line)
"""


def pattern(level: str, *, has_gpus: bool) -> str | None:
    """Returns a pattern for the lines to hide; None to hide none.

    Args:
      level: the value of TF_CPP_MIN_LOG_LEVEL.
      has_gpus: whether this machine has GPUs. If not, a failed start of CUDA is no error.
    """
    letters = {"1": "I", "2": "IW", "3": "IWE"}.get(level)
    if letters is None:
        return None
    kinds = [_REMARK, rf"[{letters}]{_PREFIX}", *([] if has_gpus else [_NO_DRIVER])]
    return "|".join(f"(?:{each})" for each in kinds)


@contextlib.contextmanager
def left_out(*, has_gpus: bool = True) -> Iterator[None]:
    """Hides lines on standard error that do not help the reader, within the context.

    These are the lines that TF_CPP_MIN_LOG_LEVEL should hide. If it is not set, it becomes
    OUR_LEVEL, also after the context.

    Args:
      has_gpus: whether this machine has GPUs. If not, a failed start of CUDA is hidden, too.
    """
    noise = pattern(os.environ.setdefault(LEVEL, OUR_LEVEL), has_gpus=has_gpus)
    with contextlib.ExitStack() as stack:
        if noise is not None:
            # If there is no such process or no standard error, all lines are shown.
            with contextlib.suppress(OSError):
                stack.enter_context(_sorted(noise))
        yield


def start_tensorflow() -> None:
    """Imports TensorFlow for a command, without the lines that it prints at its start.

    Python's garbage collector is off meanwhile, and afterwards ignores the objects of TensorFlow,
    which live until the command ends. This saves 0.4 s here and 0.8 s at the end (2 CPU cores,
    2026-11-27). OF_GALLERIES would take 0.2 s.
    """
    if "tensorflow" in sys.modules:  # a program runs a command in its own process
        return
    run_log.show(speaks=not progress.is_launched())
    gc.disable()
    try:
        with waits.on("starting TensorFlow"), left_out(), _loading_when_used(*OF_GALLERIES):
            import keras  # noqa: F401  and TensorFlow with it
        gc.freeze()
    finally:
        gc.enable()


@contextlib.contextmanager
def _loading_when_used(*names: str) -> Iterator[None]:
    """Gives modules that import these ones stand-ins, which load the true ones when they are used.

    importlib.util.LazyLoader would load them at once, because `import` reads their `__spec__`.
    """
    names = [name for name in names if name not in sys.modules]
    sys.modules.update({name: _stand_in(name) for name in names})
    try:
        yield
    finally:
        for name in names:
            del sys.modules[name]


def _stand_in(name: str) -> types.ModuleType:
    module = types.ModuleType(name)
    module.__getattr__ = lambda attribute: getattr(importlib.import_module(name), attribute)
    return module


@contextlib.contextmanager
def _sorted(noise: str) -> Iterator[None]:
    shown = os.dup(STDERR)
    try:
        # The sorter has its own session, so that Ctrl-C does not end it before this process.
        command = [sys.executable or "", "-I", "-S", "-c", _SORTER, noise]
        sorter = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, start_new_session=True
        )
        try:
            with sorter.stdin:
                os.dup2(sorter.stdin.fileno(), STDERR)
            yield
        finally:
            with contextlib.suppress(OSError, ValueError, AttributeError):
                sys.stderr.flush()
            os.dup2(shown, STDERR)
            # A child of this process may hold the pipe; its lines are still sorted after this.
            with contextlib.suppress(subprocess.TimeoutExpired):
                sorter.wait(END_S)
    finally:
        os.close(shown)
