"""Children that abort, hang or fail are findings; and the real trial, in this process."""

import itertools
import json
import os
import signal
import sys
import time
import types

import pynvml
import pytest
import tensorflow as tf

from tfaccel.diagnostics.doctor.checks import gpus
from tfaccel.diagnostics.doctor.facts import child, disk, nvml, trial
from tfaccel.diagnostics.doctor.facts import gpus as gpu_facts
from tfaccel.diagnostics.doctor.facts.child import Answers

LIMIT_S = 300  # no child here needs a second, but the machine may be slow

STAGES = """
import os, sys, time
def stages(arguments):
    def hang():
        print("about to hang", flush=True)
        open(arguments["hangs"], "w").close()
        time.sleep(1000)
    def talk():
        print("all is well", file=sys.stderr, flush=True)
    def fail():
        raise ValueError("of no use")
    def chat():
        print("W0000 00:00:1.2 33 port.cc:1] of no interest", file=sys.stderr, flush=True)
        os.abort()
    def abort():
        print("terminate called", file=sys.stderr, flush=True)
        os.abort()
    made = dict(talk=talk, fail=fail, hang=hang, abort=abort, chat=chat)
    made["fine"] = lambda: {"number": arguments["number"]}
    return {name: made[name] for name in arguments["stages"]}
"""


@pytest.fixture
def begin(tmp_path):
    (tmp_path / "planted_stages.py").write_text(STAGES)

    def begin(*stages):
        return child.start(
            "planted_stages",
            {"stages": stages, "number": 3, "hangs": str(tmp_path / "hangs")},
            seconds=LIMIT_S,
            path=[str(tmp_path), *sys.path],
        )

    return begin


@pytest.fixture
def ask(begin):
    return lambda *stages: begin(*stages).answers()


def test_an_exception_is_told_and_the_next_stage_begins(ask):
    told = ask("fail", "fine")
    assert told.facts == {"fine": {"number": 3}}
    assert told.failed == {"fail": "ValueError: of no use"}


def test_an_abort_is_told_with_its_last_words_and_what_came_before(ask):
    told = ask("fine", "abort", "fail")
    assert told.facts == {"fine": {"number": 3}}
    assert told.failed == {"abort": "was ended by SIGABRT (terminate called)"}


def test_what_was_said_before_and_a_librarys_chatter_are_no_last_words(ask):
    assert ask("talk", "chat").failed == {"chat": "was ended by SIGABRT"}


def test_a_child_that_hangs_is_ended_in_time(begin, tmp_path, monkeypatch):
    started = begin("fine", "hang")
    while not (tmp_path / "hangs").exists():
        assert started.child.exit_code() is None
        time.sleep(0.01)
    later = time.monotonic() + LIMIT_S
    monkeypatch.setattr(child, "time", types.SimpleNamespace(monotonic=lambda: later))
    told = started.answers()
    assert started.child.exit_code() == -signal.SIGKILL
    assert told.facts == {"fine": {"number": 3}}
    assert told.failed == {"hang": "gave no answer within 300 s (about to hang)"}


def test_a_child_that_never_begins_is_told():
    told = child.start("no_such_module", {}, seconds=LIMIT_S, path=sys.path).answers()
    assert "no_such_module" in told.failed["start"]


WRONG_PLUGIN = {
    "tensorflow/__init__.py": "__version__ = '2.21.0'\n",
    "keras.py": "__version__ = '3.15.1'\nclass backend: backend = staticmethod(lambda: 'x')\n",
    "nvidia/__init__.py": "",
    "nvidia/dali/__init__.py": "__version__ = '2.4.0'\n",
    "nvidia/dali/plugin/__init__.py": "",
    "nvidia/dali/plugin/tf.py": "import os\nos.abort()  # as a binary of another ABI may\n",
}


def test_a_wrong_plugin_in_a_planted_site_is_found_by_trying_it(tmp_path):
    for name, text in WRONG_PLUGIN.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    stages = ["TensorFlow", "DALI", "DALI plugin"]
    path = [str(tmp_path), *sys.path]
    told = child.start(trial.__name__, {"only": stages}, seconds=LIMIT_S, path=path).answers()
    assert told.facts["TensorFlow"]["version"] == "2.21.0"
    assert "DALI" in told.facts
    assert "SIGABRT" in told.failed["DALI plugin"]


def test_the_real_trial_goes_through_every_stage():
    # In this process, which has TensorFlow already. What only a GPU has is skipped by itself.
    told = {name: stage() for name, stage in trial.stages({}).items()}
    assert told["TensorFlow"]["version"] == tf.__version__
    assert told["Keras"]["backend"] == "tensorflow"
    assert told["devices"] == {"gpus": 0}
    assert told["nvJPEG"] == {}


def test_the_driver_is_asked_in_a_child():
    told = child.start(nvml.__name__, {}, seconds=LIMIT_S, path=sys.path).answers()
    found = gpu_facts.from_answers(told)
    assert found.problem is None
    assert (found.driver is None) == (not found.gpus)


class Nvml:
    """Two GPUs whose driver tells the least: name, memory and what they can do."""

    def __getattr__(self, name):
        known = {
            "nvmlDeviceGetCount": lambda: 2,
            "nvmlDeviceGetHandleByIndex": lambda index: index,
            "nvmlDeviceGetMemoryInfo": lambda handle: types.SimpleNamespace(total=100, used=9),
            "nvmlDeviceGetUUID": lambda handle: f"GPU-{handle}",
            "nvmlDeviceGetName": lambda handle: "NVIDIA L4",
            "nvmlDeviceGetCudaComputeCapability": lambda handle: [8, 9],
            "nvmlDeviceGetTopologyCommonAncestor": lambda one, other: 30,
        }
        if name in known or not name.startswith("nvmlDevice"):
            return known.get(name) or getattr(pynvml, name)

        def refuse(*arguments):
            raise pynvml.NVMLError_NotSupported

        return refuse


def test_what_a_driver_does_not_tell_is_none(monkeypatch):
    monkeypatch.setattr(nvml, "pynvml", Nvml())
    facts = json.loads(json.dumps(nvml._gpus()))  # as it comes from a child
    found = gpu_facts.from_answers(
        Answers({"driver": {"version": "5", "cuda": [12, 4]}, "GPUs": facts})
    )
    assert found.links == {(0, 1): "PCIe, through the CPU"}
    (one, other) = found.gpus
    assert (one.name, one.capability, one.ecc_errors, one.nvlinks) == ("NVIDIA L4", (8, 9), None, 0)
    assert not other.mig
    assert {each.status for each in gpus.check(found, None, own_pid=1, engines=None)} <= {
        "ok",
        "warning",
    }


def test_real_files_are_read_and_counted(tmp_path):
    for number in range(20):
        (tmp_path / f"{number}.bin").write_bytes(os.urandom(5000))
    (tmp_path / "gone").symlink_to(tmp_path / "nowhere")
    reading = disk.read(tmp_path, seconds=LIMIT_S)
    assert (reading.num_files, reading.num_bytes) == (20, 100_000)
    assert 0 < reading.seconds < LIMIT_S


def test_no_file_is_begun_after_the_time_is_over(tmp_path, monkeypatch):
    for number in range(100):
        (tmp_path / f"{number}.bin").write_bytes(b"12")
    files, now = disk._listed(tmp_path, LIMIT_S), itertools.count()
    monkeypatch.setattr(disk, "_listed", lambda *_: files)
    # A second passes whenever the clock is read, as each thread does before and after each file.
    clock = types.SimpleNamespace(perf_counter=lambda: next(now))
    monkeypatch.setattr(disk, "time", clock)
    reading = disk.read(tmp_path, seconds=20)
    assert 1 <= reading.num_files <= 20 < reading.seconds


def test_reading_ends_at_its_limit(tmp_path):
    most = 2 + disk.NUM_THREADS  # MiB: each thread may be within a piece
    for number in range(2 * most):
        (tmp_path / f"{number}.bin").write_bytes(bytes(1 << 20))
    reading = disk.read(tmp_path, seconds=LIMIT_S, max_bytes=2 << 20)
    assert 2 << 20 <= reading.num_bytes <= most << 20
