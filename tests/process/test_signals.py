import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time

import pytest

from tfaccel.process import progress
from tfaccel.process.signals import HEARD, StopSignals, at_once


def wait_for(condition):
    ends = time.monotonic() + 300
    while not condition():
        assert time.monotonic() < ends
        time.sleep(0.01)


@pytest.mark.parametrize("number", HEARD)
def test_a_signal_asks_to_stop_and_nothing_else(number):
    before = signal.getsignal(number)
    with StopSignals() as stop:
        assert stop.requested is None
        os.kill(os.getpid(), number)
        wait_for(lambda: stop.requested)
    assert stop.requested == number.name
    assert signal.getsignal(number) is before


def test_a_programs_own_handler_is_called_and_kept():
    called = []
    before = signal.signal(signal.SIGUSR1, lambda number, frame: called.append(number))
    try:
        with StopSignals() as stop:
            os.kill(os.getpid(), signal.SIGUSR1)
            wait_for(lambda: stop.requested and called)
        os.kill(os.getpid(), signal.SIGUSR1)
        wait_for(lambda: len(called) == 2)
    finally:
        signal.signal(signal.SIGUSR1, before)


def kill_itself_and_sleep():
    threading.Timer(0.05, os.kill, [os.getpid(), signal.SIGTERM]).start()
    time.sleep(300)


def test_the_first_signal_ends_a_wait_that_has_nothing_to_save(caplog):
    error = SystemExit(75)
    with StopSignals(error=error):
        with at_once("ended before"):
            pass
        with pytest.raises(SystemExit) as raised, at_once("no run begins"):
            kill_itself_and_sleep()
    assert raised.value is error
    assert "SIGTERM: no run begins; a second signal ends it at once" in caplog.text
    with at_once("nobody hears"):
        pass


def test_a_second_signal_ends_a_process_that_runs_no_python():
    program = """
import ctypes, logging, os, signal
from tfaccel.process.signals import StopSignals
with StopSignals() as stop:
    os.kill(os.getpid(), signal.SIGTERM)
    while not stop.requested: pass
    print("ready", flush=True)
    ctypes.CDLL(None).sleep(60)   # as a compiler: Python's handlers cannot run, other threads can
    ctypes.CDLL(None).sleep(60)
"""
    child = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    assert child.stdout.readline() == "ready\n"
    child.terminate()
    assert child.wait(timeout=300) == 128 + signal.SIGTERM


@pytest.mark.parametrize(("apart_s", "code"), [(1000, 0), (0.1, 128 + signal.SIGTERM)])
def test_under_a_launcher_a_scheduler_may_ask_once_through_two(tmp_path, apart_s, code):
    """A second SIGTERM ends the rank only where it comes later than `apart_s`."""
    progress.write(tmp_path / "heartbeat", progress.Progress())
    program = f"""
import os, signal, time
from tfaccel.process import signals
signals.SAME_REQUEST_S = {apart_s}
with signals.StopSignals() as stop:
    os.kill(os.getpid(), signal.SIGTERM)
    while not stop.requested: pass
    time.sleep(0.3)
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep({300 if code else 0.3})
"""
    environment = {**os.environ, progress.VARIABLE: str(tmp_path / "heartbeat")}
    child = subprocess.run([sys.executable, "-c", program], env=environment, timeout=600)
    assert child.returncode == code
    assert progress.read(tmp_path / "heartbeat").asked


def test_beside_the_main_thread_nothing_is_installed(caplog):
    before = signal.getsignal(signal.SIGTERM)

    def run():
        with StopSignals() as stop:
            assert signal.getsignal(signal.SIGTERM) is before
            assert stop.requested is None

    with caplog.at_level("INFO", logger="tfaccel"):
        thread = threading.Thread(target=run)
        thread.start()
        thread.join()
    assert "not heard" in caplog.text


INTERACTIVE = """
import os, signal, sys, threading, time
import numpy as np
from tfaccel.process.signals import StopSignals
sys.ps1 = ">>> "   # as Python's prompt, IPython and a notebook's kernel set it
for _ in range(2):
    with StopSignals() as stop:
        os.kill(os.getpid(), signal.{first})
        while not stop.requested: pass
        print(stop.requested)
        try:
            for _ in range({more}):
                os.kill(os.getpid(), signal.SIGINT)
            for _ in range(30):
                time.sleep(0.01)
            print("not interrupted")
        except KeyboardInterrupt:
            print("interrupted")
"""


@pytest.mark.parametrize(
    ("first", "more", "said"),
    [
        ("SIGINT", 1, "interrupted"),
        ("SIGTERM", 1, "interrupted"),
        ("SIGINT", 0, "not interrupted"),
    ],
)
def test_in_a_notebook_a_second_ctrl_c_interrupts_and_the_kernel_lives(first, more, said):
    program = INTERACTIVE.format(first=first, more=more)
    child = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert child.returncode == 0, child.stderr
    assert child.stdout.split("\n") == [first, said, first, said, ""]
    assert "a second signal ends it at once" in child.stderr


def test_in_a_notebook_two_while_the_main_thread_is_in_c_are_two():
    head, _, _ = INTERACTIVE.partition("for _ in range(2)")
    program = f"""{head}
def press():
    for _ in range(2):
        time.sleep(0.1)
        os.kill(os.getpid(), signal.SIGINT)
with StopSignals() as stop:
    threading.Thread(target=press).start()
    try:
        np.sort(np.random.default_rng(0).random(2 * 10**7))
        time.sleep(1)
    except KeyboardInterrupt:
        print("interrupted")
"""
    child = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert child.stdout == "interrupted\n", child.stderr


def test_in_a_notebook_sigterm_ends_the_kernel_as_ever():
    program = INTERACTIVE.format(first="SIGINT", more=0).replace(
        "        try:",
        "        os.kill(os.getpid(), signal.SIGTERM)\n        while True: pass\n        try:",
    )
    child = subprocess.run([sys.executable, "-c", program], capture_output=True, timeout=300)
    assert child.returncode == 128 + signal.SIGTERM


def test_a_forked_child_is_not_its_parent():
    """It ends by a signal as it would without us, and its parent does not take that for its own."""
    with StopSignals() as stop:
        before = signal.getsignal(signal.SIGTERM)
        child = multiprocessing.get_context("fork").Process(target=time.sleep, args=(60,))
        child.start()
        child.terminate()
        child.join(10)
        assert child.exitcode == -signal.SIGTERM
        assert signal.getsignal(signal.SIGTERM) is before
        time.sleep(0.1)  # for what should not be heard
        assert stop.requested is None
        os.kill(os.getpid(), signal.SIGTERM)
        wait_for(lambda: stop.requested)
