"""Who is believed, and what happens where two that speak do not agree."""

import json
import subprocess
import sys

import pytest

from tfaccel import UserError
from tfaccel.runtime.cluster import check_one_process, find
from tfaccel.runtime.cluster.ray import undo_legacy_keras

WORKERS = ["10.0.0.1:2222", "10.0.0.2:2222"]


def tf_config(index, workers=WORKERS):
    task = {"type": "worker", "index": index}
    return {"TF_CONFIG": json.dumps({"cluster": {"worker": workers}, "task": task})}


def slurm(rank, num_tasks=2):
    return {
        "SLURM_JOB_ID": "12",
        "SLURM_STEP_ID": "0",
        "SLURM_STEP_NUM_TASKS": str(num_tasks),
        "SLURM_STEP_NODELIST": f"n[1-{num_tasks}]",
        "SLURM_STEP_TASKS_PER_NODE": f"1(x{num_tasks})",
        "SLURM_PROCID": str(rank),
        "SLURM_LOCALID": "0",
        "SLURM_NODEID": str(rank),
    }


def mpi(rank, size=2):
    return {
        "OMPI_COMM_WORLD_SIZE": str(size),
        "OMPI_COMM_WORLD_RANK": str(rank),
        "OMPI_COMM_WORLD_LOCAL_SIZE": str(size),
        "OMPI_COMM_WORLD_LOCAL_RANK": str(rank),
        "PMIX_NAMESPACE": "1",
    }


@pytest.mark.parametrize(
    ("environment", "explicit", "source"),
    [
        (tf_config(1) | slurm(1) | mpi(1), (WORKERS, 1), "the flags or arguments"),
        (tf_config(1) | slurm(1) | mpi(1), (None, None), "TF_CONFIG"),
        (slurm(1) | mpi(1), (None, None), "Slurm step 12.0"),
        (mpi(1), (None, None), "Open MPI"),
        # Which of the named workers this is, another may say.
        (slurm(1), (WORKERS, None), "the flags or arguments"),
    ],
)
def test_the_first_that_speaks_is_believed(environment, explicit, source):
    found = find(environment, workers=explicit[0], worker_index=explicit[1])
    assert (found.source, found.num_workers, found.worker_index) == (source, 2, 1)


def test_alone_by_default():
    assert find({}).num_workers == 1
    assert find({}, workers=WORKERS[:1], worker_index=0).num_workers == 1


@pytest.mark.parametrize(
    ("environment", "explicit", "both"),
    [
        (
            tf_config(0) | slurm(1),
            (None, None),
            ("TF_CONFIG says that this is worker 0 of 2", "SLURM_PROCID=1"),
        ),
        (
            tf_config(0) | slurm(0, num_tasks=3),
            (None, None),
            ("worker 0 of 2", "worker 0 of 3 (SLURM_STEP_NUM_TASKS=3"),
        ),
        (
            tf_config(0, WORKERS[:1]) | slurm(1),
            (None, None),
            ("TF_CONFIG says that this is worker 0 of 1", "Slurm step 12.0 says that this is"),
        ),
        (slurm(0) | mpi(1), (None, None), ("SLURM_PROCID=0", "OMPI_COMM_WORLD_RANK=1")),
        (tf_config(0), (WORKERS, 1), ("worker_index=1", "'index': 0")),
        (mpi(0, size=3), (WORKERS, None), ("workers=10.0.0.1:2222", "OMPI_COMM_WORLD_SIZE=3")),
    ],
)
def test_a_contradiction_shows_both_values_and_where_they_are_from(environment, explicit, both):
    with pytest.raises(UserError, match="unset the variables of the wrong one") as error:
        find(environment, workers=explicit[0], worker_index=explicit[1])
    for words in both:
        assert words in str(error.value)


@pytest.mark.parametrize(
    ("workers", "worker_index", "words"),
    [
        (WORKERS, None, "worker_index=None with 2 workers; expected .*, 0 to 1: give --worker-ind"),
        (WORKERS[:1], None, "worker_index=None with 1 worker; expected .*, 0 to 0: give"),
        (WORKERS, 2, "worker_index=2 with 2 workers"),
        (WORKERS, -1, "worker_index=-1 with 2 workers"),
        (None, 1, "worker_index=1 without workers"),
        ([], 0, "workers is empty; give host:port of each"),
        (["10.0.0.1"], 0, "workers has the address '10.0.0.1'; expected host:port"),
        ([*WORKERS, WORKERS[0]], 0, "workers has an address twice"),
    ],
)
def test_what_the_caller_may_not_say(workers, worker_index, words):
    with pytest.raises(UserError, match=words):
        find({}, workers=workers, worker_index=worker_index)


def test_what_is_of_one_process():
    check_one_process(find({}), "lint")
    words = r"lint needs one process with all its GPUs, but there are 2 workers \(TF_CONFIG\)"
    with pytest.raises(UserError, match=words):
        check_one_process(find(tf_config(0)), "lint")


def test_it_needs_no_tensorflow():
    program = (
        "import sys, tfaccel.runtime.cluster; assert not {'tensorflow', 'keras'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


def test_what_rays_trainer_sets_for_the_old_keras_is_undone(monkeypatch, caplog):
    environment = {"TF_USE_LEGACY_KERAS": "1", "HOME": "/"}
    undo_legacy_keras(environment)
    assert environment == {"HOME": "/"}
    assert "unset TF_USE_LEGACY_KERAS, which Ray" in caplog.text
    undo_legacy_keras(environment)
    monkeypatch.setitem(sys.modules, "tf_keras", object())
    with pytest.raises(UserError, match="unset it before TensorFlow is imported"):
        undo_legacy_keras({"TF_USE_LEGACY_KERAS": "1"})
