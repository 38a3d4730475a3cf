"""Signals to a launcher: what is left of them once its exit code is known."""

import signal
import subprocess
import sys

import pytest

# srun -K1 signals the other launchers as soon as the first has ended, as these are ending too.
PROGRAM = """
import os, signal, sys
from tfaccel.launch.stop import Stop, hear_no_more
number, is_within = map(int, sys.argv[1:])
with Stop() as stop:
    os.kill(os.getpid(), number)
    assert (stop.signal, stop.count) == (number, 1)
    if is_within:
        hear_no_more()  # with no moment between the two, in which a signal would end the process
if not is_within:
    hear_no_more()
os.kill(os.getpid(), number)
sys.exit(2)
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1, signal.SIGINT])
@pytest.mark.parametrize("is_within", [False, True])
def test_a_signal_after_the_end_leaves_the_exit_code_as_it_is(number, is_within):
    argv = [sys.executable, "-c", PROGRAM, str(int(number)), str(int(is_within))]
    done = subprocess.run(argv, capture_output=True, text=True)
    assert done.returncode == 2, done.stderr
