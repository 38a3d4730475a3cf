"""The faults of test_launched_training.py once more: a process for each GPU, summed by NCCL."""

import re

import pytest
import test_launched_training as on_cpu
from test_launched_training import check_weights, launched

pytestmark = pytest.mark.multi_gpu
weights_alone = on_cpu.weights_alone


@pytest.fixture
def on_gpus(monkeypatch):
    """Lets `launched` train on all GPUs, each process on its share."""
    settings = "gpu_ids=None, xla=True, tf32=False"
    program = on_cpu.PROGRAM.replace("gpu_ids=(), xla=False", settings)
    assert settings in program
    monkeypatch.setattr(on_cpu, "PROGRAM", program)


@pytest.mark.parametrize("rank", [0, 1])
def test_p6_a_killed_rank_ends_the_job_which_goes_on_from_its_checkpoint(
    tmp_path, folder, weights_alone, on_gpus, rank
):
    code, out, err, took_s = launched(tmp_path, folder, "SIGKILL", rank, "--max-restarts=1")
    print(err)
    assert code == 0
    assert f"rank {rank} was ended by SIGKILL, exit code 137" in err
    assert re.search(r"resumed from step [3-9]\b", err)
    print(f"done {took_s:.1f} s after the fault")
    check_weights(out, weights_alone, tolerance=1e-4)  # of a CPU without XLA


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize(
    ("fault", "words", "within_s", "flags"),
    [
        ("SIGSTOP", "runs, but does not answer", 30, []),
        ("sleeps", "made no progress in training for", 20, ["--step-timeout=5"]),
    ],
)
def test_p6_p7_a_fault_ends_all_within_its_limit(
    tmp_path, folder, on_gpus, rank, fault, words, within_s, flags
):
    code, _, err, took_s = launched(tmp_path, folder, fault, rank, *flags)
    print(err)
    assert code == 1
    assert f"[launch] launch: rank {rank} {words}" in err
    print(f"over {took_s:.1f} s after the fault")
    assert took_s < within_s
