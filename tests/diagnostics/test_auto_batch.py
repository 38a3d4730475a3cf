"""The largest batch that fits: found in few tries, each in a process of its own."""

import dataclasses
import functools
import logging
import re

import keras
import pytest

from tfaccel.common.errors import UserError
from tfaccel.config import Config, DataConfig, ModelConfig, RuntimeConfig, StepConfig
from tfaccel.data.digits import ensure_digits
from tfaccel.diagnostics import auto_batch as room
from tfaccel.diagnostics.auto_batch import (
    auto_batch,
    auto_parts,
    largest_batch,
    train_briefly,
    with_batch,
    with_parts,
)
from tfaccel.process import isolate
from tfaccel.process.isolate import IsolatedError


@pytest.mark.parametrize(
    ("limit", "multiple", "at_most", "start", "expected", "tries"),
    [
        (1000, 8, 10**6, 256, 1000, [256, 512, 1024, 768, 896, 960, 992, 1008, 1000]),
        (1000, 8, 10**6, 2000, 1000, [2000, 1000, 1496, 1248, 1120, 1056, 1024, 1008]),
        (24, 8, 10**6, None, 24, [8, 16, 32, 24]),
        (7, 8, 10**6, 64, 0, [64, 32, 16, 8]),
        (10**6, 8, 1437, 256, 1432, [256, 512, 1024, 1432]),  # no more images
        (10**6, 24, 100, 256, 96, [96]),  # of 8 and of 3 replicas
        (10**6, 8, 1437, 10**9, 1432, [1432]),
        (10**6, 8, 8, 3, 8, [8]),
    ],
)
def test_each_size_is_tried_once(limit, multiple, at_most, start, expected, tries):
    tried = []

    def fits(batch):
        tried.append(batch)
        return batch <= limit

    assert largest_batch(fits, multiple=multiple, at_most=at_most, start=start) == expected
    assert tried == tries


def test_it_is_the_largest_whatever_the_limit():
    for limit in range(120):
        for start in (None, 8, 40, 400):
            found = largest_batch(
                lambda batch, limit=limit: batch <= limit, multiple=8, at_most=104, start=start
            )
            assert found == min(limit, 104) // 8 * 8


CONFIG = Config(
    runtime=RuntimeConfig(gpu_ids=(), xla=False),
    data=DataConfig(image_size=(8, 8), channels=1, global_batch_size=64),
)


def test_the_cpu_is_refused_in_a_sentence(monkeypatch, setup):
    # That a mistake in a child is one here, tests/process/test_isolate.py shows.
    monkeypatch.setattr(isolate, "run_isolated", lambda function, config: function(config))
    with pytest.raises(
        UserError, match="autobatch needs a GPU, because memory does not limit the batch on the CPU"
    ):
        auto_batch(CONFIG)


def in_children(monkeypatch, fail):
    """Lets children answer at once; `fail(rows)` raises for rows of a part that do not train."""

    def run_isolated(function, config):
        if function is room.describe:
            return {"num_replicas": 3, "num_examples": 1437}
        fail(config.data.whole_batch(3) // config.step.accumulation_steps)
        return "peak 7 MiB"

    monkeypatch.setattr(isolate, "run_isolated", run_isolated)


def error(tmp_path, type_name, reason):
    log = tmp_path / "child.log"
    log.touch()
    outcome = {"type_name": type_name, "reason": reason, "traceback": f"{type_name}: {reason}"}
    return IsolatedError("train_briefly", outcome, log=log, tail="")


def test_full_memory_is_an_answer(monkeypatch, tmp_path, caplog):
    def fail(batch):
        if batch > 600:
            raise error(tmp_path, "OutOfMemoryError", "Can't allocate 7 bytes on device 0")

    in_children(monkeypatch, fail)
    with caplog.at_level(logging.INFO, "tfaccel"):
        assert auto_batch(CONFIG) == 600  # of 8 and of 3
    assert "autobatch: global_batch_size=48 fits, peak 7 MiB" in caplog.text
    assert "autobatch: global_batch_size=624 does not fit" in caplog.text
    assert "autobatch: global_batch_size=600 (5% of memory left)" in caplog.text
    assert not (tmp_path / "child.log").exists()


@pytest.mark.parametrize(("limit", "parts"), [(64, 1), (63, 2), (16, 4), (3, 21 + 1)])
def test_the_fewest_parts_in_which_a_batch_fits(monkeypatch, tmp_path, caplog, limit, parts):
    """Powers of two, and at last row by row: of 64 rows on three replicas each has 22 at most."""

    def fail(rows):
        if rows > limit:
            raise error(tmp_path, "OutOfMemoryError", "Can't allocate 7 bytes on device 0")

    in_children(monkeypatch, fail)
    with caplog.at_level(logging.INFO, "tfaccel"):
        assert auto_parts(CONFIG) == parts
    found = f"autobatch: accumulation_steps={parts} for global_batch_size=64 (5% of memory left)"
    assert found in caplog.text


def test_parts_begin_with_those_of_the_config(monkeypatch, tmp_path):
    tried = []
    in_children(monkeypatch, tried.append)
    assert auto_parts(with_parts(CONFIG, 3)) == 3
    assert tried == [21]


def test_a_batch_that_fits_in_no_parts_is_said(monkeypatch, tmp_path):
    def fail(rows):
        raise error(tmp_path, "ResourceExhaustedError", "OOM when allocating tensor with shape[1]")

    in_children(monkeypatch, fail)
    with pytest.raises(UserError, match="global_batch_size=64 does not fit even row by row"):
        auto_parts(CONFIG)


def test_any_other_failure_is_raised(monkeypatch, tmp_path):
    def fail(batch):
        raise error(tmp_path, *failure)

    in_children(monkeypatch, fail)
    failure = ("UserError", "there is no model 'x'")
    with pytest.raises(UserError, match=r"^there is no model 'x'$"):
        auto_batch(CONFIG)
    failure = ("InternalError", "no kernel image is available")
    with pytest.raises(IsolatedError, match="no kernel image"):
        auto_batch(CONFIG)
    failure = ("ResourceExhaustedError", "OOM when allocating tensor with shape[1]")
    with pytest.raises(UserError, match="not even a global batch of 24 fits"):
        auto_batch(CONFIG)


def test_a_batch_per_replica_is_replaced():
    config = dataclasses.replace(
        CONFIG, data=DataConfig(image_size=(8, 8), channels=1, batch_per_replica=7)
    )
    assert with_batch(config, 32).data.whole_batch(4) == 32


def test_several_workers_are_refused(monkeypatch):
    workers = '{"cluster": {"worker": ["a:1", "b:1"]}, "task": {"type": "worker", "index": 0}}'
    monkeypatch.setenv("TF_CONFIG", workers)
    with pytest.raises(UserError, match=r"several workers \(TF_CONFIG\); run it as one process"):
        room.describe(CONFIG)


def test_a_try_is_a_real_training(monkeypatch):
    calls = []
    for name in ("fit", "evaluate"):
        method = getattr(keras.Model, name)

        @functools.wraps(method)
        def recorded(self, *args, _name=name, _method=method, **kwargs):
            result = _method(self, *args, **kwargs)
            calls.append((_name, args[0].global_batch_size, self.optimizer.iterations.numpy()))
            return result

        monkeypatch.setattr(keras.Model, name, recorded)
    assert ensure_digits().is_dir()
    step = StepConfig(accumulation_steps=2)
    assert train_briefly(dataclasses.replace(CONFIG, step=step)) == "peak not known"
    assert calls == [("fit", 64, 3), ("evaluate", 64, 3)]


@pytest.mark.gpu
def test_the_batch_that_is_found_trains_and_one_well_above_does_not(monkeypatch):
    # So that a limit is what it is for a user: the tests' own devices grow.
    monkeypatch.delenv("TF_FORCE_GPU_ALLOW_GROWTH", raising=False)
    config = Config(
        runtime=RuntimeConfig(gpu_ids=(0,), precision="mixed_float16", memory=2000, xla=False),
        data=DataConfig(image_size=(128, 128), channels=1, global_batch_size=64),
        model=ModelConfig(name="cifar_resnet"),
    )
    batch = auto_batch(config)
    assert batch % 8 == 0
    room.run_quietly(train_briefly, with_batch(config, batch))
    above = batch + max(8, batch // 4)
    with pytest.raises(IsolatedError) as caught:
        room.run_quietly(train_briefly, with_batch(config, above))
    assert caught.value.out_of_memory
    # The plan came with it. Without XLA it is of what was taken until it failed: at most so many.
    assert caught.value.type_name == "OutOfMemoryError"
    proposed = int(re.search(r"use global_batch_size=(\d+) or less", caught.value.reason)[1])
    assert batch // 2 <= proposed < above


@pytest.mark.gpu
def test_the_parts_that_are_found_train_what_does_not_fit_at_once(monkeypatch):
    monkeypatch.delenv("TF_FORCE_GPU_ALLOW_GROWTH", raising=False)
    config = Config(
        runtime=RuntimeConfig(gpu_ids=(0,), precision="mixed_float16", memory=2000, xla=False),
        data=DataConfig(image_size=(128, 128), channels=1, global_batch_size=1024),
        model=ModelConfig(name="cifar_resnet"),
    )
    parts = auto_parts(config)
    assert parts > 1
    with pytest.raises(IsolatedError) as caught:
        room.run_quietly(train_briefly, with_parts(config, parts // 2))
    assert caught.value.out_of_memory
