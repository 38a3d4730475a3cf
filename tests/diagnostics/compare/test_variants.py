"""Which variants there are, in which order they are tried, and what configs they are."""

import dataclasses

import pytest

from tfaccel.config import Config, DataConfig, RuntimeConfig, default_config, parse
from tfaccel.diagnostics.compare.variants import (
    SLOW,
    Levels,
    Variant,
    as_flags,
    configured,
    every_combination,
    levels_of,
    one_by_one,
)

CPU = Levels(("tf_data", "dali_cpu"), ("float32", "mixed_float16"), (False, True), (0,))


def walk(levels, faster):
    """The variants that are tried, where `faster` says which beat what was best before them."""
    best, tried = [levels.plain], []
    plan = one_by_one(levels, lambda: best[-1])
    outcome = None
    try:
        while True:
            candidate = plan.send(outcome)
            tried.append(candidate)
            outcome = "kept" if faster(candidate, best[-1]) else SLOW
            if outcome == "kept":
                best.append(candidate)
    except StopIteration:
        return tried, best[-1]


def test_levels_of_a_cpu_and_of_gpus():
    cpu = levels_of(("tf_data", "dali_cpu", "memory"), num_gpus=0)
    assert cpu.arithmetic == ("float32", "mixed_float16", "mixed_bfloat16")  # no TF32 there
    assert cpu.num_gpus == (0,)
    gpus = levels_of(("tf_data", "dali_gpu"), num_gpus=6)
    assert gpus.num_gpus == (1, 2, 4, 6)
    assert gpus.plain == Variant("tf_data", "float32", False, 1)
    assert levels_of(("tf_data",), num_gpus=1).num_gpus == (1,)


def test_each_factor_is_added_to_the_best_so_far():
    tried, best = walk(CPU, lambda new, old: new.xla and not old.xla)
    assert tried == [
        Variant("tf_data", "float32", True, 0),
        Variant("tf_data", "mixed_float16", True, 0),
        Variant("dali_cpu", "float32", True, 0),
    ]
    assert best == tried[0]


def test_what_was_slow_is_tried_once_more_on_a_better_one():
    # XLA does nothing until the arithmetic is smaller.
    def faster(new, old):
        shorter = new.arithmetic != old.arithmetic
        return shorter or (new.xla and not old.xla and new.arithmetic != "float32")

    tried, best = walk(CPU, faster)
    assert [each.xla for each in tried] == [True, False, False, True, True]
    assert tried[-1].loader == "dali_cpu"
    assert best == Variant("tf_data", "mixed_float16", True, 0)
    assert len(tried) == len(set(tried))


def test_what_feeds_the_step_comes_first_where_it_waits_for_it():
    plan = one_by_one(CPU, lambda: CPU.plain, starved=True)
    assert [each.loader for each in plan] == ["dali_cpu", "tf_data", "tf_data"]


def test_the_grid_is_every_combination_once():
    variants = list(every_combination(levels_of(("tf_data", "dali_gpu"), num_gpus=2)))
    assert len(variants) == len(set(variants)) == 2 * 4 * 2 * 2 - 1  # without the plain one


@pytest.mark.parametrize(
    ("arithmetic", "precision", "tf32"),
    [
        ("float32", "float32", False),
        ("TF32", "float32", True),
        ("mixed_bfloat16", "mixed_bfloat16", True),
        ("float16", "float16", True),
    ],
)
def test_a_variant_is_the_config_with_other_values(arithmetic, precision, tf32):
    config = Config(data=DataConfig(batch_per_replica=32, stored_size=(16, 16), loader="memory"))
    made = configured(config, Variant("dali_gpu", arithmetic, True, 2), gpu_ids=(1, 2, 3))
    assert (made.runtime.precision, made.runtime.tf32) == (precision, tf32)
    assert made.runtime.gpu_ids == (1, 2)
    assert not made.runtime.compile_cache  # or the second start would not be like the first
    # The same job on any number of GPUs: the batch is divided over them.
    assert (made.data.global_batch_size, made.data.batch_per_replica) == (96, None)
    assert made.data.stored_size is None  # nothing is stored
    rest = ("runtime", "data")
    assert all(
        getattr(made, each.name) == getattr(config, each.name)
        for each in dataclasses.fields(Config)
        if each.name not in rest
    )


def test_the_flags_make_the_config_that_was_measured():
    config = default_config()
    config.runtime.xla = False
    config.data.loader = "memory"
    config.data.batch_per_replica = 8
    config.data.stored_size = (16, 16)
    before = parse(config)
    made = configured(before, Variant("dali_gpu", "mixed_float16", True, 2), gpu_ids=(0, 1))
    flags = as_flags(before, made)
    assert "--config.runtime.gpu_ids=0,1" in flags
    assert "--config.data.stored_size=None" in flags
    from tfaccel.cli.flags import parse_config_flags

    file = "configs/digits.py"
    given = ["--config.runtime.xla=False", "--config.data.loader=memory"]
    given += ["--config.data.stored_size=16,16", "--config.data.batch_per_replica=8"]
    given += ["--config.data.global_batch_size=None"]
    values, _ = parse_config_flags("train", [f"--config={file}", *given, *flags])
    again = parse(values.config)
    assert again.runtime == dataclasses.replace(made.runtime, compile_cache=True)
    assert (again.data.loader, again.data.stored_size) == ("dali_gpu", None)
    assert again.data.whole_batch(2) == 16


def test_flags_of_what_is_as_it_was_are_none():
    config = Config(
        RuntimeConfig(gpu_ids=(), xla=True), DataConfig(loader="tf_data", global_batch_size=8)
    )
    assert as_flags(config, configured(config, Variant("tf_data", "float32", True, 0), ())) == []
