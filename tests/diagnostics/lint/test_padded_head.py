"""A head padded for Tensor Cores gives what it gave: outputs, loss, metrics and training."""

import itertools
import json

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

import tfaccel
from tfaccel.common.errors import UserError
from tfaccel.diagnostics.lint.measure import Spread, shortened, step_times
from tfaccel.diagnostics.lint.padded_head import PaddedHead, with_padded_heads

RNG = np.random.default_rng(0)
X, Y = RNG.normal(size=(48, 12)).astype("float32"), RNG.integers(0, 5, 48)


def classifier(activation="linear"):
    image = keras.Input((12,))
    x = layers.Dense(16, activation="relu")(image)
    return keras.Model(image, layers.Dense(5, activation=activation, name="logits")(x))


def compiled(model, loss):
    optimizer = keras.optimizers.AdamW(0.01, weight_decay=0.01, global_clipnorm=0.5)
    metrics = [keras.metrics.TopKCategoricalAccuracy(3), "accuracy"]
    model.compile(optimizer, loss, metrics=metrics, run_eagerly=True)  # to trace takes longer
    return model


def test_training_is_the_same_with_label_smoothing_and_clipping():
    keras.utils.set_random_seed(0)
    model = classifier()
    wider = with_padded_heads(model, ["logits"])
    assert wider.get_layer("logits").dense.kernel.shape == (16, 8)
    assert wider.output_shape == (None, 5)
    one_hot = np.eye(5, dtype="float32")[Y]
    loss = keras.losses.CategoricalCrossentropy(from_logits=True, label_smoothing=0.1)
    histories = [
        compiled(each, loss).fit(X, one_hot, epochs=3, shuffle=False, verbose=0).history
        for each in (model, wider)
    ]
    # float32: the sums of the products may be in another order.
    for name, values in histories[0].items():
        np.testing.assert_allclose(values, histories[1][name], rtol=1e-5, err_msg=name)
    np.testing.assert_allclose(model(X), wider(X), atol=1e-5)
    kernel, bias = wider.get_layer("logits").dense.get_weights()
    assert not kernel[:, 5:].any()
    assert not bias[5:].any()


def test_softmax_is_over_the_classes_alone_and_a_file_brings_it_back(tmp_path):
    wider = with_padded_heads(classifier("softmax"), ["logits"])
    outputs = wider(X).numpy()
    np.testing.assert_allclose(outputs.sum(-1), 1, atol=1e-6)
    wider.save(tmp_path / "model.keras")
    again = keras.models.load_model(tmp_path / "model.keras")
    np.testing.assert_array_equal(again(X).numpy(), outputs)


def test_a_sequential_model_in_float16_keeps_its_float32_head():
    keras.config.set_dtype_policy("mixed_float16")
    try:
        model = keras.Sequential(
            [keras.Input((12,)), layers.Dense(16), layers.Dense(10, dtype="float32", name="head")]
        )
    finally:
        keras.config.set_dtype_policy("float32")
    wider = with_padded_heads(model, ["head"])
    assert isinstance(wider.layers[-1], PaddedHead)
    assert wider(X).dtype == "float32"
    np.testing.assert_allclose(model(X), wider(X), atol=1e-6)


def test_losses_of_the_weights_and_constraints_stay_the_same(tmp_path):
    head = layers.Dense(
        5,
        kernel_regularizer=keras.regularizers.L2(0.1),
        bias_regularizer="l1",
        bias_constraint="non_neg",
        activity_regularizer="l1",
        bias_initializer="ones",
        name="head",
    )
    model = keras.Sequential([keras.Input((12,)), head])
    wider = with_padded_heads(model, ["head"])
    wider.save(tmp_path / "model.keras")
    for each in (wider, keras.models.load_model(tmp_path / "model.keras")):
        assert model(X).shape == each(X).shape
        np.testing.assert_allclose(sum(model.losses), sum(each.losses), rtol=1e-6)
        assert isinstance(each.layers[-1].dense.bias_constraint, keras.constraints.NonNeg)


def test_what_cannot_be_padded_is_said():
    class Mine(keras.Model):
        pass

    with pytest.raises(UserError, match="is a subclassed model"):
        with_padded_heads(Mine(), ["logits"])
    with pytest.raises(
        UserError, match="has no layer head among its own; replace its Dense head by PaddedHead"
    ):
        with_padded_heads(classifier(), ["head"])
    twice = keras.Sequential([keras.Input((12,)), layers.Lambda(lambda x: 2 * x), layers.Dense(5)])
    with pytest.raises(UserError, match=r"cannot be copied .*Lambda"):
        with_padded_heads(twice, [twice.layers[-1].name])
    orthogonal = layers.Dense(5, kernel_regularizer="orthogonal_regularizer", name="head")
    model = keras.Sequential([keras.Input((12,)), orthogonal])
    with pytest.raises(UserError, match="kernel_regularizer=OrthogonalRegularizer, which may see"):
        with_padded_heads(model, ["head"])
    model = classifier()
    model.get_layer("logits").enable_lora(2)
    with pytest.raises(UserError, match="logits has LoRA"):
        with_padded_heads(model, ["logits"])


def test_fix_measures_and_keeps_what_is_asked_for(terminal):
    model = classifier()
    table = tfaccel.lint(model, (X, Y), xla=False)
    fixed = table.fix(num_steps=3, keep=True)
    assert fixed.kept
    assert fixed.model.get_layer("logits").dense.units == 8
    assert "logits padded from 5 to 8 units" in str(fixed)
    assert max(map(len, str(fixed).splitlines())) <= 80
    assert "on the CPU" in fixed._repr_html_()
    assert table.fix(num_steps=3, keep=False).model is model
    whole = keras.Sequential([keras.Input((12,)), layers.Dense(8)])
    assert "no head to pad" in str(tfaccel.lint(whole).fix())


def test_a_gain_below_a_percent_is_not_timed(monkeypatch):
    monkeypatch.setattr(
        "tfaccel.diagnostics.lint.fix.spreads", None
    )  # whoever times meets a TypeError
    big = keras.Sequential([keras.Input((12,)), layers.Dense(1024), layers.Dense(1024)])
    big.add(layers.Dense(5, name="logits"))
    table = tfaccel.lint(big, (X, Y), xla=False)
    assert "next to nothing, 0.3% of the model's tiles" in " ".join(str(table).split())
    fix = table.fix()
    assert fix.model is big
    assert (fix.kept, fix.before) == (False, None)
    assert " ".join(str(fix).split()) == (
        "fix: logits padded from 5 to 8 units; not timed and not kept, because the gain is next to "
        "nothing, 0.3% of the model's tiles."
    )
    assert json.dumps(fix.as_dict())
    asked = table.fix(keep=True)
    assert asked.kept
    assert asked.model.get_layer("logits").dense.units == 8
    assert "but not timed" in str(asked)


def test_fix_measures_images_of_any_size_and_frozen_models():
    x = layers.Conv2D(4, 3, activation="relu")(image := keras.Input((None, None, 3)))
    logits = layers.Dense(5)(layers.GlobalAveragePooling2D()(x))
    model = keras.Model(image, logits, trainable=False)
    images = np.zeros((48, 6, 6, 3), "float32")
    assert tfaccel.lint(model, (images, Y), xla=False).fix(num_steps=3).heads
    with pytest.raises(UserError, match=r"takes \? x \? x 3, but a step is timed with known sizes"):
        tfaccel.lint(model, xla=False).fix()


def test_fix_has_no_random_text():
    inputs = keras.Input((1,), dtype="string")
    model = keras.Model(inputs, layers.Dense(5)(layers.Hashing(9, output_mode="one_hot")(inputs)))
    with pytest.raises(UserError, match="an input is text"):
        tfaccel.lint(model, (np.array([["a"]] * 48), Y), xla=False).fix()


def test_models_are_timed_in_turn():
    model = classifier()
    ticks = iter(range(1000))
    before, after = step_times(
        [model, with_padded_heads(model, ["logits"])],
        [tf.TensorSpec((None, 12))],
        rows=4,
        xla=False,
        num_steps=4,
        clock=lambda: float(next(ticks)),
    )
    assert before == after == [1.0] * 4
    assert Spread.of([1, 2, 3]).is_below(Spread.of([4, 5, 6]))
    assert not Spread.of([1, 2, 9, 9]).is_below(Spread.of([2, 2, 3, 9]))


def test_the_time_for_timing_holds_for_compilation_too():
    model = classifier()
    ticks = itertools.chain([0.0], itertools.count(100.0))  # what compiles takes 100 s
    specs, clock = [tf.TensorSpec((None, 12))], lambda: float(next(ticks))
    (times,) = step_times([model], specs, rows=4, xla=False, num_steps=30, clock=clock)
    assert times == [1.0] * 3
    slow = Spread.of([2.52, 2.48, 2.56])
    assert str(slow) == "2,520 ms (half of the steps 2,500 to 2,540)"
    assert shortened(slow, num_steps=30) == (
        " Only 3 steps of each were timed, not 30, because the time limit is 20 s, including "
        "compilation."
    )
    assert shortened(slow, num_steps=3) == ""
