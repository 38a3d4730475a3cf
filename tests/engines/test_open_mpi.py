"""A real mpirun on this host: a job to the end, and what faults come to."""

import os
import pathlib
import shutil
import subprocess
import sys

import job
import pytest

ROOT = os.environ.get("TFACCEL_ENGINES", "")
PATH = f"{ROOT}/usr/bin:{os.environ['PATH']}"
ORTERUN = shutil.which("orterun", path=PATH)

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not ORTERUN,
        reason="there is no orterun; run tools/unpack_engines.py --out=DIR and set "
        "TFACCEL_ENGINES=DIR",
    ),
]


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    """What one process comes to at the same global batch."""
    return job.run_alone(tmp_path_factory.mktemp("alone"))


def environment():
    """What mpirun needs where it is unpacked and not installed."""
    allowed = {f"OMPI_ALLOW_RUN_AS_ROOT{each}": "1" for each in ("", "_CONFIRM")}
    if pathlib.Path(ORTERUN).is_relative_to("/usr/bin"):
        return os.environ | allowed
    libraries = f"{ROOT}/usr/lib/x86_64-linux-gnu"
    return (
        os.environ
        | allowed
        | {
            "PATH": PATH,
            "LD_LIBRARY_PATH": f"{libraries}:{ROOT}/lib/x86_64-linux-gnu",
            "OPAL_PREFIX": f"{ROOT}/usr",
            "OPAL_LIBDIR": libraries,
            "OMPI_MCA_mca_base_component_path": f"{libraries}/openmpi/lib/openmpi3",
            "PMIX_INSTALL_PREFIX": f"{libraries}/pmix2",
        }
    )


def mpirun(*command):
    return subprocess.Popen(
        [ORTERUN, "--oversubscribe", "-n", "2", *command],
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def test_a_job_on_one_host_ends_as_one_process(reference, tmp_path):
    run = mpirun(sys.executable, job.SCRIPT, f"--workdir={tmp_path}")
    output, _ = run.communicate(timeout=200)
    assert run.returncode == 0, output
    assert "cluster: 2 worker(s): Open MPI" in output
    assert job.difference(tmp_path, reference) < job.TOLERANCE


def test_p6_a_killed_rank_ends_the_job_and_the_same_command_goes_on(reference, tmp_path):
    command = [sys.executable, job.SCRIPT, f"--workdir={tmp_path}"]
    run = mpirun(*command)
    job.wait_until(lambda: job.last_step(tmp_path) >= 12, 120)
    job.ranks()[1].kill()
    output, _ = run.communicate(timeout=60)
    assert run.returncode != 0
    job.wait_until(lambda: not job.ranks(), 30)
    assert "exited on signal 9" in output
    run = mpirun(*command)
    output, _ = run.communicate(timeout=200)
    assert run.returncode == 0, output
    assert "resumed from step" in output
    assert job.difference(tmp_path, reference) < job.TOLERANCE


def test_two_launchers_on_one_host_are_refused(tmp_path):
    launch = ["launch", "--master-addr=localhost", job.SCRIPT, f"--workdir={tmp_path}"]
    run = mpirun(*job.TFACCEL, *launch)
    output, _ = run.communicate(timeout=60)
    assert run.returncode == 2, output
    assert "has 2 tasks on 1 node(s); start only one launcher per node" in output
