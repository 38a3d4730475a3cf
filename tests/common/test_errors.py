"""What a script that one of our errors ends says, and its exit code."""

import os
import subprocess
import sys

import pytest

from tfaccel.process import progress

SCRIPT = """
import sys
sys.excepthook = lambda *_: print("the user's own", file=sys.stderr)
import tfaccel
from tfaccel.common.errors import RunError
raise {error}
"""


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        ("tfaccel.UserError('batch=3;\\n expected 4')", 2, "tfaccel: error: batch=3; expected 4\n"),
        ("RunError('rank 1 was lost')", 1, "tfaccel: error: rank 1 was lost\n"),
        ("ValueError('x')", 1, "the user's own\n"),
    ],
)
def test_a_launched_script_exits_as_the_command_does(tmp_path, error, code, said):
    progress.write(tmp_path / "heartbeat", progress.Progress())
    environment = {**os.environ, progress.VARIABLE: str(tmp_path / "heartbeat")}
    argv = [sys.executable, "-c", SCRIPT.format(error=error)]
    child = subprocess.run(argv, env=environment, capture_output=True, text=True)
    assert (child.returncode, child.stderr) == (code, said)


def test_a_script_of_its_own_shows_its_traceback():
    environment = {name: os.environ[name] for name in os.environ if name != progress.VARIABLE}
    argv = [sys.executable, "-c", "import tfaccel; raise tfaccel.UserError('batch=3')"]
    child = subprocess.run(argv, env=environment, capture_output=True, text=True)
    assert child.returncode == 1
    assert "Traceback" in child.stderr
