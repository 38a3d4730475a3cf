"""What activations cost beside ReLU is told, and measured, and changes nothing."""

import keras
import numpy as np
import pytest
from conftest import strategy_of
from keras import layers

import tfaccel
from tfaccel.common.errors import UserError
from tfaccel.diagnostics.lint.facts import Layer
from tfaccel.diagnostics.lint.light import with_relu

FOUND = [Layer("hidden", activation="gelu"), Layer("after", activation="gelu")]


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
    lighter = with_relu(model, FOUND, strategy=None)
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
        with_relu(model_of("gelu"), [Layer("head", activation="gelu")], strategy=None)


def test_gelu_is_no_finding_but_told():
    table = tfaccel.lint(model_of("gelu"), xla=False)
    assert not any("gelu" in each.what for each in table)
    assert "gelu in hidden and after: more arithmetic than relu" in " ".join(str(table).split())
    assert "arithmetic" not in str(tfaccel.lint(model_of("relu"), xla=False))


def test_an_output_and_a_gate_have_the_activation_that_they_need():
    x = layers.Dense(16, activation="relu")(inputs := keras.Input((2,)))
    gated = layers.Multiply()([x, layers.Dense(16, activation="sigmoid")(x)])
    positive = layers.Reshape((8, 1))(layers.Dense(8, activation="softplus")(gated))
    table = tfaccel.lint(keras.Model(inputs, positive), xla=False)
    assert "relu" not in str(table)
    assert table.fix().cost is None


def test_what_gelu_costs_is_measured(terminal):
    wide = [layers.Dense(4096, "gelu", name="hidden"), layers.Dense(8)]
    model = keras.Sequential([keras.Input((2,)), *wide])
    data = (np.zeros((512, 2), "float32"), np.zeros(512, int))
    fix = tfaccel.lint(model, data, batch_size=512, xla=False).fix(num_steps=9, keep=True)
    assert fix.cost.relu.median_s < fix.cost.own.median_s  # in turn; seen 2 ms, 5 ms
    assert not fix.kept
    said = " ".join(str(fix).split())
    assert "no head to pad" in said
    assert "cost of gelu in hidden: a step, forward and backward, took" in said
    assert max(map(len, str(fix).splitlines())) <= 80
    assert fix.as_dict()["cost"]["relu"]["median_s"] > 0
    assert fix._repr_html_().count("<p>") == 2


def test_the_model_that_is_returned_has_its_activations():
    model = model_of("tanh", classes=5)
    fix = tfaccel.lint(model, xla=False).fix(num_steps=3, keep=True)
    assert fix.kept
    assert fix.model.get_layer("hidden").activation is keras.activations.tanh
    assert fix.model.get_layer("logits").dense.units == 8
    assert fix.cost.relu.median_s > 0


@pytest.mark.parametrize("classes", [5, pytest.param(8, marks=pytest.mark.slow)])
def test_the_model_keeps_its_statistics_and_seeds(classes):
    hidden = [layers.Dense(8, "gelu"), layers.BatchNormalization(), layers.Dropout(0.1)]
    model = keras.Sequential([keras.Input((2,)), *hidden, layers.Dense(classes)])
    before = [each.numpy() for each in model.variables]
    fix = tfaccel.lint(model, xla=False).fix(num_steps=3, keep=True)
    assert fix.cost.own
    for old, new in zip(before, model.variables, strict=True):
        np.testing.assert_array_equal(old, new.numpy())
    inputs = np.ones((3, 2), "float32")
    np.testing.assert_allclose(fix.model(inputs), model(inputs), atol=1e-6)


def test_each_replica_keeps_its_own_statistics():
    with strategy_of(2).scope():
        hidden = [layers.Dense(8, "gelu"), layers.BatchNormalization(name="norm")]
        model = keras.Sequential([keras.Input((4,)), *hidden, layers.Dense(5)])
        model.compile("sgd", "mse")
    own = model.get_layer("norm").moving_mean._value.values
    for number, each in enumerate(own):  # as each replica's rows would have it
        each.assign(np.full(8, 0.5 + number))
    before = [each.numpy() for each in own]
    assert not np.array_equal(*before)
    assert tfaccel.lint(model, xla=False).fix(num_steps=3).cost.own
    for old, new in zip(before, own, strict=True):
        np.testing.assert_array_equal(old, new.numpy())
    assert model.compiled


def test_what_a_layer_changes_of_its_weights_and_inputs_by_name():
    first, second = keras.Input((2,), name="a"), keras.Input((3,), name="b")
    x = layers.Concatenate()([first, second])
    x = layers.SpectralNormalization(layers.Dense(8))(x)
    x = layers.Dense(8, "gelu", activity_regularizer="l2", name="hidden")(x)
    model = keras.Model({"z": first, "b": second}, layers.Dense(5)(x))
    before = [each.numpy() for each in model.variables]
    assert tfaccel.lint(model, xla=False).fix(num_steps=3).cost.own
    for old, new in zip(before, model.variables, strict=True):
        np.testing.assert_array_equal(old, new.numpy())
    assert not model.losses


def nested(name="deep", outer=None):
    inner = keras.Sequential([keras.Input((2,)), layers.Dense(16, "gelu", name=name)])
    return [inner, layers.Dense(5, outer, name="logits" if name == "deep" else name)]


def test_layers_of_a_model_within_are_not_timed_and_the_head_is_padded():
    fix = tfaccel.lint(keras.Sequential([keras.Input((2,)), *nested()]), xla=False).fix(num_steps=3)
    assert fix.heads == ("logits padded from 5 to 8 units",)
    said = " ".join(str(fix).split())
    assert "cost of gelu in deep: not timed, because " in said
    assert "has no layer deep among its own" in said


def test_a_layer_within_is_not_taken_for_one_of_the_same_name():
    both = keras.Sequential([keras.Input((2,)), *nested("same", "softmax"), layers.Dense(8)])
    cost = tfaccel.lint(both, xla=False).fix(num_steps=3).cost
    assert "same is also the name of a layer in a model inside this one" in cost.not_timed


def test_what_cannot_be_timed_is_said_and_no_error():
    class Mine(keras.Model):
        def __init__(self):
            super().__init__(name="mine")
            self.hidden, self.out = layers.Dense(8, "gelu", name="hidden"), layers.Dense(8)

        def call(self, x):
            return self.out(self.hidden(x))

    data = (np.zeros((32, 2), "float32"), np.zeros(32, int))
    cost = tfaccel.lint(Mine(), data, batch_size=32, xla=False).fix().cost
    assert "not timed, because mine is a subclassed model" in str(cost)
    x = layers.Conv2D(8, 3, activation="gelu")(image := keras.Input((None, None, 3)))
    of_any_size = keras.Model(image, layers.Dense(8)(layers.GlobalAveragePooling2D()(x)))
    assert "takes ? x ? x 3" in tfaccel.lint(of_any_size, xla=False).fix().cost.not_timed


@pytest.mark.parametrize("wrong", [0, -1, 2.5, "x"])
def test_wrong_numbers_are_said(wrong):
    data = (np.zeros((32, 2), "float32"), np.zeros(32, int))
    with pytest.raises(UserError, match=r"^batch_size="):
        tfaccel.lint(model_of("gelu"), data, batch_size=wrong)
    with pytest.raises(UserError, match=r"^num_steps="):
        tfaccel.lint(model_of("gelu"), data, batch_size=32).fix(num_steps=wrong)
    with pytest.raises(UserError, match=r"^keep="):
        tfaccel.lint(model_of("gelu"), data, batch_size=32).fix(keep=wrong)
