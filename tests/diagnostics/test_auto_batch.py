"""The largest batch that fits, or what keeps a batch: few tries, each in a process of its own."""

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
    Tried,
    auto_batch,
    auto_saving,
    largest_batch,
    train_briefly,
    with_batch,
)
from tfaccel.diagnostics.profile.knobs import with_changes
from tfaccel.process import isolate
from tfaccel.process.isolate import IsolatedError
from tfaccel.training.memory_plan import Plan


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


def in_children(monkeypatch, fail, *, plan=None):
    """Lets children answer at once.

    `fail(rows)` raises if these rows do not train at a time. A step takes 1 ms a row, a tenth more
    for each further part, and a fifth more with remat="blocks", which needs half of the memory.
    """

    def run_isolated(function, config):
        if function is room.describe:
            return {"num_replicas": 3, "num_examples": 1437}
        rows, step = config.data.whole_batch(3), config.step
        fail(rows // step.accumulation_steps // (2 if step.remat == "blocks" else 1))
        times = 1 + 0.1 * (step.accumulation_steps - 1) + 0.2 * (step.remat is not None)
        return Tried("peak 7 MiB", rows * times / 1000, plan)

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


def too_many(tmp_path, limit, tried=None):
    def fail(rows):
        if tried is not None:
            tried.append(rows)
        if rows > limit:
            raise error(tmp_path, "OutOfMemoryError", "Can't allocate 7 bytes on device 0")

    return fail


BATCH = with_batch(CONFIG, 480)


@pytest.mark.parametrize(
    ("limit", "settings", "times"),
    [
        (480, {}, 1.0),
        (300, {"step.accumulation_steps": 2}, 1.1),  # beside remat, 1.2
        (150, {"step.accumulation_steps": 4}, 1.3),
        (3, {"step.accumulation_steps": 128}, None),  # no plain batch of 24 rows fits
        # Not even row by row of each replica: both together.
        (1, {"step.remat": "blocks", "step.accumulation_steps": 128}, None),
    ],
)
def test_the_quickest_way_to_keep_a_batch(monkeypatch, tmp_path, caplog, limit, settings, times):
    in_children(monkeypatch, too_many(tmp_path, limit))
    with caplog.at_level(logging.INFO, "tfaccel"):
        saving = auto_saving(BATCH)
    assert saving.settings == settings
    assert saving.times == (None if times is None else pytest.approx(times))
    assert saving.flags == " ".join(f"--config.{each}={settings[each]}" for each in settings)
    if settings and times:
        assert (
            f"autobatch: {saving.flags} for global_batch_size=480 (the quickest of " in caplog.text
        )
        assert f"s a step, {times:.2f} times the plain step" in caplog.text


def test_recomputation_is_chosen_where_it_is_quicker(monkeypatch, tmp_path):
    """Where four parts are needed, which take 1.3 times as long."""
    in_children(monkeypatch, too_many(tmp_path, 240))
    ways = {each.name: each for each in room.WAYS}
    slow = dataclasses.replace(ways["accumulation_steps"], value=lambda situation: 4)
    monkeypatch.setattr(room, "WAYS", [slow, ways["remat"]])
    saving = auto_saving(BATCH)
    assert saving.settings == {"step.remat": "blocks"}
    assert saving.times == pytest.approx(1.2)


def test_the_forecast_of_a_smaller_batch_tells_where_to_begin(monkeypatch, tmp_path):
    """Of 240 rows it says 32 MiB; so of 480 rows 64, and 16 MiB of 66 are fixed."""
    mib, tried, settings = 2**20, [], []
    plan = Plan(16 * mib, 0, 0, activations=32 * mib, batches=0, limit=66 * mib)
    in_children(monkeypatch, too_many(tmp_path, 300, tried), plan=plan)
    fitting = room._fitting

    def noted(config, situation, way, already=None):
        settings.append((way.name, way.value(situation)))
        return fitting(config, situation, way, already)

    monkeypatch.setattr(room, "_fitting", noted)
    auto_saving(BATCH)
    # MiB: 50, less 5%. One replica has no states to share.
    assert settings == [("accumulation_steps", 2), ("remat", 47), ("shard_states", None)]
    assert tried == [480, 240, 240, 480, 240]  # plain, its half, parts, the budget, "blocks"


def test_parts_begin_with_those_of_the_config(monkeypatch, tmp_path):
    tried = []
    in_children(monkeypatch, too_many(tmp_path, 500, tried))
    assert auto_saving(with_changes(BATCH, {"step.accumulation_steps": 3})).settings == {}
    assert tried == [160]


def test_a_batch_that_fits_in_no_way_is_said(monkeypatch, tmp_path):
    in_children(monkeypatch, too_many(tmp_path, 0))
    with pytest.raises(UserError, match="global_batch_size=480 does not fit in any way that keeps"):
        auto_saving(BATCH)


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
    tried = train_briefly(dataclasses.replace(CONFIG, step=step))
    assert tried.peak == "peak not known"
    assert 0 < tried.step_s < 10
    assert tried.plan.activations > 0
    assert calls == [("fit", 64, 3), ("evaluate", 64, 3), ("fit", 64, 13)]


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
    proposed = int(re.search(r"or global_batch_size=(\d+) or less", caught.value.reason)[1])
    assert batch // 2 <= proposed < above


@pytest.mark.gpu
def test_the_settings_that_are_found_train_what_does_not_fit_as_it_is(monkeypatch):
    monkeypatch.delenv("TF_FORCE_GPU_ALLOW_GROWTH", raising=False)
    config = Config(
        runtime=RuntimeConfig(gpu_ids=(0,), precision="mixed_float16", memory=2000, xla=False),
        data=DataConfig(image_size=(128, 128), channels=1, global_batch_size=1024),
        model=ModelConfig(name="cifar_resnet"),
    )
    saving = auto_saving(config)
    assert saving.settings
    assert saving.times > 0.5
    with pytest.raises(IsolatedError) as caught:
        room.run_quietly(train_briefly, config)
    assert caught.value.out_of_memory
