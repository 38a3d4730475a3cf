"""`tfaccel train --dry-run`: who does what, two real steps, and nothing left behind."""

import pathlib
import socket
import subprocess
import sys

import pynvml
import pytest

DIGITS = pathlib.Path(__file__).parents[2] / "configs" / "digits.py"


@pytest.fixture
def start(tmp_path):
    """Starts a worker in tmp_path; ends those that are left."""
    workers = []

    def start(*arguments):
        flags = ["--dry-run", "--workdir=run", "--config.runtime.xla=False", *arguments]
        worker = subprocess.Popen(
            [sys.executable, "-m", "tfaccel", "train", f"--config={DIGITS}:smoke", *flags],
            cwd=tmp_path,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        workers.append(worker)
        return worker

    yield start
    for each in workers:
        each.kill()
        each.communicate()


def lines(worker):
    """What a worker prints, by its first word."""
    out, err = worker.communicate(timeout=300)
    assert worker.returncode == 0, err[-5000:]
    return {line.split()[0]: " ".join(line.split()[1:]) for line in out.splitlines()}


def start_two(start):
    """Starts two workers; returns their addresses and them."""
    with socket.socket() as one, socket.socket() as other:
        for each in (one, other):
            each.bind(("127.0.0.1", 0))
        addresses = [f"127.0.0.1:{each.getsockname()[1]}" for each in (one, other)]
    named = f"--workers={','.join(addresses)}"
    return addresses, [start(named, f"--worker-index={index}") for index in range(2)]


@pytest.mark.slow  # two trainings
def test_two_workers_that_flags_name(start, tmp_path):
    addresses, workers = start_two(start)
    first, second = map(lines, workers)
    assert first["worker"] == "0 of 2, counted from 0: the chief, which writes the workdir"
    assert second["worker"] == "1 of 2, counted from 0"
    for index, found in enumerate((first, second)):
        assert found["source"] == "the flags or arguments"
        assert found["address"] == addresses[index]
        assert found["devices"] == "/cpu:0"
        assert found["replicas"] == f"{index} of 2, counted from 0 over all workers"
        assert found["batch"] == "32 rows on each replica, 64 in all; 23 steps an epoch"
        assert found["workdir"] == str(tmp_path / "run")
        assert found["trained"].startswith("2 step(s), loss ")
    assert first["trained"].split(",")[1] == second["trained"].split(",")[1]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.multi_gpu
def test_two_workers_share_the_gpus_of_their_host(start, monkeypatch):
    # Where it is set, it is taken for each process's own.
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    pynvml.nvmlInit()
    num_gpus = pynvml.nvmlDeviceGetCount()
    gpus = [f"GPU {index}" for index in range(num_gpus)]
    first, second = map(lines, start_two(start)[1])
    assert f"{first['devices']}, {second['devices']}" == ", ".join(gpus)
    assert f"of {num_gpus}," in second["replicas"]


@pytest.mark.slow
def test_one_process_on_its_own_needs_no_address(start, tmp_path):
    found = lines(start())
    assert found["worker"] == "0 of 1, counted from 0: the chief, which writes the workdir"
    assert "name other workers" in found["source"]
    assert found["address"] == "none needed"
    assert list(tmp_path.iterdir()) == []
