"""What each of several processes on one host takes of its GPUs and cores."""

import os

import pytest

from tfaccel import UserError
from tfaccel.runtime.cluster import Cluster
from tfaccel.runtime.cluster.share import num_cores, share_gpus

SLURM = {"SLURM_STEP_NUM_TASKS": "4", "SLURM_GPUS_ON_NODE": "4"}
MPI = {"OMPI_COMM_WORLD_SIZE": "2"}
LAUNCH = {"TFACCEL_HEARTBEAT": "/tmp/0"}
FIRST_TWO = {"CUDA_VISIBLE_DEVICES": "0,1"}


def place(local_index, num_local, num_workers=4):
    addresses = tuple(f"10.0.0.1:{port}" for port in range(num_workers))
    return Cluster(addresses, local_index, False, local_index, num_local)


# environment, (local_index, num_local), GPUs this process sees -> those it takes, words of why
SHARES = [
    # Nobody beside it.
    ({}, (0, 1), 4, [0, 1, 2, 3], "all 4 GPU(s), the default"),
    (SLURM, (0, 1), 2, [0, 1], "all 2 GPU(s), the default"),
    # All see all: equal shares.
    ({}, (0, 4), 4, [0], "GPU 0 of 4: a share for each of 4 processes on this host"),
    ({}, (3, 4), 4, [3], "GPU 3 of 4"),
    ({}, (1, 2), 8, [4, 5, 6, 7], "GPU 4, 5, 6, 7 of 8"),
    (SLURM, (1, 2), 4, [2, 3], "GPU 2, 3 of 4"),
    (SLURM | {"CUDA_VISIBLE_DEVICES": "0,1,2,3"}, (1, 4), 4, [1], "GPU 1 of 4"),
    # One environment for all on the host, which the user narrowed.
    (LAUNCH | FIRST_TWO, (1, 2), 2, [1], "GPU 1 of 2"),
    (MPI | FIRST_TWO, (1, 2), 2, [1], "GPU 1 of 2"),
    # Each has been given its own.
    (SLURM, (3, 4), 1, [0], "all 1 of the node's 4 GPUs that Slurm gives to this task"),
    (SLURM, (1, 2), 2, [0, 1], "all 2 of the node's 4 GPUs"),
    (FIRST_TWO, (1, 2), 2, [0, 1], "all 2 GPU(s) of CUDA_VISIBLE_DEVICES=0,1"),
    ({"CUDA_VISIBLE_DEVICES": "3"}, (1, 2), 1, [0], "of CUDA_VISIBLE_DEVICES=3"),
    (MPI | {"CUDA_VISIBLE_DEVICES": "3"}, (1, 2), 1, [0], "of CUDA_VISIBLE_DEVICES=3"),
]


@pytest.mark.parametrize(("environment", "where", "num_visible", "wanted", "words"), SHARES)
def test_gpus_of_one_host(environment, where, num_visible, wanted, words):
    taken, reason = share_gpus(environment, place(*where), num_visible)
    assert list(taken) == wanted
    assert words in reason


@pytest.mark.parametrize(
    ("environment", "where", "num_visible"),
    [({}, (0, 3), 4), ({}, (0, 2), 1), (LAUNCH | {"CUDA_VISIBLE_DEVICES": "0"}, (0, 2), 1)],
)
def test_what_cannot_be_shared_equally(environment, where, num_visible):
    words = rf"{num_visible} GPU\(s\) cannot be shared equally by {where[1]} processes"
    with pytest.raises(UserError, match=words):
        share_gpus(environment, place(*where), num_visible)


# environment, processes on this host, cores this process may use, of the machine -> cores it takes
CORES = [
    ({}, 1, 8, 8, 8),
    ({}, 2, 8, 8, 4),
    ({}, 16, 8, 8, 1),
    # A container has some of the machine's: they share them.
    ({}, 2, 8, 64, 4),
    # Slurm and mpirun have bound each process to its own, or not.
    ({"SLURM_CPUS_ON_NODE": "16"}, 2, 8, 64, 8),
    ({"SLURM_CPUS_ON_NODE": "16"}, 2, 16, 64, 8),
    ({"OMPI_MCA_orte_bound_at_launch": "1"}, 2, 1, 8, 1),
    ({"OMPI_MCA_orte_bound_at_launch": "1"}, 4, 4, 8, 1),
]


@pytest.mark.parametrize(("environment", "num_local", "allowed", "machine", "wanted"), CORES)
def test_cores_of_one_host(monkeypatch, environment, num_local, allowed, machine, wanted):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(allowed)))
    monkeypatch.setattr(os, "cpu_count", lambda: machine)
    assert num_cores(environment, place(0, num_local)) == wanted
