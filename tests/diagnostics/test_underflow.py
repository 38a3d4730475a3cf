import keras
import numpy as np
import pytest
import tensorflow as tf
from conftest import compiled as compiled_on_replicas
from conftest import strategy_of
from scaled_loss import Scaled, batch
from tensorflow.python.distribute.values import DistributedVariable

import tfaccel
from tfaccel.common.errors import UserError


def compiled(factor=1.0, *, policy="mixed_float16", optimizer=None):
    keras.utils.set_random_seed(0)
    layers = [
        keras.layers.Dense(16, activation="relu", name="hidden", dtype=policy),
        keras.layers.Dense(4, name="head", dtype=policy),
    ]
    model = keras.Sequential([keras.Input((8,)), *layers])
    model.compile(optimizer or keras.optimizers.SGD(), Scaled(factor))
    return model


def test_what_a_scale_of_one_loses_a_larger_one_keeps():
    found = tfaccel.gradient_underflow(compiled(2.0**-26), batch(), loss_scales=[1, 2**26])
    assert found.loss_scales == (1.0, 2.0**26)
    assert [each.name for each in found.layers] == ["hidden", "head"]
    assert [each.num_elements for each in found.layers] == [8 * 16 + 16, 16 * 4 + 4]
    for layer in found.layers:
        lost, kept = layer.lost
        assert lost > 0.9
        assert kept == 0
    assert found.whole.num_elements == 8 * 16 + 16 + 16 * 4 + 4
    assert found.whole.lost[1] == 0


def test_the_shares_are_those_of_numpy():
    """Of one layer without activation: its kernel's gradient is a product of two matrices."""
    keras.utils.set_random_seed(0)
    layer = keras.layers.Dense(4, use_bias=False, dtype="mixed_float16", name="only")
    model = keras.Sequential([keras.Input((8,)), layer])
    model.compile(keras.optimizers.SGD(), Scaled(2.0**-22))
    x, y = (each.astype("f2").astype("f4") for each in batch())
    halves = np.matmul(x, model.get_weights()[0].astype("f2").astype("f4")).astype("f2")
    of_outputs = (2.0**-22 * 2 / (32 * 4) * (halves.astype("f4") - y)).astype("f2")
    in_halves = np.matmul(x.T, of_outputs.astype("f4")).astype("f2")
    expected = np.mean(in_halves == 0)
    assert 0.1 < expected <= 1
    found = tfaccel.gradient_underflow(model, (x, y), loss_scales=[1])
    assert found.layers[0].lost[0] == pytest.approx(expected, abs=1.1 / 32)  # one element of 32


def test_an_overflow_is_no_share():
    found = tfaccel.gradient_underflow(compiled(), batch(), loss_scales=[2**24])
    assert found.layers[1].lost == (None,)
    assert "overflow" in str(found)


def test_the_scales_are_one_and_what_training_is_at():
    optimizer = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(), initial_scale=2**12)
    model = compiled(optimizer=optimizer)
    optimizer.build(model.trainable_variables)
    assert tfaccel.gradient_underflow(model, batch()).loss_scales == (1, 128, 2**12, 2**15)
    static = compiled(optimizer=keras.optimizers.SGD(loss_scale_factor=64.0))
    assert tfaccel.gradient_underflow(static, batch()).loss_scales == (1, 64, 128, 2**15)


def test_the_scale_of_stock_replicas_is_read_too(monkeypatch):
    # A process that imports nothing else of tfaccel has no such method.
    monkeypatch.delattr(DistributedVariable, "__float__", raising=False)
    optimizer = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(), initial_scale=2**12)
    with strategy_of(2).scope():
        model = compiled(optimizer=optimizer)
        optimizer.build(model.trainable_variables)
    assert tfaccel.gradient_underflow(model, batch()).loss_scales == (1, 128, 2**12, 2**15)


def test_the_model_stays_as_it_is():
    keras.utils.set_random_seed(0)
    layers = [
        keras.layers.Dense(8, dtype="mixed_float16"),
        keras.layers.BatchNormalization(dtype="mixed_float16"),
        keras.layers.Dropout(0.5, dtype="mixed_float16"),
        keras.layers.Dense(4, dtype="mixed_float16"),
    ]
    model = keras.Sequential([keras.Input((8,)), *layers])
    model.compile(keras.optimizers.SGD(), Scaled())
    before = [each.numpy() for each in model.variables]
    found = tfaccel.gradient_underflow(model, (*batch(), np.ones(32, "f4")))
    for old, new in zip(before, model.variables, strict=True):
        np.testing.assert_array_equal(old, new.numpy())
    assert found.layers[0].lost[-1] == pytest.approx(0, abs=0.05)


def test_of_several_replicas_the_first_one_s_rows_are_taken():
    model = compiled_on_replicas(
        lambda: compiled(2.0**-26), 2, optimizer=keras.optimizers.SGD(), loss=Scaled(2.0**-26)
    )
    data = tf.data.Dataset.from_tensor_slices(batch()).batch(16)
    distributed = model.distribute_strategy.experimental_distribute_dataset(data)
    found = tfaccel.gradient_underflow(model, next(iter(distributed)), loss_scales=[1])
    assert found.layers[0].lost[0] > 0.9


def test_the_table_is_80_columns_wide_and_has_html(terminal):
    found = tfaccel.gradient_underflow(compiled(2.0**-20), batch())
    text = str(found)
    assert max(map(len, text.splitlines())) <= 80
    assert "head" in text
    assert "<table>" in found._repr_html_()
    assert repr(found) == text


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (lambda: compiled(policy="float32"), "computes in float32"),
        (lambda: keras.Sequential([keras.Input((8,)), keras.layers.Dense(4)]), "compile"),
    ],
)
def test_what_it_cannot_tell_is_said(model, message):
    with pytest.raises(UserError, match=message):
        tfaccel.gradient_underflow(model(), batch())


@pytest.mark.parametrize("scales", [[], [0], [-1.0], ["dynamic"], 3])
def test_scales_are_positive_numbers(scales):
    with pytest.raises(UserError, match="loss_scales"):
        tfaccel.gradient_underflow(compiled(), batch(), loss_scales=scales)
