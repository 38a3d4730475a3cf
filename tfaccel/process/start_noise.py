"""What TensorFlow's libraries print as they start, where it says nothing to the reader.

Takes a stretch of the program in which they start; gives the same without those lines. All other
lines pass, those of a process that dies in the middle of it too.

    with start_noise.left_out():
        import tensorflow

TensorFlow 2.21 reads TF_CPP_MIN_LOG_LEVEL late: whatever it says, four lines of information and a
remark on them are printed first (2026-11-27). Here they are held to the level that is asked for. A
process of its own sorts the lines, because a thread would lose the last ones before an abort.
"""

import contextlib
import gc
import os
import subprocess
import sys
from collections.abc import Iterator

LEVEL = "TF_CPP_MIN_LOG_LEVEL"  # 0 shows all, 1 no information, 2 no warnings, 3 no errors
OUR_LEVEL = "2"  # where the user has set none
STDERR = 2
END_S = 2.0  # for the last lines, which are there already

_PREFIX = r"\d{4} \d\d:\d\d:[\d.]+ +\d+ [\w.-]+:\d+\] "  # of a line of absl's, after its letter
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
    """Returns what the lines match that are left out; None for none.

    Args:
      level: what TF_CPP_MIN_LOG_LEVEL says.
      has_gpus: whether this machine has GPUs; if not, that CUDA does not start is no error.
    """
    letters = {"1": "I", "2": "IW", "3": "IWE"}.get(level)
    if letters is None:
        return None
    kinds = [_REMARK, rf"[{letters}]{_PREFIX}", *([] if has_gpus else [_NO_DRIVER])]
    return "|".join(f"(?:{each})" for each in kinds)


@contextlib.contextmanager
def left_out(*, has_gpus: bool = True) -> Iterator[None]:
    """Within the context, lines on standard error that say nothing to the reader are left out.

    That is what TF_CPP_MIN_LOG_LEVEL asks to leave out. It becomes OUR_LEVEL where nobody has set
    it, for the time after the context, too.

    Args:
      has_gpus: whether this machine has GPUs; if not, that CUDA does not start is left out as well.
    """
    noise = pattern(os.environ.setdefault(LEVEL, OUR_LEVEL), has_gpus=has_gpus)
    with contextlib.ExitStack() as stack:
        if noise is not None:
            # Without the other process, or a standard error, all is shown.
            with contextlib.suppress(OSError):
                stack.enter_context(_sorted(noise))
        yield


def start_tensorflow() -> None:
    """Imports TensorFlow, for a command, without the lines that it prints at its start.

    What it makes is there until the command ends. To look through it in vain would take Python's
    collector 0.4 s meanwhile and 0.8 s at the end (2 CPU cores, 2026-11-27).
    """
    if "tensorflow" in sys.modules:  # by a program that runs a command within itself
        return
    gc.disable()
    try:
        with left_out():
            import keras  # noqa: F401  and TensorFlow with it
        gc.freeze()
    finally:
        gc.enable()


@contextlib.contextmanager
def _sorted(noise: str) -> Iterator[None]:
    shown = os.dup(STDERR)
    try:
        # In a session of its own, lest Ctrl-C end it before us.
        command = [sys.executable or "", "-I", "-S", "-c", _SORTER, noise]
        sorter = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, start_new_session=True
        )
        try:
            with sorter.stdin:
                os.dup2(sorter.stdin.fileno(), STDERR)
            yield
        finally:
            _flush()
            os.dup2(shown, STDERR)
            # A child of ours may hold the pipe, and then goes on to be sorted.
            with contextlib.suppress(subprocess.TimeoutExpired):
                sorter.wait(END_S)
    finally:
        os.close(shown)


def _flush() -> None:
    with contextlib.suppress(OSError, ValueError, AttributeError):
        sys.stderr.flush()
