"""`tfaccel selftest`: rows, figures and exit code; it passes here, and fails where replicas do.

Its models are compiled anew for each check, so that only one slow test runs them all.
"""

import io
import itertools
import json
import logging
import os
import subprocess
import sys

import keras
import pytest
import tensorflow as tf
from conftest import in_workers, strategy_of
from packaging.version import Version

from tfaccel import UserError
from tfaccel.cli import main
from tfaccel.diagnostics import selftest
from tfaccel.keras_internals.recording import Recording
from tfaccel.keras_internals.replica import Replica

NARROW = ("--gpu_ids=", "--precision=float32", "--xla=off")


@pytest.fixture
def command(monkeypatch, capsys, tmp_path):
    """Runs `tfaccel selftest ...` here on two CPU devices; returns exit code and output."""
    monkeypatch.chdir(tmp_path)
    # Devices of this process are started, and settled, already.
    monkeypatch.setattr(tf.config, "set_logical_device_configuration", lambda *_: None)
    monkeypatch.setattr(selftest, "make_strategy", lambda _, devices: strategy_of(len(devices)))
    monkeypatch.setattr(selftest, "LONG", 4)
    levels = [(each, each.level) for each in (logging.getLogger("tfaccel"), tf.get_logger())]

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["tfaccel", "selftest", *arguments])
        code = main.main(["selftest", *arguments])
        out = capsys.readouterr().out
        assert all(len(line) <= 80 for line in out.splitlines())
        return code, out

    yield run
    keras.config.set_dtype_policy("float32")
    for logger, level in levels:
        logger.setLevel(level)


@pytest.fixture
def only_the_first(monkeypatch):
    """Leaves so many checks of all."""

    def leave(num_checks):
        checks = selftest._checks
        first = lambda trainer: itertools.islice(checks(trainer), num_checks)  # noqa: E731
        monkeypatch.setattr(selftest, "_checks", first)

    return leave


@pytest.mark.parametrize("num_checks", [2, pytest.param(100, marks=pytest.mark.slow)])
def test_replicas_that_train_as_one_device_pass(command, only_the_first, tmp_path, num_checks):
    only_the_first(num_checks)
    code, out = command(*NARROW, "--output=figures.json")
    assert code == 0, out
    assert "FAILED" not in out
    header, *lines, last = out.splitlines()
    assert header.split() == ["check", "precision", "XLA", "figure", "limit"]
    assert last == f"{len(lines)} of {len(lines)} checks passed on 2 replica(s)"

    written = json.loads((tmp_path / "figures.json").read_text())
    assert written["command"] == f"tfaccel selftest {' '.join(NARROW)} --output=figures.json"
    assert written["date"][:2] == "20"
    assert Version(written["environment"]["packages"]["tensorflow"]) == Version(tf.__version__)
    assert written["devices"] == ["/cpu:0", "/cpu:1"]
    assert [row["check"] for row in written["rows"]] == [line[:35].strip() for line in lines]
    for row in written["rows"]:
        assert row["passed"]
        assert row["figure"] <= row["limit"]
        assert (row["precision"], row["xla"]) == ("float32", False)
    # It would notice something: only what must be equal has a limit of 0.
    words = ("clipnorm", "accumulation", "batch norm", "partial", "saved and loaded")
    words += ("GAN", "averaged copy", "masked loss", "attention", "computed again", "sharded")
    for each in words if num_checks == 100 else ("loss over",):
        assert any(each in row["check"] for row in written["rows"])


def test_wrong_gradients_fail(command, only_the_first, monkeypatch, tmp_path):
    only_the_first(2)
    own = Recording.take_gradients
    larger = lambda recording: [1.5 * each for each in own(recording)]  # noqa: E731
    monkeypatch.setattr(Recording, "take_gradients", larger)
    code, out = command(*NARROW, "--output=figures.json")
    assert code == 1
    assert out.count("  FAILED\n") == 1
    assert out.endswith("1 of 2 checks passed on 2 replica(s)\n")
    rows = json.loads((tmp_path / "figures.json").read_text())["rows"]
    # Both replicas took the same wrong step.
    assert [row["passed"] for row in rows] == [False, True]


OF_WORKERS = """
import contextlib, io, itertools, os, pathlib
from tfaccel.config import RuntimeConfig
from tfaccel.diagnostics import selftest
index = json.loads(os.environ["TF_CONFIG"])["task"]["index"]
selftest.LONG, own = 4, selftest._checks

def checks(trainer):
    yield from itertools.islice(own(trainer), 2)
    yield "what the second worker finds", index, 0

selftest._checks = checks
with contextlib.redirect_stdout(io.StringIO()) as out:
    code = selftest.report(
        RuntimeConfig(gpu_ids=()), precisions=("float32",), xla=(False,),
        output=pathlib.Path({folder!r}) / f"{{index}}.json",
    )
print(json.dumps([code, out.getvalue()]))
"""


def test_workers_report_the_largest_figure_of_all(tmp_path):
    (code, out), other = map(json.loads, in_workers(OF_WORKERS.format(folder=str(tmp_path)), 2))
    assert other == [1, ""]
    assert code == 1
    lines = out.splitlines()
    assert [line.endswith("FAILED") for line in lines] == [False] * 3 + [True, False]
    assert lines[-1] == "2 of 3 checks passed on 2 replica(s) of 2 workers"
    (file,) = tmp_path.iterdir()
    written = json.loads(file.read_text())
    assert written["workers"] == 2
    assert [row["figure"] for row in written["rows"]][1:] == [0, 1]


@pytest.mark.multi_gpu
def test_a_process_for_each_of_two_gpus_trains_as_one_device(tmp_path):
    ended = subprocess.run(
        [
            *(sys.executable, "-m", "tfaccel", "launch", "--nproc-per-node=2", "selftest"),
            *("--precision=float32,mixed_float16", "--output=rows.json"),
        ],
        capture_output=True,
        text=True,
        cwd=tmp_path,
    )
    assert ended.returncode == 0, ended.stdout[-3000:] + ended.stderr[-3000:]
    written = json.loads((tmp_path / "rows.json").read_text())
    assert written["workers"] == 2
    assert {row["xla"] for row in written["rows"]} == {True, False}


@pytest.mark.slow
def test_gradients_that_are_not_summed_fail(command, only_the_first, monkeypatch):
    only_the_first(2)
    monkeypatch.setattr(Replica, "all_reduce", lambda replica, value: 2 * value)
    code, out = command(*NARROW)
    assert code == 1
    assert out.endswith("0 of 2 checks passed on 2 replica(s)\n")


def test_nan_is_no_match_and_policies_are_put_back(command, monkeypatch):
    policies = []

    def checks(trainer):
        policies.append(keras.config.dtype_policy().name)
        yield "first", float("nan"), 1.0
        yield "statistics, synchronized batch norm", 1.0, 1.0

    monkeypatch.setattr(selftest, "_checks", checks)
    code, out = command("--gpu_ids=", "--precision=mixed_float16,O0", "--xla=both")
    assert code == 1
    assert policies == ["mixed_float16"] * 2 + ["float32"] * 2
    assert keras.config.dtype_policy().name == "float32"
    assert out.count("FAILED") == 4
    assert out.endswith("4 of 8 checks passed on 2 replica(s)\n")


def test_a_reader_that_has_gone_is_no_failure(command, monkeypatch):
    descriptor = os.memfd_create("pipe")

    class Gone(io.StringIO):
        def fileno(self):
            return descriptor

        def write(self, text):
            raise BrokenPipeError

    monkeypatch.setattr(selftest, "_checks", lambda trainer: [("one", 0.0, 0.0)])
    monkeypatch.setattr(sys, "stdout", Gone())
    assert command(*NARROW)[0] == 0
    os.close(descriptor)


def test_no_check_is_no_success(command):
    with pytest.raises(UserError, match="--precision is empty"):
        command("--gpu_ids=", "--precision=")


def test_a_figure_is_relative():
    assert selftest._relative([1.1, 2.0], [1.0, 2.0]) == pytest.approx(0.1)
    assert selftest._relative([1e-4], [0.0]) == pytest.approx(0.1)  # not by less than 1e-3
