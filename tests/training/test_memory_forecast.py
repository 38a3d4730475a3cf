"""The forecast of a step's memory against the buffers that XLA assigns, and what is said of it."""

import json
import logging
import pathlib

import keras
import numpy as np
import pytest
import tensorflow as tf
from conftest import compiled, new_process

from tfaccel import StepConfig
from tfaccel.runtime.devices import Device
from tfaccel.step.memory.need import Need
from tfaccel.training import memory_forecast
from tfaccel.training.memory_forecast import forecast_for, forecast_of

TESTS = pathlib.Path(__file__).parent
# XLA for the CPU copies what a convolution reads, and computes less where it is read, than XLA for
# a GPU. The forecast is made for the latter: test_it_is_within_a_tenth_of_xlas_for_an_h100.
OF_CPU = 0.2
MIB = 2**20


@pytest.mark.parametrize(
    "names",
    [["dense"], pytest.param(["residual", "transformer"], marks=pytest.mark.slow)],
    ids=" ".join,
)
def test_it_is_near_what_xla_assigns_on_the_cpu(tmp_path, names):
    program = f"import sys; sys.path.insert(0, {str(TESTS)!r}); import forecast_networks as own; "
    flags = f"--xla_dump_to={tmp_path} --xla_dump_hlo_as_text"
    call = f"own.main({str(tmp_path)!r}, *{names})"
    done = new_process(f"{program}{call}", XLA_FLAGS=flags)
    assert done.returncode == 0, done.stderr
    figures = json.loads(done.stdout.splitlines()[-1])
    assert list(figures) == names
    for name, (forecast, assigned) in figures.items():
        assert assigned > 30 * MIB  # it is the step's program
        assert 1 - OF_CPU <= forecast / assigned <= 1 + OF_CPU, (name, forecast, assigned)


@pytest.mark.parametrize("shards", [False, True])
def test_sharded_states_count_by_what_a_replica_keeps(shards):
    def make():
        return keras.Sequential([keras.Input((64,)), keras.layers.Dense(512)])

    config = StepConfig(shard_states=shards)
    model = compiled(make, 2, optimizer="adam", loss="mse", config=config)
    model.fit(np.zeros((8, 64)), np.zeros((8, 512)), verbose=0)
    weights = 4 * (64 * 512 + 512)
    kept = (2 + 1) * weights / 2 if shards else 2 * weights  # also a slice of the weights
    assert 0 <= forecast_of(model).plan.optimizer - kept < 100


# What XLA for an H100 needs beside weights and batches, of steps in mixed_bfloat16 as
# tools/gpu_program.py traces them (JAX 0.9, 2026-11-30), and weights, states and batches, in MiB.
OF_H100 = {
    ("resnet50", None): (8950, 227),
    ("vit_b16", None): (7496, 1007),
    ("densenet121", None): (5724, 85),
    ("convnext_tiny", None): (6758, 350),
    ("unet", None): (4915, 241),
    ("bert", None): (5233, 1252),
    ("gpt2", None): (6533, 1436),
    ("resnet50", "blocks"): (3430, 234),
    ("vit_b16", "blocks"): (1628, 1007),
    ("gpt2", "blocks"): (2038, 1434),
}


@pytest.mark.slow  # ten seconds to trace each
@pytest.mark.parametrize(("name", "remat"), OF_H100)
def test_it_is_within_a_tenth_of_xlas_for_an_h100(name, remat):
    tools = TESTS.parents[1] / "tools"
    program = f"import sys; sys.path.insert(0, {str(tools)!r}); import gpu_program as own; "
    done = new_process(f"{program}print(own.forecast({name!r}, {remat!r}))")
    assert done.returncode == 0, done.stderr
    step, fixed = OF_H100[name, remat]
    forecast = int(done.stdout.split()[-1]) / MIB
    assert forecast + fixed == pytest.approx(step + fixed, rel=0.1)


def make():
    x = keras.Input((64,))
    return keras.Model(x, keras.layers.Dense(8)(keras.layers.Dense(512, activation="relu")(x)))


ROWS = 96
X, Y = np.ones((ROWS, 64), np.float32), np.ones((ROWS, 8), np.float32)


@pytest.mark.parametrize(
    ("num_replicas", "xla"),
    [(1, True), (2, False), pytest.param(2, True, marks=pytest.mark.slow)],
)
def test_a_line_is_logged_before_the_first_step(num_replicas, xla, caplog):
    model = compiled(make, num_replicas, optimizer="adam", loss="mse", xla=xla)
    assert forecast_of(model) is None
    said = []

    class Callback(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            said.append([each for each in caplog.messages if each.startswith("memory: ")])

    with caplog.at_level(logging.INFO, "tfaccel"):
        model.fit(X, Y, batch_size=ROWS // 2, callbacks=[Callback()], verbose=0)
    assert said[0] == said[-1]  # once
    (line,) = said[0]
    forecast = forecast_of(model)
    assert line == f"memory: {forecast}"
    how = "with XLA" if xla else "without XLA"
    assert line.startswith("memory: about 1 MiB on each replica, " + how + ": parameters 0, ")
    plan, rows = forecast.plan, ROWS // 2 // num_replicas
    weights = 4 * (64 * 512 + 512 + 512 * 8 + 8)
    assert weights <= plan.parameters < weights + 100
    assert 2 * weights <= plan.optimizer < 2 * weights + 100
    assert plan.gradients == weights
    assert plan.batches >= 4 * rows * (64 + 8)
    # The largest activation, 512 of each row, and what is computed from it.
    assert 4 * rows * 512 <= plan.activations + plan.gradients < 4 * rows * 512 * 4 + 4 * weights


def test_parts_and_recomputation_are_seen():
    x = np.tile(X, (16, 1))

    def need(**step):
        model = compiled(
            make_deep, 1, optimizer="sgd", loss="mse", config=StepConfig(**step), xla=False
        )
        model.fit(x, x, batch_size=len(x), verbose=0)
        plan = forecast_of(model).plan
        return plan.activations + plan.gradients

    whole = need()
    assert need(accumulation_steps=4) < 0.5 * whole
    assert need(remat="blocks") < 0.7 * whole


def make_deep():
    x = image = keras.Input((64,))
    for _ in range(4):
        x = keras.layers.Dense(512, activation="tanh", kernel_initializer="zeros")(x)
        x = keras.layers.Dense(64)(x)
    return keras.Model(image, x)


def test_a_step_above_the_memory_is_warned_of_with_what_to_do(monkeypatch, caplog):
    gib = 2**30
    monkeypatch.setattr(memory_forecast, "gpus_of", lambda model: [Device("GPU:0", 0)])
    read = {"current": 3 * gib, "peak": 4 * gib}
    monkeypatch.setattr(tf.config.experimental, "get_memory_info", lambda name: read)
    limits = lambda gpus, peaks: (80 * gib, gib)  # noqa: E731
    monkeypatch.setattr(memory_forecast, "limit_and_others", limits)
    model = compiled(make, 1, optimizer="sgd", loss="mse")
    with caplog.at_level(logging.INFO, "tfaccel"):
        model.train_function._step.tell(Need(75 * gib, gib, 64, xla=True))
        assert not [each for each in caplog.records if each.levelno >= logging.WARNING]
        model.train_function._step.tell(Need(100 * gib, gib, 64, xla=True))
    (warning,) = [each for each in caplog.records if each.levelno >= logging.WARNING]
    # All that is on the GPU beside the variables is a batch, or was copied ahead: 3 GiB.
    assert warning.getMessage().startswith(
        "memory: the step will probably not fit: it needs about 106,496 of 81,920 MiB; use "
        "accumulation_steps=2 or more (the same result, except for batch norm; "
    )
    assert "or global_batch_size=40 or less (more updates" in warning.getMessage()
    assert "about 106,496 of 81,920 MiB on each replica, with XLA: " in caplog.text
    assert "batches 3,072, DALI, CUDA and others 1,024" in caplog.text


def test_sizes_that_are_not_known_are_said():
    model = compiled(make, 1, optimizer="sgd", loss="mse")
    forecast = forecast_for(model, Need(None, 100, None, xla=True, unknown="a:0 has the shape (?)"))
    assert str(forecast) == (
        "not known, because the trace does not tell all sizes (a:0 has the shape (?))"
    )
