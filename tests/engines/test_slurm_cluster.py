"""A real Slurm of two nodes: jobs to the end, and what faults come to."""

import json
import sys

import job
import pytest
import slurm_cluster
from slurm_cluster import SlurmCluster

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(bool(slurm_cluster.why_not()), reason=slurm_cluster.why_not()),
]
OVER = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL")


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    """What one process comes to at the same global batch."""
    return job.run_alone(tmp_path_factory.mktemp("alone"))


@pytest.fixture
def cluster(tmp_path):
    with SlurmCluster(tmp_path / "slurm") as cluster:
        yield cluster


class Job:
    """One that `tfaccel launch --engine=slurm` has submitted."""

    def __init__(self, cluster, workdir, *, flags=(), arguments=()):
        self.cluster, self.workdir = cluster, workdir
        launch = [*job.TFACCEL, "launch", "--engine=slurm", "--nnodes=2", "--grace=10", *flags]
        done = cluster.run(*launch, job.SCRIPT, f"--workdir={workdir}", *arguments)
        said = json.loads(done.stdout)
        self.number, self.output = said["job"], said["output"]

    def __getitem__(self, name):
        return self.cluster.job(self.number)[name]

    def wait_for_step(self, step):
        # Its first steps come some 15 s after its start.
        self.cluster.wait_until(lambda: job.last_step(self.workdir) >= step, timeout_s=120)

    def end(self, *, timeout_s=240):
        """Returns the state in which it ends."""
        self.cluster.wait_until(lambda: self["JobState"] in OVER, timeout_s=timeout_s)
        return self["JobState"]

    def said(self):
        with open(self.output) as file:
            return file.read()


def test_a_job_of_two_nodes_ends_as_one_process(cluster, reference, tmp_path):
    submitted = Job(cluster, tmp_path / "run")
    assert submitted.end() == "COMPLETED", submitted.said()
    assert job.difference(tmp_path / "run", reference) < job.TOLERANCE
    logs = sorted(
        str(path.relative_to(tmp_path)) for path in (tmp_path / "run").rglob("rank-*.log")
    )
    assert logs == [
        f"run/launch/{submitted.number}-0/attempt-0/rank-{rank}.log" for rank in range(2)
    ]


def test_p6_a_job_whose_rank_is_killed_is_queued_again_and_ends_as_if_not(
    cluster, reference, tmp_path
):
    submitted = Job(cluster, tmp_path / "run", flags=["--max-restarts=1"])
    submitted.wait_for_step(12)
    job.ranks()[1].kill()
    assert submitted.end() == "COMPLETED", submitted.said()
    assert submitted["Restarts"] == "1"
    assert "rank 1 was ended by SIGKILL, exit code 137" in submitted.said()
    assert "tfaccel: exit code 137; restart 1 of at most 1" in submitted.said()
    assert "resumed from step" in submitted.said()
    assert job.difference(tmp_path / "run", reference) < job.TOLERANCE


@pytest.mark.parametrize("node", ["n10", "n9"])  # the batch script runs on n9
def test_p6_a_job_that_loses_a_node_is_queued_again_and_ends_as_if_not(
    node, cluster, reference, tmp_path
):
    submitted = Job(cluster, tmp_path / "run", flags=["--max-restarts=1", "--node-timeout=5"])
    submitted.wait_for_step(12)
    cluster.kill(node)
    cluster.wait_until(lambda: submitted["JobState"] == "PENDING", timeout_s=90)
    assert not job.ranks()
    cluster.start_node(node)
    assert submitted.end() == "COMPLETED", submitted.said()
    assert submitted["Restarts"] == "1"
    assert "resumed from step" in submitted.said()
    assert job.difference(tmp_path / "run", reference) < job.TOLERANCE


def test_p5_a_job_near_its_time_limit_saves_and_goes_on_later(cluster, reference, tmp_path):
    submitted = Job(cluster, tmp_path / "run", flags=["--max-restarts=1"])
    submitted.wait_for_step(12)
    # As --signal=TERM@120 does it.
    cluster.run("scancel", "--signal=TERM", submitted.number)
    assert submitted.end() == "COMPLETED", submitted.said()
    assert "tfaccel: exit code 143; restart 1 of at most 1" in submitted.said()
    assert "stopped by SIGTERM after step" in submitted.said()
    assert job.difference(tmp_path / "run", reference) < job.TOLERANCE


def test_restarts_have_an_end(cluster, tmp_path):
    submitted = Job(cluster, tmp_path / "run", flags=["--max-restarts=1"])
    for _ in range(2):
        submitted.wait_for_step(job.last_step(tmp_path / "run") + 8)
        job.ranks()[0].kill()
        cluster.wait_until(lambda: not job.ranks(), timeout_s=60)
    assert submitted.end() == "FAILED"
    assert submitted["Restarts"] == "1"
    assert submitted["ExitCode"] == "137:0"


def test_a_mistake_in_the_call_is_not_made_twice(cluster, tmp_path):
    flags = ["--max-restarts=3"]
    submitted = Job(cluster, tmp_path / "run", flags=flags, arguments=["--no-such-flag"])
    assert submitted.end() == "FAILED"
    assert submitted["Restarts"] == "0"
    assert submitted["ExitCode"] == "2:0"


def test_p6_a_job_that_is_cancelled_leaves_nothing_and_does_not_come_again(cluster, tmp_path):
    submitted = Job(cluster, tmp_path / "run", flags=["--max-restarts=3"])
    submitted.wait_for_step(12)
    assert len(job.ranks()) == 2
    cluster.run("scancel", submitted.number)
    assert submitted.end() == "CANCELLED"
    cluster.wait_until(lambda: not job.ranks(), timeout_s=30)
    assert submitted["Restarts"] == "0"
    assert "stopped by SIGTERM after step" in submitted.said()


def test_what_slurm_refuses_is_a_sentence(cluster, tmp_path):
    flags = ["launch", "--engine=slurm", "--sbatch=--partition=none"]
    done = cluster.run(
        *job.TFACCEL, *flags, job.SCRIPT, f"--workdir={tmp_path / 'run'}", check=False
    )
    assert done.returncode == 2
    assert "invalid partition specified: none" in done.stderr


def test_srun_by_hand_ends_as_one_process(cluster, reference, tmp_path):
    srun = ["srun", "--nodes=2", "--ntasks-per-node=1", "--kill-on-bad-exit=1"]
    cluster.run(*srun, sys.executable, job.SCRIPT, f"--workdir={tmp_path / 'run'}")
    assert job.difference(tmp_path / "run", reference) < job.TOLERANCE


def test_srun_tfaccel_train_by_hand(cluster, tmp_path):
    srun = ["srun", "--nodes=2", "--ntasks-per-node=1", "--kill-on-bad-exit=1"]
    config = ["--config=configs/digits.py:smoke", "--config.runtime.gpu_ids="]
    train = ["train", *config, "--config.runtime.xla=False", f"--workdir={tmp_path / 'run'}"]
    done = cluster.run(*srun, *job.TFACCEL, *train)
    # In the order of their numbers, not of their names.
    assert "this is worker 0 (n9:" in done.stderr
    assert "this is worker 1 (n10:" in done.stderr
    results = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert [each["steps"] for each in results] == [23, 23]
    assert sum("export" in each for each in results) == 1
