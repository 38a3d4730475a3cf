"""Two hosts, each a network namespace of this machine: `tfaccel launch` on both, and a link cut."""

import json
import os
import re
import shutil
import subprocess
import sys
import time

import numpy as np
import pytest

from tfaccel.training.checkpoint.folder import parse
from tfaccel.training.checkpoint.store import Store

HOSTS = ("tfaccel-a", "tfaccel-b")
LINKS = ("tfaccel-va", "tfaccel-vb")
ADDRESSES = ("10.77.0.1", "10.77.0.2")
# A second network of each host, which looks like one, but does not lead to the other host.
OTHER_LINKS = ("tfaccel-wa", "tfaccel-wb")
OTHER_ADDRESSES = ("10.78.0.1", "10.78.0.2")

TRAIN = [
    "train",
    "--config=configs/digits.py",
    "--config.runtime.gpu_ids=",
    "--config.runtime.deterministic=True",
    "--config.runtime.xla=False",
    "--config.runtime.peer_timeout_s=4",
    "--config.data.loader=tf_data",
    "--config.train.epochs=6",
    "--config.checkpoint.every_steps=4",
]


def ip(*arguments, check=True):
    subprocess.run(["ip", *arguments], check=check, capture_output=True)


@pytest.fixture
def hosts():
    if os.geteuid() or not shutil.which("ip"):
        pytest.skip("needs root and `ip` to make network namespaces")
    try:
        for host in HOSTS:
            ip("netns", "add", host)
        ip("link", "add", LINKS[0], "type", "veth", "peer", "name", LINKS[1])
        for host, link, address in zip(HOSTS, LINKS, ADDRESSES, strict=True):
            ip("link", "set", link, "netns", host)
            ip("-n", host, "addr", "add", f"{address}/24", "dev", link)
            ip("-n", host, "link", "set", link, "up")
            ip("-n", host, "link", "set", "lo", "up")
    except subprocess.CalledProcessError as error:
        pytest.skip(f"cannot make network namespaces here: {error.stderr.decode().strip()}")
    else:
        yield
    finally:
        for host in HOSTS:
            ip("netns", "del", host, check=False)


@pytest.fixture
def two_networks(hosts):
    for host, link, address in zip(HOSTS, OTHER_LINKS, OTHER_ADDRESSES, strict=True):
        ip("-n", host, "link", "add", link, "type", "veth", "peer", "name", f"{link}-end")
        ip("-n", host, "addr", "add", f"{address}/24", "dev", link)
        for each in (link, f"{link}-end"):
            ip("-n", host, "link", "set", each, "up")


@pytest.fixture
def launch(hosts, tmp_path):
    started = []

    def launch(num_ranks, *flags, node_0=ADDRESSES[0]):
        """One launcher on each host; their output in tmp_path/host-0 and host-1."""
        for node, host in enumerate(HOSTS):
            with (tmp_path / f"host-{node}").open("w") as output:
                command = [
                    *("ip", "netns", "exec", host, sys.executable, "-m", "tfaccel", "launch"),
                    *("--nnodes=2", f"--node-rank={node}", f"--nproc-per-node={num_ranks}"),
                    *(f"--master-addr={node_0}", "--grace=3", *flags),
                    *(*TRAIN, f"--workdir={tmp_path / 'run'}"),
                ]
                started.append(subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT))
        return started

    yield launch
    for each in started:
        each.kill()
        each.wait()


def said(tmp_path):
    return [(tmp_path / f"host-{node}").read_text() for node in range(2)]


def last_step(workdir):
    named = (parse(each) for each in workdir.glob("checkpoints/step-*"))
    return max((each.step for each in named if each and not each.unfinished), default=0)


def wait_until(condition, tmp_path):
    ends = time.monotonic() + 100
    while not condition():
        assert time.monotonic() < ends, said(tmp_path)
        time.sleep(0.02)


def newest(workdir):
    store = Store(workdir / "checkpoints", keep_last=1, keep_best=0, largest_is_best=True)
    return store.newest()


def uninterrupted(num_ranks, workdir):
    """The newest checkpoint of as many ranks on this machine, which nobody disturbs."""
    launcher = [sys.executable, "-m", "tfaccel", "launch", f"--nproc-per-node={num_ranks}"]
    command = [*launcher, *TRAIN, f"--workdir={workdir}"]
    subprocess.run(command, check=True, capture_output=True)
    return newest(workdir)


@pytest.mark.slow
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_link_that_is_cut_and_comes_back_changes_nothing(launch, num_ranks, tmp_path):
    jobs = launch(num_ranks, "--node-timeout=12", "--max-restarts=2")
    wait_until(lambda: last_step(tmp_path / "run") >= 28, tmp_path)
    ip("-n", HOSTS[0], "link", "set", LINKS[0], "down")
    cut = time.monotonic()
    lost = f"node 0's launcher at {ADDRESSES[0]}:29400 is lost"
    wait_until(lambda: lost in said(tmp_path)[1], tmp_path)
    wait_until(lambda: "restart 1 of 2 from the last checkpoint" in said(tmp_path)[0], tmp_path)
    assert time.monotonic() - cut < 12 + 10
    # Those that waited for a rank of the other host have named it, and are no more.
    first, second = said(tmp_path)
    lost_rank = "runs, but does not answer: rank"  # where a rank's end was heard of before
    assert f"node 1 ({ADDRESSES[1]}) is lost: it was silent for 1" in first or lost_rank in first
    for text, other in ((first, ADDRESSES[1]), (second, ADDRESSES[0])):
        assert re.search(rf"worker \d \({other}:\d+\) is lost: no answer for", text)
    ip("-n", HOSTS[0], "link", "set", LINKS[0], "up")
    for each in jobs:
        assert each.wait(timeout=100) == 0, said(tmp_path)
    assert "resumed from step" in said(tmp_path)[0]
    found = newest(tmp_path / "run")
    expected = uninterrupted(2 * num_ranks, tmp_path / "uninterrupted")
    assert found.step == expected.step == 6 * 23
    for name, array in expected.arrays.items():
        np.testing.assert_array_equal(found.arrays[name], array, err_msg=name)


@pytest.mark.slow
def test_p6_without_restarts_a_cut_link_ends_every_process(launch, tmp_path):
    jobs = launch(1, "--node-timeout=5")
    wait_until(lambda: last_step(tmp_path / "run") >= 8, tmp_path)
    ip("-n", HOSTS[0], "link", "set", LINKS[0], "down")
    cut = time.monotonic()
    assert [each.wait(timeout=60) for each in jobs] == [1, 1], said(tmp_path)
    assert time.monotonic() - cut < 5 + 3 + 8
    first, second = said(tmp_path)
    assert f"node 1 ({ADDRESSES[1]}) is lost: it was silent for" in first or "worker 1" in first
    assert f"node 0's launcher at {ADDRESSES[0]}:29400 is lost" in second


# ----- Two networks, of which one leads to the other host.


@pytest.mark.slow
def test_workers_use_the_network_that_leads_to_node_0(two_networks, launch, tmp_path):
    jobs = launch(1, "--start-timeout=100")
    assert [each.wait(timeout=100) for each in jobs] == [0, 0], said(tmp_path)
    first, second = said(tmp_path)
    workers = r"waiting for 2 workers: 10\.77\.0\.1:\d+, 10\.77\.0\.2:\d+"
    assert re.search(workers, first)
    assert not any(each in first + second for each in OTHER_ADDRESSES)
    assert last_step(tmp_path / "run") == 6 * 23


def test_a_network_that_does_not_lead_to_node_0_ends_both_launchers(two_networks, launch, tmp_path):
    jobs = launch(1, "--start-timeout=6", "--node-timeout=2", node_0=OTHER_ADDRESSES[0])
    assert [each.wait(timeout=60) for each in jobs] == [1, 1], said(tmp_path)
    first, second = said(tmp_path)
    assert "node 1 did not join within 6 s" in first
    assert f"node 0's launcher at {OTHER_ADDRESSES[0]}:29400 is lost: no answer for" in second


@pytest.mark.slow
def test_a_worker_with_an_address_of_the_wrong_network_is_named(two_networks, tmp_path):
    workers = f"{ADDRESSES[0]}:20000,{OTHER_ADDRESSES[1]}:20000"
    jobs = []
    for node, host in enumerate(HOSTS):
        command = [*("ip", "netns", "exec", host, sys.executable, "-m", "tfaccel"), *TRAIN]
        command += [f"--workers={workers}", f"--worker-index={node}", f"--workdir={tmp_path}"]
        with (tmp_path / f"host-{node}").open("w") as output:
            jobs.append(subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT))
    try:
        assert [each.wait(timeout=100) for each in jobs] == [1, 1], said(tmp_path)
    finally:
        for each in jobs:
            each.kill()
            each.wait()
    first, second = said(tmp_path)
    assert f"worker 1 has started, but cannot be reached at {OTHER_ADDRESSES[1]}:20000" in first
    assert f"worker 0 ({ADDRESSES[0]}:20000) is lost" in second
    assert "Traceback" not in first + second


def doctor(node, addresses, **environment):
    """What doctor says on a host about the network of a job with these workers."""
    workers = [f"{each}:20000" for each in addresses]
    job = {"cluster": {"worker": workers}, "task": {"type": "worker", "index": node}}
    command = [sys.executable, "-m", "tfaccel", "doctor", "--quick", "--json"]
    done = subprocess.run(
        ["ip", "netns", "exec", HOSTS[node], *command],
        env=os.environ | {"TF_CONFIG": json.dumps(job)} | environment,
        capture_output=True,
        text=True,
    )
    return {each["name"]: each for each in json.loads(done.stdout)["checks"]}


def test_doctor_tells_by_which_interface_a_worker_is_reached(two_networks):
    found = doctor(1, ADDRESSES)["network"]
    assert found["status"] == "ok", found
    assert f"worker 1 of 2, at {ADDRESSES[1]} on {LINKS[1]}" in found["found"]
    found = doctor(1, (ADDRESSES[0], OTHER_ADDRESSES[1]))["network"]
    assert found["status"] == "warning", found
    assert f"packets to {ADDRESSES[0]} leave by {LINKS[1]} ({ADDRESSES[1]})" in found["found"]
    assert f"{OTHER_ADDRESSES[1]}, is on {OTHER_LINKS[1]}" in found["found"]
    found = doctor(1, ("10.79.0.1", ADDRESSES[1]))["network"]
    assert found["status"] == "error", found
    assert "cannot send to 10.79.0.1: Network is unreachable" in found["found"]


def test_doctor_knows_an_interface_that_is_down(two_networks):
    ip("-n", HOSTS[1], "link", "set", LINKS[1], "down")
    found = doctor(1, ADDRESSES, NCCL_SOCKET_IFNAME=f"={LINKS[1]}")
    assert f"at {ADDRESSES[1]}, on {LINKS[1]}, which is down" in found["network"]["found"]
    assert f"={LINKS[1]} matches {LINKS[1]}, which is down" in found["NCCL interface"]["found"]
