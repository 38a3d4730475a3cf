"""What the tests of all engines ask of the job in digits.py, beside them.

job.run_alone(reference)                        # as one process
job.difference(workdir, reference) < TOLERANCE  # what an engine made of it
"""

import json
import os
import pathlib
import subprocess
import sys
import time

import numpy as np
import psutil

from tfaccel.training.checkpoint.folder import parse
from tfaccel.training.checkpoint.store import Store

ROOT = pathlib.Path(__file__).parents[2]
SCRIPT = str(ROOT / "tests" / "engines" / "digits.py")
TFACCEL = [sys.executable, "-m", "tfaccel"]
LAST = 3 * 23  # 1,437 images in batches of 64

# Of weights of about 1, in float32: sums come in another order. Seen: 6e-8 (2 workers, 2026-11-22).
TOLERANCE = 1e-6


def run_alone(workdir):
    """Runs the job as one process, and returns what it comes to."""
    command = [sys.executable, SCRIPT, f"--workdir={workdir}", "--step-s=0"]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, env=environment)
    assert done.returncode == 0, done.stderr
    return newest(workdir)


def newest(workdir):
    """The newest checkpoint, verified."""
    return Store(workdir / "checkpoints", keep_last=1, keep_best=0, largest_is_best=True).newest()


def last_step(workdir):
    """The step of the newest checkpoint, 0 without one; quick enough to be asked often."""
    named = (parse(each) for each in workdir.glob("checkpoints/step-*"))
    return max((each.step for each in named if each and not each.unfinished), default=0)


def difference(workdir, reference):
    """The largest difference of any variable from the reference's."""
    found = newest(workdir)
    assert found.step == reference.step == LAST
    assert found.arrays.keys() == reference.arrays.keys()
    return max(
        float(np.max(np.abs(np.float64(array) - np.float64(reference.arrays[name])), initial=0))
        for name, array in found.arrays.items()
    )


def wait_until(condition, timeout_s):
    """Asks five times a second."""
    ends = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < ends
        time.sleep(0.2)


def ranks():
    """The processes that run the job's script here, by worker index."""
    found = {}
    for process in psutil.process_iter():
        try:
            if SCRIPT in process.cmdline()[:2]:
                found[_worker_index(process.environ())] = process
        except psutil.Error:  # it has ended meanwhile
            continue
    return found


def _worker_index(environment):
    if "TF_CONFIG" in environment:
        return json.loads(environment["TF_CONFIG"])["task"]["index"]
    return int(environment.get("OMPI_COMM_WORLD_RANK", 0))
