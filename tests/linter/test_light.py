"""What activations cost beside ReLU is told, and measured, and changes nothing."""

import keras
import numpy as np
import pytest
from keras import layers

import tfaccel
from tfaccel.errors import UserError
from tfaccel.linter.light import with_relu


def model_of(activation, *, width=16, classes=8):
    return keras.Sequential(
        [
            keras.Input((2,)),
            layers.Dense(width, activation=activation, name="hidden"),
            layers.Dense(width, name="more"),
            layers.Activation(activation, name="after"),
            layers.Dense(classes, name="logits"),
        ]
    )


def test_the_copy_has_relu_and_else_the_same_layers():
    model = model_of("gelu")
    lighter = with_relu(model, ["hidden", "after"], strategy=None)
    assert [each.name for each in lighter.layers] == [each.name for each in model.layers]
    assert lighter.get_layer("hidden").activation is keras.activations.relu
    assert lighter.get_layer("after").activation is keras.activations.relu
    assert model.get_layer("hidden").activation is keras.activations.gelu
    for name in ("more", "logits"):
        pairs = zip(
            model.get_layer(name).get_weights(), lighter.get_layer(name).get_weights(), strict=True
        )
        assert all(np.array_equal(*each) for each in pairs)


def test_no_copy_of_what_is_not_there():
    with pytest.raises(UserError, match="has no layer head among its own"):
        with_relu(model_of("gelu"), ["head"], strategy=None)


def test_gelu_is_no_finding_but_told():
    table = tfaccel.lint(model_of("gelu"), xla=False)
    assert not any("gelu" in each.what for each in table)
    assert "gelu in hidden and after: more arithmetic than relu" in " ".join(str(table).split())
    assert "arithmetic" not in str(tfaccel.lint(model_of("relu"), xla=False))


def test_an_output_and_a_gate_have_the_activation_that_they_need():
    x = layers.Dense(16, activation="relu")(inputs := keras.Input((2,)))
    gated = layers.Multiply()([x, layers.Dense(16, activation="sigmoid")(x)])
    positive = keras.Model(inputs, layers.Dense(8, activation="softplus")(gated))
    table = tfaccel.lint(positive, xla=False)
    assert "relu" not in str(table)
    assert not table.fix().activations


def test_what_gelu_costs_is_measured():
    wide = [layers.Dense(4096, "gelu", name="hidden"), layers.Dense(8)]
    model = keras.Sequential([keras.Input((2,)), *wide])
    data = (np.zeros((512, 2), "float32"), np.zeros(512, int))
    fix = tfaccel.lint(model, data, batch_size=512, xla=False).fix(num_steps=9, keep=True)
    assert fix.with_relu.median_s < fix.before.median_s
    assert not fix.kept
    said = " ".join(str(fix).split())
    assert "no head to pad" in said
    assert "cost: relu for gelu in hidden, which makes it another model" in said
    assert max(map(len, str(fix).splitlines())) <= 80
    assert fix.as_dict()["with_relu"]["median_s"] > 0
    assert fix._repr_html_().count("<p>") == 2


def test_the_model_that_is_returned_has_its_activations():
    model = model_of("tanh", classes=5)
    fix = tfaccel.lint(model, xla=False).fix(num_steps=3, keep=True)
    assert fix.kept
    assert fix.model.get_layer("hidden").activation is keras.activations.tanh
    assert fix.model.get_layer("logits").dense.units == 8
    assert fix.with_relu.median_s > 0


def test_layers_of_a_model_within_are_not_timed_and_the_head_is_padded():
    inner = keras.Sequential([keras.Input((2,)), layers.Dense(16, "gelu", name="deep")])
    model = keras.Sequential([keras.Input((2,)), inner, layers.Dense(5, name="logits")])
    fix = tfaccel.lint(model, xla=False).fix(num_steps=3)
    assert fix.heads == ("logits padded from 5 to 8 units",)
    assert fix.with_relu is None
    said = " ".join(str(fix).split())
    assert "cost: of gelu in deep, not timed:" in said
    assert "has no layer deep among its own" in said
