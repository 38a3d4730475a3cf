"""A program that does not end is ended, and none is left when this process ends."""

import os
import pathlib
import signal
import subprocess
import sys
import threading
import time
import types

import pytest

from tfaccel.process import child
from tfaccel.process.child import Child, how_it_ended, run

LIMIT_S = 300  # what is waited for comes in a second; the machine may be slow

# Writes its own id and that of what it starts, and never ends.
STUCK = """
import os, pathlib, subprocess, sys, time
child = subprocess.Popen(["sleep", "1000"])
path = pathlib.Path(sys.argv[1])
path.with_name("part").write_text(f"{os.getpid()} {child.pid}")
path.with_name("part").rename(path)
time.sleep(1000)
"""
PARENT = """
import os, signal, sys
from tfaccel.process.child import run
signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored below a shell's `&`
command = [sys.executable, "-c", sys.argv[1], sys.argv[2]]
run(command, environment=os.environ, limit_s=1000)
"""


def is_alive(pid):
    try:
        state = pathlib.Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except OSError:
        return False
    return state != "Z"  # which nobody has waited for yet


def end(pids):
    """Whether all end soon."""
    ends = time.monotonic() + LIMIT_S
    while any(map(is_alive, pids)) and time.monotonic() < ends:
        time.sleep(0.01)
    return not any(map(is_alive, pids))


def test_exit_code_and_last_words():
    program = "import os, sys; print(os.environ['WORD'], file=sys.stderr); sys.exit(3)"
    environment = {**os.environ, "WORD": "enough"}
    command = [sys.executable, "-c", program]
    assert run(command, environment=environment, limit_s=LIMIT_S) == (3, "enough\n")


def test_a_death_is_a_negative_exit_code():
    program = "import os; os.kill(os.getpid(), 11)"
    assert run([sys.executable, "-c", program], environment=os.environ, limit_s=LIMIT_S)[0] == -11


@pytest.mark.parametrize(
    ("exit_code", "words"),
    [
        (3, "ended with exit code 3"),
        (-11, "was ended by SIGSEGV"),
        (-9, "was ended by SIGKILL (perhaps the machine was out of memory)"),
        (-77, "was ended by signal 77"),
        (137, "was ended by SIGKILL, exit code 137 (perhaps the machine was out of memory)"),
        (143, "was ended by SIGTERM, exit code 143"),
        (255, "ended with exit code 255"),  # no signal has the number 127
    ],
)
def test_an_exit_code_in_words(exit_code, words):
    assert how_it_ended(exit_code) == words


def test_what_an_ended_program_leaves_behind_is_ended():
    program = "import subprocess; print(subprocess.Popen(['sleep', '1000']).pid)"
    command = [sys.executable, "-c", program]
    with Child(command, stdout=subprocess.PIPE, text=True) as one, one.process.stdout as said:
        left = said.readline()
        assert one.wait(LIMIT_S)
        assert one.exit_code() == 0
        assert is_alive(left.strip())
    assert end([left.strip()])
    assert one.exit_code() == 0
    one.end()  # again


def test_one_that_somebody_else_has_waited_for_is_over():
    with Child([sys.executable, "-c", "import sys; sys.exit(3)"]) as one:
        os.waitpid(one.pid, 0)
        assert one.wait(LIMIT_S)
    assert one.exit_code() == 0  # as subprocess has it: nobody knows


def test_one_that_is_asked_first_may_end_by_itself():
    program = """
import signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: sys.exit(7))
print(flush=True)
time.sleep(1000)
"""
    pipe = subprocess.PIPE
    with Child([sys.executable, "-c", program], grace_s=LIMIT_S, stdout=pipe) as one:
        one.process.stdout.readline()
    one.process.stdout.close()
    assert one.exit_code() == 7


def test_what_takes_too_long_is_ended_with_its_group(tmp_path, monkeypatch):
    ids = tmp_path / "ids"

    # The time is over once the program is stuck, however slow it is until then.
    over = lambda: LIMIT_S + 1.0 if ids.exists() else 0.0  # noqa: E731
    clock = types.SimpleNamespace(monotonic=over, sleep=time.sleep)
    monkeypatch.setattr(child, "time", clock)
    command = [sys.executable, "-c", STUCK, str(ids)]
    with pytest.raises(TimeoutError, match="did not end within 300 s"):
        run(command, environment=os.environ, limit_s=LIMIT_S, stop=threading.Event())
    assert end(ids.read_text().split())


@pytest.mark.parametrize(
    "how",
    [*(pytest.param(each, marks=pytest.mark.slow) for each in ("SIGINT", "SIGTERM")), "SIGKILL"],
)
def test_no_orphan_is_left_when_the_parent_ends(tmp_path, how):
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT, STUCK, str(tmp_path / "ids")],
        stderr=subprocess.DEVNULL,
    )
    ends = time.monotonic() + LIMIT_S
    while not (tmp_path / "ids").exists():
        assert parent.poll() is None
        assert time.monotonic() < ends
        time.sleep(0.01)
    program, its_own = (tmp_path / "ids").read_text().split()
    parent.send_signal(getattr(signal, how))
    assert end([program])
    parent.wait(timeout=LIMIT_S)
    if how == "SIGINT":
        assert end([its_own])
    else:  # as the docstring says, on its own
        os.kill(int(its_own), signal.SIGKILL)
