"""Layers that a config freezes."""

import keras
import numpy as np
import pytest
from conftest import compiled

from tfaccel import UserError
from tfaccel.config import default_config, parse
from tfaccel.experiment.models.frozen import freeze
from tfaccel.experiment.train import make_model

layers = keras.layers


def network():
    keras.utils.set_random_seed(0)
    inner = keras.Sequential([keras.Input((8,)), layers.Dense(8, name="deep")], name="inner")
    parts = [
        layers.Dense(8, name="conv1_a"),
        layers.BatchNormalization(name="conv1_bn"),
        layers.Dense(8, name="conv2_a"),
        inner,
        layers.ReLU(name="relu"),
        layers.Dense(3, name="logits"),
        layers.Activation("linear", name="last"),
    ]
    return keras.Sequential([keras.Input((5,)), *parts])


def trained_names(model):
    return [each.path.split("/")[-2] for each in model.trainable_weights][::2]


@pytest.mark.parametrize(
    ("names", "left"),
    [
        (("backbone",), ["logits"]),
        (("conv1_*",), ["conv2_a", "deep", "logits"]),
        (("conv2_a", "deep"), ["conv1_a", "conv1_bn", "logits"]),
        (("inner", "conv*"), ["logits"]),
    ],
)
def test_layers_of_these_names_are_not_trained(names, left, caplog):
    caplog.set_level("INFO", "tfaccel")
    model = network()
    freeze(model, names)
    assert trained_names(model) == left
    frozen = model.count_params() - sum(each.numpy().size for each in model.trainable_weights)
    assert f"{frozen:,} of {model.count_params():,} parameters are frozen" in caplog.text


@pytest.mark.parametrize(
    ("names", "words"),
    [
        (("conv3_*",), "has no layer 'conv3_*' with weights"),
        (("logist",), "did you mean 'logits'?"),
        (("relu",), "has no layer 'relu' with weights"),
        (("backbone", "logits"), "model.freeze=backbone,logits leaves no weight"),
    ],
)
def test_mistakes_are_one_sentence(names, words):
    with pytest.raises(UserError) as error:
        freeze(network(), names)
    assert words in str(error.value)


@pytest.mark.parametrize("num_replicas", [1, 2])
def test_frozen_weights_and_statistics_stay_and_the_head_is_trained(num_replicas):
    def make():
        model = network()
        freeze(model, ("backbone",))
        return model

    model = compiled(
        make,
        num_replicas,
        optimizer=keras.optimizers.SGD(0.5),
        xla=False,
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    )
    before = [each.numpy() for each in model.weights]
    draw = np.random.default_rng(0)
    x = draw.normal(3.0, 2.0, (16, 5)).astype(np.float32)
    model.fit(x, draw.integers(0, 3, 16), batch_size=8, epochs=2, verbose=0)
    for weight, old in zip(model.weights, before, strict=True):
        if "logits" in weight.path:
            assert np.abs(weight.numpy() - old).max() > 1e-3, weight.path
        else:
            np.testing.assert_array_equal(weight.numpy(), old, err_msg=weight.path)


def test_a_config_freezes(setup, caplog):
    config = default_config()
    config.data.image_size = (8, 8)
    config.data.global_batch_size = 4
    config.model.freeze = "backbone"
    model = make_model(setup(xla=False), parse(config), num_outputs=3)
    assert [each.path.split("/")[-2] for each in model.trainable_weights] == ["logits"] * 2
    assert "frozen layers stay random" in caplog.text
