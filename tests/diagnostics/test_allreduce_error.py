import json

import keras
import numpy as np
import pytest
from conftest import compiled as compiled_on_replicas
from scaled_loss import Scaled, batch

import tfaccel
from tfaccel import StepConfig
from tfaccel.cli import main
from tfaccel.common.errors import UserError


def linear(factor=1.0):
    keras.utils.set_random_seed(0)
    layer = keras.layers.Dense(4, use_bias=False, name="only")
    model = keras.Sequential([keras.Input((8,)), layer])
    model.compile("sgd", Scaled(factor))
    return model


def test_the_error_is_that_of_numpy():
    model, (x, y) = linear(), batch()
    found = tfaccel.allreduce_error(model, (x, y), num_replicas=4)
    kernel = model.get_weights()[0].astype(np.float64)
    exact, rounded = 0.0, np.float16(0)
    for rows in np.split(np.arange(32), 4):
        slope = 2 / 4 * (x[rows] @ kernel - y[rows])
        gradient = x[rows].T @ slope / 256  # a mean over 8 rows, times 8 rows in units of 256
        exact, rounded = exact + gradient, rounded + gradient.astype(np.float16)
    wanted = np.linalg.norm(rounded - exact) / np.linalg.norm(exact)
    assert [each.name for each in found.layers] == ["only"]
    assert found.whole.num_elements == found.layers[0].num_elements == 32
    # The gradients here and there are rounded to float32, which moves a few roundings to float16.
    assert found.whole.of_dtype["float16"].error == pytest.approx(wanted, rel=0.1)
    assert found.whole.of_dtype["bfloat16"].error == pytest.approx(8 * wanted, rel=0.5)
    assert found.whole.of_dtype["float16"].lost == 0


def test_float16_loses_small_gradients_and_overflows_with_large_ones():
    small = tfaccel.allreduce_error(linear(2.0**-24), batch()).whole.of_dtype
    assert small["float16"].lost > 0.3
    assert small["float16"].error > 0.1
    assert small["bfloat16"].lost == 0
    large = tfaccel.allreduce_error(linear(2.0**24), batch())
    assert large.whole.of_dtype["float16"].error is None
    assert large.whole.of_dtype["bfloat16"].error < 0.01
    assert "overflow" in str(large)


def test_a_loss_scale_counts():
    keras.config.set_dtype_policy("mixed_float16")
    try:
        model = linear(2.0**-24)
    finally:
        keras.config.set_dtype_policy("float32")
    scaled = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(), initial_scale=2.0**24)
    model.compile(scaled, Scaled(2.0**-24))
    found = tfaccel.allreduce_error(model, batch())
    assert found.loss_scale == 2.0**24
    assert found.whole.of_dtype["float16"].lost == 0
    assert "loss scale 16,777,216" in str(found)


@pytest.mark.parametrize("dtype", ["float16", pytest.param("bfloat16", marks=pytest.mark.slow)])
def test_training_has_the_error_that_is_shown(dtype):
    def small():
        keras.utils.set_random_seed(0)
        layers = [keras.layers.Dense(16, activation="tanh"), keras.layers.Dense(4)]
        return keras.Sequential([keras.Input((8,)), *layers])

    x, y = batch()
    changes = []
    for config in (StepConfig(), StepConfig(allreduce_dtype=dtype)):
        model = compiled_on_replicas(
            small, 2, config=config, loss=Scaled(), optimizer=keras.optimizers.SGD(1.0), xla=False
        )
        before = model.get_weights()
        shown = tfaccel.allreduce_error(model, (x, y), num_replicas=2).whole.of_dtype[dtype]
        for old, new in zip(before, model.get_weights(), strict=True):
            np.testing.assert_array_equal(old, new)  # the model has not changed
        model.train_on_batch(x, y)
        pairs = zip(model.get_weights(), before, strict=True)
        changes.append(np.concatenate([(new - old).ravel() for new, old in pairs]))
    exact, rounded = changes
    error = np.linalg.norm(rounded - exact) / np.linalg.norm(exact)
    assert error == pytest.approx(shown.error, rel=0.05)


def test_bad_input_is_one_sentence():
    with pytest.raises(UserError, match="num_replicas=1"):
        tfaccel.allreduce_error(linear(), batch(), num_replicas=1)
    with pytest.raises(UserError, match="3 rows for 8 replicas"):
        tfaccel.allreduce_error(linear(), batch(3), num_replicas=8)
    with pytest.raises(UserError, match="compile the model"):
        tfaccel.allreduce_error(keras.Sequential([keras.layers.Dense(1)]), batch())
    with pytest.raises(UserError, match="replicas=1"):
        main.main(["underflow", "--config=configs/digits.py", "--replicas=1"])


def test_the_command_prints_both_tables(capsys):
    command = ["underflow", "--config=configs/digits.py", "--config.runtime.gpu_ids=()"]
    half = "--config.runtime.precision=mixed_bfloat16"
    try:
        assert main.main([*command, half, "--config.step.mixup_alpha=0.2", "--json"]) == 0
    finally:
        keras.config.set_dtype_policy("float32")
    shown = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert set(shown) == {"underflow", "allreduce"}
    assert shown["allreduce"]["num_replicas"] == 2
    assert 0 < shown["allreduce"]["whole"]["of_dtype"]["bfloat16"]["error"] < 0.02
