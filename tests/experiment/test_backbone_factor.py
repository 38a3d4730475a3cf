"""Two learning rates, compared with two optimizers of Keras and gradients of the whole batch."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from conftest import compiled

from tfaccel import StepConfig, UserError
from tfaccel.config import default_config, parse
from tfaccel.experiment.models.frozen import backbone_of
from tfaccel.experiment.train import prepare
from tfaccel.keras_internals.optimizers import scale_rate

layers = keras.layers
FACTOR, STEPS = 0.25, 4
LOSS = keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def network(dtype="float32"):
    keras.utils.set_random_seed(0)
    inner = keras.Sequential([keras.Input((8,)), layers.Dense(8, dtype=dtype)], name="inner")
    parts = [layers.Dense(8, "tanh", dtype=dtype), inner, layers.Dense(3, dtype="float32")]
    return keras.Sequential([keras.Input((5,), dtype="float32"), *parts])


def batches():
    draw = np.random.default_rng(0)
    x = draw.normal(size=(8 * STEPS, 5)).astype(np.float32)
    return x, draw.integers(0, 3, 8 * STEPS)


def reference(make, clipnorm=None):
    """The weights after Keras's optimizers, one for the backbone and one for the head."""
    model, (x, y) = network(), batches()
    body = [each for layer in backbone_of(model) for each in layer.trainable_weights]
    head = model.layers[-1].trainable_weights
    optimizers = [(make(FACTOR), body), (make(1.0), head)]
    for begin in range(0, len(x), 8):
        with tf.GradientTape() as tape:
            value = LOSS(y[begin : begin + 8], model(x[begin : begin + 8], training=True))
        gradients = tape.gradient(value, [each.value for each in body + head])
        if clipnorm:
            gradients, _ = tf.clip_by_global_norm(gradients, clipnorm)
        parts = gradients[: len(body)], gradients[len(body) :]
        for (optimizer, weights), part in zip(optimizers, parts, strict=True):
            optimizer.apply(part, weights)
    return model.get_weights()


def trained(make, num_replicas, *, dtype="float32", xla=False, **step):
    found = []

    def build():
        found.append(network(dtype))
        return found[-1]

    def optimizer():
        made = make(1.0)
        weights = [each for layer in backbone_of(found[-1]) for each in layer.trainable_weights]
        scale_rate(made, weights, FACTOR)
        return made

    config = StepConfig(**step)
    settings = {"optimizer": optimizer, "loss": LOSS, "config": config, "xla": xla}
    model = compiled(build, num_replicas, **settings)
    x, y = batches()
    model.fit(x, y, batch_size=8, shuffle=False, verbose=0)
    return model


OPTIMIZERS = {
    "sgd": lambda factor: keras.optimizers.SGD(0.1 * factor, momentum=0.9, weight_decay=0.05),
    "adamw": lambda factor: keras.optimizers.AdamW(0.02 * factor, weight_decay=0.3),
    "lamb": lambda factor: keras.optimizers.Lamb(0.02 * factor),
    "rmsprop": lambda factor: keras.optimizers.RMSprop(0.01 * factor),
    "lion": lambda factor: keras.optimizers.Lion(0.01 * factor, weight_decay=0.2),
    "muon": lambda factor: keras.optimizers.Muon(
        0.02 * factor, weight_decay=0.2, adam_weight_decay=0.1
    ),
}


@pytest.mark.parametrize(
    "name",
    [
        each if each in ("sgd", "adamw") else pytest.param(each, marks=pytest.mark.slow)
        for each in OPTIMIZERS
    ],
)
def test_the_backbone_learns_as_with_an_optimizer_of_its_own(name):
    model = trained(OPTIMIZERS[name], 1)
    for mine, truth in zip(model.get_weights(), reference(OPTIMIZERS[name]), strict=True):
        np.testing.assert_allclose(mine, truth, rtol=0, atol=2e-6)


@pytest.mark.parametrize(
    "settings",
    [
        {"accumulation_steps": 2, "xla": True},
        pytest.param({"accumulation_steps": 2}, marks=pytest.mark.slow),
        pytest.param({"xla": True}, marks=pytest.mark.slow),
    ],
)
def test_in_one_function_and_with_accumulation_too(settings):
    model = trained(OPTIMIZERS["adamw"], 1, **settings)
    for mine, truth in zip(model.get_weights(), reference(OPTIMIZERS["adamw"]), strict=True):
        np.testing.assert_allclose(mine, truth, rtol=0, atol=2e-6)


@pytest.mark.parametrize("accumulation_steps", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_on_two_replicas_too(accumulation_steps):
    model = trained(OPTIMIZERS["adamw"], 2, accumulation_steps=accumulation_steps)
    for mine, truth in zip(model.weights, reference(OPTIMIZERS["adamw"]), strict=True):
        for each in model.distribute_strategy.experimental_local_results(mine.value):
            np.testing.assert_allclose(each, truth, rtol=0, atol=2e-6)


def test_all_gradients_together_are_clipped_before():
    def clipped(factor):
        return keras.optimizers.SGD(factor, global_clipnorm=0.05)

    model = trained(clipped, 1)
    truth = reference(keras.optimizers.SGD, clipnorm=0.05)
    for mine, other in zip(model.get_weights(), truth, strict=True):
        np.testing.assert_allclose(mine, other, rtol=0, atol=2e-6)


@pytest.mark.parametrize("loss_scale", ["dynamic", pytest.param(128.0, marks=pytest.mark.slow)])
def test_with_float16_and_a_loss_scale_the_steps_are_as_small(loss_scale):
    model = trained(OPTIMIZERS["adamw"], 1, dtype="mixed_float16", loss_scale=loss_scale)
    begun, truth = network().get_weights(), reference(OPTIMIZERS["adamw"])
    for mine, other, before in zip(model.get_weights(), truth, begun, strict=True):
        np.testing.assert_allclose(mine - before, other - before, rtol=0, atol=8e-3)
        assert np.abs(mine - before).max() < 1.5 * np.abs(other - before).max()


def digits(**changes):
    config = default_config()
    config.data.image_size, config.data.channels = (8, 8), 1
    config.update_from_flattened_dict(changes)
    return parse(config)


def test_a_config_asks_for_it(setup, caplog):
    changes = {"train.backbone_factor": 0.1, "train.optimizer": "sgd", "train.decay": "cosine"}
    changed = []
    for factor in (1.0, 0.1):
        changes["train.backbone_factor"] = factor
        train, _, model = prepare(setup(xla=False), digits(**changes))
        before = model.get_weights()
        model.fit(train, epochs=1, steps_per_epoch=1, verbose=0)
        changed.append([new - old for new, old in zip(model.get_weights(), before, strict=True)])
    assert "0.1 times as large for 6 weights of the backbone" in caplog.text
    for place, (whole, tenth) in enumerate(zip(*changed, strict=True)):
        share = 1.0 if place >= len(before) - 2 else 0.1  # one step of SGD: as the rate
        np.testing.assert_allclose(tenth, share * whole, rtol=0, atol=1e-6)


def test_a_factor_without_a_layer_to_train_is_refused(setup):
    config = digits(**{"train.backbone_factor": 0.1, "model.freeze": "backbone"})
    with pytest.raises(UserError, match="trains no layer of its backbone"):
        prepare(setup(xla=False), config)
