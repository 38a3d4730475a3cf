import os
import signal
import subprocess
import sys
import threading
import time

import pytest

from tfaccel.signals import HEARD, StopSignals


def wait_for(condition):
    ends = time.monotonic() + 10
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


def test_a_second_signal_ends_a_process_that_runs_no_python():
    program = """
import ctypes, logging, os, signal
from tfaccel.signals import StopSignals
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
    assert child.wait(timeout=10) == 128 + signal.SIGTERM


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
