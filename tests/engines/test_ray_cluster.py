"""A real Ray cluster of two nodes on this machine: jobs to the end, and what faults come to."""

import os
import signal
import subprocess

import job
import pytest

# Everything on the loopback, as Ray does it where it knows no clusters: no port opens to others.
os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"
cluster_utils = pytest.importorskip(
    "ray.cluster_utils", reason="Ray is not installed; uv sync --extra ray"
)
pytestmark = pytest.mark.slow

NODE = {"num_cpus": 1, "include_dashboard": False}


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    """What one process comes to at the same global batch."""
    return job.run_alone(tmp_path_factory.mktemp("alone"))


@pytest.fixture
def cluster(monkeypatch):
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    cluster = cluster_utils.Cluster(initialize_head=True, head_node_args=NODE)
    try:
        cluster.add_node(**NODE)
        cluster.wait_for_nodes()
        yield cluster
    finally:
        cluster.shutdown()


@pytest.fixture
def launch(cluster, tmp_path):
    """Begins a job on the cluster; returns its process, whose output is in a file."""
    begun = []

    def launch(*flags, arguments=()):
        command = [*job.TFACCEL, "launch", "--engine=ray", "--nnodes=2", "--grace=10", *flags]
        with open(tmp_path / "output", "w") as output:
            process = subprocess.Popen(
                [*command, job.SCRIPT, f"--workdir={tmp_path / 'run'}", *arguments],
                env=os.environ | {"RAY_ADDRESS": cluster.address},
                stdout=output,
                stderr=output,
            )
        begun.append(process)
        return process

    yield launch
    for process in begun:
        process.kill()


def wait_for_step(workdir, step, process):
    job.wait_until(lambda: job.last_step(workdir) >= step or process.poll() is not None, 300)
    assert process.poll() is None


def test_a_job_of_two_nodes_ends_as_one_process(launch, reference, tmp_path):
    assert launch().wait(timeout=300) == 0, (tmp_path / "output").read_text()
    assert job.difference(tmp_path / "run", reference) < job.TOLERANCE
    assert len(list((tmp_path / "run").rglob("rank-*.log"))) == 2


def test_p6_a_job_whose_rank_is_killed_begins_again_and_ends_as_if_not(launch, reference, tmp_path):
    process = launch("--max-restarts=1")
    wait_for_step(tmp_path / "run", 12, process)
    job.ranks()[1].kill()
    assert process.wait(timeout=300) == 0, (tmp_path / "output").read_text()
    output = (tmp_path / "output").read_text()
    assert "rank 1 was ended by SIGKILL, exit code 137" in output
    assert "resumed from step" in output
    assert job.difference(tmp_path / "run", reference) < job.TOLERANCE


def test_p6_a_job_that_loses_a_node_begins_again_and_ends_as_if_not(
    cluster, launch, reference, tmp_path
):
    process = launch("--max-restarts=2", "--node-timeout=5")
    wait_for_step(tmp_path / "run", 12, process)
    (lost,) = cluster.worker_nodes
    cluster.remove_node(lost, allow_graceful=False)
    job.wait_until(lambda: not job.ranks(), 60)
    cluster.add_node(**NODE)
    assert process.wait(timeout=300) == 0, (tmp_path / "output").read_text()
    assert "resumed from step" in (tmp_path / "output").read_text()
    assert job.difference(tmp_path / "run", reference) < job.TOLERANCE


def test_restarts_have_an_end(launch, tmp_path):
    process = launch()
    wait_for_step(tmp_path / "run", 12, process)
    job.ranks()[0].kill()
    assert process.wait(timeout=300) == 137
    job.wait_until(lambda: not job.ranks(), 30)


def test_a_mistake_in_the_call_is_not_made_twice(launch, tmp_path):
    process = launch("--max-restarts=3", arguments=["--no-such-flag"])
    assert process.wait(timeout=300) == 2
    assert (tmp_path / "output").read_text().count("not restarted: exit code 2") == 2  # nodes


def test_ctrl_c_leaves_nothing(launch, tmp_path):
    process = launch("--max-restarts=3")
    wait_for_step(tmp_path / "run", 12, process)
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=60) == 130
    job.wait_until(lambda: not job.ranks(), 30)


def test_no_cluster_is_a_sentence(tmp_path):
    environment = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    command = [*job.TFACCEL, "launch", "--engine=ray", job.SCRIPT, f"--workdir={tmp_path}"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=100)
    assert done.returncode == 2
    assert "there is no Ray cluster here; start one with `ray start --head`" in done.stderr
