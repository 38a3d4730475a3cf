"""What ranks print where nobody reads it or it cannot be written, and how ranks are ended."""

import contextlib
import logging
import os
import signal
import subprocess
import sys
import threading
import time
import types

import psutil
import pytest

from tfaccel.launch import ranks as ranks_room
from tfaccel.launch import terminal as terminal_room
from tfaccel.launch.output import Output
from tfaccel.launch.ranks import Ranks
from tfaccel.launch.stop import Stop
from tfaccel.launch.terminal import Terminal, Terminals

LIMIT_S = 300  # what is waited for comes in a moment; the machine may be slow

# A child outside of the rank's group, which keeps its pipes open.
LEAVES_A_CHILD = """
import subprocess, sys
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"],
    start_new_session=True)
print('child', child.pid, flush=True)
sys.exit(3)
"""
SLEEPS = "import time; time.sleep(1000)"
TALKS = "for i in range(20000): print('line', i)"


@pytest.fixture
def pipe():
    reader, writer = os.pipe()
    with open(reader, "rb", buffering=0) as reader, open(writer, "w") as writer:
        yield reader, writer


@pytest.fixture
def start(tmp_path):
    """Starts ranks, which are ended and left to nobody."""
    started = []

    def start(program, count=1, **more):
        given = {"first_rank": 0, "log_dir": tmp_path, "grace_s": 0.1, **more}
        argv = [sys.executable, "-c", program]
        started.append(Ranks(argv, [dict(os.environ)] * count, terminals=Terminals(), **given))
        return started[-1]

    yield start
    for path in tmp_path.glob("*.log"):
        for line in path.read_text().splitlines():
            if line.startswith("child "):
                psutil.Process(int(line.removeprefix("child "))).kill()


def wait_for(condition):
    ends = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < ends
        time.sleep(0.01)


def test_nobody_waits_for_a_reader_that_is_not_there_and_what_is_left_out_is_counted(
    pipe, monkeypatch
):
    monkeypatch.setattr(terminal_room, "MOST_WAITING", 1000)
    monkeypatch.setattr(terminal_room, "SLOW_READER_S", 0.1)
    reader, writer = pipe
    terminal = Terminal(writer, "stdout")
    for index in range(5000):
        terminal.show(b"line %06d of those that nobody reads for a while\n" % index)
    terminal.say(b"the end\n")  # of what the launcher says, nothing is left out
    received = b""
    while b"are dropped" not in received:
        received += reader.read(2**16)
    terminal.close(5)
    shown = received.count(b" of those")
    assert b"the end\n" in received
    assert f"[launch] {5000 - shown} lines are dropped here".encode() in received
    assert received.count(b"are dropped") == 1


def test_a_slow_reader_gets_all(pipe, monkeypatch):
    monkeypatch.setattr(terminal_room, "MOST_WAITING", 1000)
    terminal, received = Terminal(pipe[1], "stdout"), 0
    lines = [b"line %06d\n" % index for index in range(50000)]
    shows = threading.Thread(target=lambda: [terminal.show(each) for each in lines])
    shows.start()
    while received < len(b"".join(lines)):
        received += len(pipe[0].read(2**12))
    shows.join()
    terminal.close(5)


def test_a_terminal_that_nobody_reads_is_waited_for_only_so_long(pipe):
    terminal = Terminal(pipe[1], "stdout")
    terminal.say(b"x" * 2**20)
    terminal.close(0.2)
    assert terminal._thread.is_alive()  # still at it, and not waited for any more
    received = 0
    while received < 2**20:  # or its thread would write into another test
        received += len(pipe[0].read(2**20))
    terminal.close(5)


@pytest.mark.parametrize("stream", [None, "/dev/full"])
def test_a_terminal_that_cannot_be_written_is_said_once(stream, caplog):
    with open(stream, "w") if stream else contextlib.nullcontext() as file:
        terminal = Terminal(file, "stdout")
        for _ in range(10):
            terminal.show(b"line\n")
        terminal.close(5)
    assert caplog.text.count("launch: cannot write to stdout") == 1


@pytest.mark.parametrize("log", ["/dev/full", "folder"])
def test_a_log_that_cannot_be_written_is_said_once_and_the_rank_lives(log, tmp_path, caplog):
    target = tmp_path if log == "folder" else log
    process = subprocess.Popen(
        [sys.executable, "-c", TALKS], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    path = tmp_path / "rank-0.log"
    path.symlink_to(target)
    output = Output(process, prefix="", log=path, header="x", terminals=Terminals())
    assert process.wait(LIMIT_S) == 0
    output.close(5)
    assert output.tail()[-1] == "line 19999"
    assert caplog.text.count(f"launch: cannot write {path}") == 1


ERRORS = """
print("tensorflow.python.errors_impl.InvalidArgumentError: Graph execution error:")
print("Detected at node PyFunc")
"""


@pytest.mark.parametrize(
    ("more", "first"),
    [
        ("print('ValueError: row 7 is broken')", "ValueError: row 7 is broken"),
        ("", "tensorflow.python.errors_impl.InvalidArgumentError: Graph execution error:"),
    ],
)
def test_the_first_error_is_the_users_within_a_function_of_tensorflow(more, first, tmp_path):
    command = [sys.executable, "-c", ERRORS + more]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    log = tmp_path / "rank-0.log"
    output = Output(process, prefix="", log=log, header="x", terminals=Terminals())
    assert process.wait(LIMIT_S) == 0
    output.close(5)
    assert output.tail()[0] == first


def test_each_launch_begins_its_part_of_a_log(start, tmp_path):
    for _ in range(2):
        ranks = start("import sys; sys.exit(0)", count=1)
        wait_for(lambda ranks=ranks: ranks.states()[0].exit_code == 0)
        ranks.end()
    lines = (tmp_path / "rank-0.log").read_text().splitlines()
    assert len(lines) == 2
    for line in lines:
        assert line.startswith("--- launched 2")
        assert line.endswith("-c 'import sys; sys.exit(0)'")


def test_pipes_that_stay_open_are_waited_for_together(start, monkeypatch):
    ranks, waited = start(LEAVES_A_CHILD, count=3), []
    wait_for(lambda: [each.exit_code for each in ranks.states().values()] == [3, 3, 3])
    assert not any(each._output.is_done for each in ranks._ranks.values())  # nor waited for there
    close = Output.close

    def noted(output, timeout_s):  # and all of it is over, by a clock that passes with it
        waited.append(timeout_s)
        close(output, 0)

    now = lambda: time.monotonic() + sum(waited)  # noqa: E731
    clock = types.SimpleNamespace(monotonic=now, sleep=time.sleep)
    monkeypatch.setattr(ranks_room, "time", clock)
    monkeypatch.setattr(Output, "close", noted)
    ranks.end()
    assert 0 < waited[0] <= ranks_room.CLOSE_S
    assert waited[1:] == [0, 0]


def test_a_rank_that_cannot_be_ended_is_named_and_not_waited_for(start, monkeypatch, caplog):
    monkeypatch.setattr(ranks_room, "KILLED_S", 0.3)
    monkeypatch.setattr(ranks_room, "CLOSE_S", 0.1)
    sent, killpg = [], os.killpg
    monkeypatch.setattr(os, "killpg", lambda group, number: sent.append((group, number)))
    ranks = start(SLEEPS, count=2)
    ranks.end()
    assert all(psutil.pid_exists(each.pid) for each in ranks._ranks.values())
    assert "launch: rank 0 did not end" in caplog.text
    assert "launch: rank 1 did not end" in caplog.text
    for group in {group for group, _ in sent}:
        killpg(group, signal.SIGKILL)


def test_the_number_of_a_group_stays_its_own_until_the_last_signal(start, monkeypatch):
    others = psutil.Process().children()  # of tests before, of which nobody asked how they ended
    ranks = start("pass")
    wait_for(lambda: ranks.states()[0].exit_code == 0)
    (pid,) = [
        each.pid
        for each in psutil.Process().children()
        if each not in others
        and each.status() == psutil.STATUS_ZOMBIE
        and os.getpgid(each.pid) == each.pid
    ]
    ranks.end()
    assert not psutil.pid_exists(pid)
    monkeypatch.setattr(os, "killpg", lambda *_: pytest.fail("a signal to whoever has it now"))
    ranks.send(signal.SIGKILL)


@pytest.fixture
def hangup():
    """Sets what becomes of SIGHUP, whatever whoever started the tests has set."""
    before = signal.getsignal(signal.SIGHUP)
    yield lambda handler: signal.signal(signal.SIGHUP, handler)
    signal.signal(signal.SIGHUP, before)


def test_a_lost_terminal_is_one_request_to_stop_however_often_it_is_said(hangup):
    hangup(signal.SIG_DFL)
    with Stop() as stop:
        signal.raise_signal(signal.SIGHUP)
        signal.raise_signal(signal.SIGHUP)  # the kernel's, and the shell's
        assert (stop.signal, stop.count) == (signal.SIGTERM, 1)
        assert stop.age_s >= 0
        signal.raise_signal(signal.SIGTERM)  # as systemd sends both
        assert stop.count == 1
        signal.raise_signal(signal.SIGTERM)
        assert stop.count == 2


def test_nohup_holds(hangup):
    hangup(signal.SIG_IGN)
    with Stop() as stop:
        signal.raise_signal(signal.SIGHUP)
        assert stop.count == 0


@pytest.fixture(autouse=True)
def shown(caplog):
    caplog.set_level(logging.INFO, logger="tfaccel")


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["a.py", "--token=abc", "--epochs=3"], "a.py '--token=***' --epochs=3"),
        (["a.py", "--api-key", "abc", "--epochs", "3"], "a.py --api-key '***' --epochs 3"),
        (["a.py", "--password", "--epochs", "3"], "a.py --password --epochs 3"),
        (["a.py", "password=abc"], "a.py 'password=***'"),
    ],
)
def test_a_command_in_a_log_has_no_secrets(argv, said):
    assert ranks_room._in_words(argv) == said
