"""`tfaccel train --dry-run`: who does what, two real steps, and nothing left behind."""

import dataclasses
import pathlib
import re
import socket
import subprocess
import sys

import pynvml
import pytest
from conftest import in_workers

from tfaccel.cli import flags
from tfaccel.config import parse
from tfaccel.experiment.dry_run import dry_run
from tfaccel.runtime import devices as runtime
from tfaccel.runtime.cluster import Cluster
from tfaccel.runtime.devices import Device

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


def by_first_word(text):
    return {line.split()[0]: " ".join(line.split()[1:]) for line in text.splitlines()}


def lines(worker):
    """What a worker prints, by its first word."""
    out, err = worker.communicate(timeout=300)
    assert worker.returncode == 0, err[-5000:]
    return by_first_word(out)


def start_two(start):
    """Starts two workers; returns their addresses and them."""
    with socket.socket() as one, socket.socket() as other:
        for each in (one, other):
            each.bind(("127.0.0.1", 0))
        addresses = [f"127.0.0.1:{each.getsockname()[1]}" for each in (one, other)]
    named = f"--workers={','.join(addresses)}"
    return addresses, [start(named, f"--worker-index={index}") for index in range(2)]


def numbers_of(pattern, text):
    """The numbers in the places of a pattern's N."""
    found = re.fullmatch(re.escape(pattern).replace("N", r"([\d.,]+)"), text)
    assert found, text
    return [float(each.replace(",", "")) for each in found.groups()]


def check_scaling(found, *, num_replicas):
    """The numbers on the all-reduce of digits.py's model follow from each other."""
    megabytes, replicas, ms, gigabytes_per_s = numbers_of(
        "N MB of gradients over N replicas in N ms; bus bandwidth N GB/s", found["all-reduce"]
    )
    step_ms, pass_ms = numbers_of("N ms without loading; minus the all-reduce: N ms", found["step"])
    share, times = numbers_of(
        "expected: N of N times one replica (the all-reduce is not hidden behind the pass)",
        found["scaling"],
    )
    assert replicas == times == num_replicas
    assert megabytes == pytest.approx(93_962 * 4 / 1e6, rel=0.01)  # the model's float32 weights
    factor = 2 * (num_replicas - 1) / num_replicas
    assert gigabytes_per_s == pytest.approx(factor * megabytes / ms, rel=0.02)  # three figures
    assert pass_ms == pytest.approx(step_ms - ms, rel=0.02)
    assert share == pytest.approx(pass_ms / step_ms, abs=0.01)


@pytest.fixture
def on_two_devices(monkeypatch):
    """A process has two replicas, on two logical CPU devices."""
    configure = runtime.configure
    devices = tuple(Device(f"/cpu:{index}", None) for index in range(2))
    two = lambda *given: dataclasses.replace(configure(*given), devices=devices)  # noqa: E731
    monkeypatch.setattr(runtime, "configure", two)


@pytest.mark.slow
def test_two_replicas_of_a_process_say_which_scaling_to_expect(on_two_devices, tmp_path):
    config = flags.load(f"{DIGITS}:smoke")
    config.runtime.xla = False
    found = by_first_word(dry_run(parse(config), workdir=tmp_path / "run", cluster=Cluster()))
    assert found["devices"] == "/cpu:0, /cpu:1"
    assert found["trained"].startswith("2 step(s), loss ")
    check_scaling(found, num_replicas=2)


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
    check_scaling(first, num_replicas=2)
    assert not {"all-reduce", "step", "scaling"} & second.keys()  # the chief has told it
    assert list(tmp_path.iterdir()) == []


DIES = """
import os, pathlib
from tfaccel.cli import flags
from tfaccel.config import parse
from tfaccel.experiment import dry_run
from tfaccel.runtime.cluster import find
from tfaccel.runtime.watchdog import WorkerLostError

cluster, config = find(os.environ), flags.load("{file}:smoke")
config.runtime.xla = False
dry_run._rehearse = lambda *_: ""
if cluster.worker_index == 1:
    def die(gradient_sum, num_times):
        print("dies", flush=True)
        os._exit(0)
    dry_run.GradientSum.run = die
try:
    dry_run.dry_run(parse(config), workdir=pathlib.Path("run"), cluster=cluster)
except WorkerLostError as error:
    print(error, flush=True)
os._exit(0)  # a worker alone cannot end its part in the cluster
"""


@pytest.mark.slow  # the watchdog waits for some seconds
def test_a_worker_that_dies_in_the_measure_ends_the_other_as_in_training():
    said, died = in_workers(DIES.format(file=f"{DIGITS}"), 2)
    assert died == "dies"
    assert re.match(r"worker 1 \(127.0.0.1:\d+\) is lost: ", said), said


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
    check_scaling(first, num_replicas=num_gpus)


@pytest.mark.slow
def test_one_process_on_its_own_needs_no_address(start, tmp_path):
    found = lines(start())
    assert found["worker"] == "0 of 1, counted from 0: the chief, which writes the workdir"
    assert "name other workers" in found["source"]
    assert found["address"] == "none needed"
    assert re.match(r"about \d+ MiB on each replica, without XLA: parameters 0, ", found["memory"])
    assert not {"all-reduce", "step", "scaling"} & found.keys()
    assert list(tmp_path.iterdir()) == []
