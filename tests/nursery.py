"""A Python that has imported TensorFlow and forks: a child of it begins in 0.1 s, not in 3 s.

    with Nursery() as nursery:
        child = nursery.start("print(1)", env={**os.environ}, stdout=path, stderr=path)
        assert child.wait(60) == 0

A child is as new as any process: TensorFlow has no device, no flag and no thread before it is used
first, which is after the fork. It has the environment that is given, but for what Python itself
and TensorFlow's import read (PYTHONPATH, LD_LIBRARY_PATH, TF_CPP_MIN_LOG_LEVEL).
"""

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import time


class Nursery:
    """The parent of all children, which ends with them when this is left."""

    def __init__(self):
        """Starts it; what it imports is waited for by the first child."""
        ours = ("LD_LIBRARY_PATH", "TF_FORCE_GPU_ALLOW_GROWTH")
        self._process = subprocess.Popen(
            [sys.executable, "-u", __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={key: value for key, value in os.environ.items() if key not in ours},
        )
        self._codes = {}

    def __enter__(self):
        """Returns itself."""
        return self

    def __exit__(self, *_):
        """Ends it; its children get SIGKILL."""
        self._process.stdin.close()
        self._process.wait()

    def start(self, program, *, env, stdout, stderr):
        """Runs a program in a new child here, and returns it; the two are paths."""
        settings = {
            "program": program,
            "env": dict(env),
            "cwd": os.getcwd(),
            "files": [str(stdout), str(stderr)],
        }
        self._process.stdin.write(f"{json.dumps(settings)}\n".encode())
        self._process.stdin.flush()
        while (said := self._next(time.monotonic() + 300))[0] != "begun":
            pass
        return Child(self, said[1])

    def code(self, pid, timeout_s):
        """Returns the code of a child; None if it has not ended in time."""
        ends = time.monotonic() + timeout_s
        while pid not in self._codes and self._next(ends):
            pass
        return self._codes.get(pid)

    def _next(self, ends):
        """Returns what it says next, None if that is not in time."""
        output = self._process.stdout.fileno()
        if not select.select([output], [], [], max(0, ends - time.monotonic()))[0]:
            return None
        line = b""
        while not line.endswith(b"\n"):  # it is written at once
            received = os.read(output, 1)
            assert received, "the nursery has ended"
            line += received
        said = json.loads(line)
        if said[0] == "ended":
            self._codes[said[1]] = said[2]
        return said


class Child:
    """A child, as subprocess.Popen has it."""

    def __init__(self, nursery, pid):
        """Belongs to that nursery."""
        self._nursery, self.pid = nursery, pid

    def poll(self):
        """Returns its code; None if it runs."""
        return self._nursery.code(self.pid, 0)

    def wait(self, timeout_s):
        """Returns its code.

        Raises:
          subprocess.TimeoutExpired: it runs still.
        """
        code = self._nursery.code(self.pid, timeout_s)
        if code is None:
            raise subprocess.TimeoutExpired("a child", timeout_s)
        return code

    def send_signal(self, number):
        """Sends it a signal if it runs."""
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def kill(self):
        """Ends it at once."""
        self.send_signal(signal.SIGKILL)


def _say(*words):
    os.write(1, f"{json.dumps(words)}\n".encode())


def _reap(*_):
    with contextlib.suppress(ChildProcessError):
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            _children.discard(ended[0])
            _say("ended", ended[0], os.waitstatus_to_exitcode(ended[1]))


def _next_program():
    """Forks for each request; returns the program in the child, and None at the end."""
    signal.signal(signal.SIGCHLD, _reap)
    for line in sys.stdin:
        settings = json.loads(line)
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGCHLD])  # "begun" comes first
        if pid := os.fork():
            _children.add(pid)
            _say("begun", pid)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGCHLD])
            continue
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGCHLD])
        _begin(**settings)
        return settings["program"]
    for pid in list(_children):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    return None


def _begin(env, cwd, files, **_):
    os.environ.clear()
    os.environ.update(env)
    os.chdir(cwd)
    read = os.open(os.devnull, os.O_RDONLY)
    outputs = [os.open(each, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600) for each in files]
    for number, descriptor in enumerate([read, *outputs]):
        os.dup2(descriptor, number)
        os.close(descriptor)


if __name__ == "__main__":
    import keras  # noqa: F401
    import tensorflow  # noqa: F401

    import tfaccel.strategy
    import tfaccel.watchdog  # noqa: F401

    _children = set()
    sys.path[0] = ""  # as of `python -c`
    if (program := _next_program()) is not None:
        exec(program, {"__name__": "__main__", "__builtins__": __builtins__})
