"""The hint that validation guesses while training goes well: when, and what it says."""

import types

import keras
import numpy as np
import pytest
from keras import layers

from tfaccel.training.callbacks.near_chance import NearChance, is_near_chance, most_frequent

GOOD = {"accuracy": 0.78, "val_accuracy": 0.11}


def loader(*, position=0, num_batches=8, labels=None):
    source = types.SimpleNamespace(labels=labels)
    return types.SimpleNamespace(
        position=position,
        num_batches=num_batches,
        num_examples=512,
        data=types.SimpleNamespace(source=source),
    )


def model(*, momentum=0.99, classes=10, trainable=True, optimizer="sgd"):
    x = inputs = keras.Input((4,))
    if momentum:
        x = layers.BatchNormalization(momentum=momentum, trainable=trainable)(x)
    made = keras.Model(inputs, layers.Dense(classes)(x))
    made.compile(optimizer, "sparse_categorical_crossentropy")
    return made


def told(caplog, made, logs, *, epochs=6, labels=None, num_batches=8):
    """Returns what is said in a run of so many epochs, each with its logs."""
    train = loader(num_batches=num_batches)
    callback = NearChance(train, loader(labels=labels))
    callback.set_model(made)
    callback.set_params({"epochs": epochs})
    for epoch, each in enumerate(logs):
        train.position = (epoch + 1) * num_batches
        callback.on_epoch_end(epoch, dict(each))
    return [each.message for each in caplog.records if each.name == "tfaccel"]


# Training, validation, chance, and whether that is near chance.
CASES = [
    (0.78, 0.10, 0.1, True),
    (0.78, 0.02, 0.1, True),  # below chance, as with classes in another order
    (0.78, 0.30, 0.1, False),
    (0.78, 0.60, 0.1, False),
    (0.20, 0.10, 0.1, False),  # nothing is learnt yet
    (0.95, 0.55, 0.5, True),
    (0.95, 0.80, 0.5, False),
    (0.60, 0.50, 0.5, False),
    (0.50, 0.05, 0.001, False),  # fifty times as good as guessing
    (0.50, 0.001, 0.001, True),
]


@pytest.mark.parametrize(("train", "test", "chance", "expected"), CASES)
def test_what_is_near_chance(train, test, chance, expected):
    assert is_near_chance(train, test, chance=chance) is expected


def test_batch_norm_with_few_updates_is_named_once_with_momentum_steps_and_cure(caplog):
    (said,) = told(caplog, model(), [GOOD] * 6)
    assert said == (
        "training: accuracy is 0.78, but val_accuracy is 0.11, near the 0.10 of guessing. A likely "
        "cause is batch norm, which uses moving averages in validation: with momentum=0.99, 85% of "
        "each average is still the value from before training after 16 steps. Use "
        "BatchNormalization(momentum=0.9), more epochs, or a smaller batch (more steps per epoch)"
    )


def test_the_momentum_that_is_in_use_is_not_advised(caplog):
    (said,) = told(caplog, model(momentum=0.9), [GOOD] * 2)
    assert "with momentum=0.9, 19% of each average" in said
    assert "Use more epochs, or a smaller batch (more steps per epoch)" in said


def test_a_run_that_is_long_enough_says_so(caplog):
    (said,) = told(caplog, model(), [GOOD] * 2, epochs=90)
    assert said.endswith(". After all 90 epochs it will be 0%")


@pytest.mark.parametrize(
    "settings",
    [{"momentum": None}, {"momentum": 0.5}, {"trainable": False}],
    ids=["none", "quick", "frozen"],
)
def test_other_causes_are_named_where_batch_norm_is_none(caplog, settings):
    (said,) = told(caplog, model(**settings), [GOOD] * 3)
    assert "batch norm" not in said
    assert "Possible causes: the validation images are prepared differently" in said
    assert "classes are in another order" in said


def test_averaged_weights_are_named(caplog):
    optimizer = keras.optimizers.SGD(use_ema=True, ema_momentum=0.999)
    (said,) = told(caplog, model(momentum=None, optimizer=optimizer), [GOOD] * 3)
    assert "A likely cause is averaged weights: with momentum=0.999, 98% of each" in said


def test_one_such_epoch_among_others_is_no_cause_for_words(caplog):
    fine = {"accuracy": 0.8, "val_accuracy": 0.7}
    assert told(caplog, model(), [GOOD, fine, GOOD, fine], epochs=4) == []
    assert len(told(caplog, model(), [GOOD], epochs=1)) == 1  # there is no other


@pytest.mark.parametrize("logs", [{}, {"accuracy": 0.9}, {"loss": 1.0, "val_loss": 9.0}])
def test_without_two_accuracies_nothing_is_said(caplog, logs):
    assert told(caplog, model(), [logs] * 3) == []


def test_a_frequent_class_is_what_guessing_comes_to(caplog):
    labels = np.array([0] * 8 + [1] * 2)
    assert most_frequent(labels) == 0.8
    assert most_frequent(None) == 0.0
    logs = {"accuracy": 0.97, "val_accuracy": 0.8}
    (said,) = told(caplog, model(classes=2), [logs] * 2, labels=labels)
    assert "near the 0.80 of guessing" in said


@pytest.mark.slow  # it trains
def test_batch_norm_is_the_cause_where_it_is_named():
    """With its batches' own statistics, the same model is as good in validation as in training."""
    keras.utils.set_random_seed(1)
    draw, shape = np.random.default_rng(0), (16, 16, 3)
    patterns = np.random.default_rng(7).normal(0, 25, (10, *shape))
    labels = draw.integers(0, 10, 768)
    images = (draw.normal(120, 40, (768, *shape)) + patterns[labels]).clip(0, 255) / 255
    x = inputs = keras.Input(shape)
    for filters in (16, 32, 64):
        x = layers.Conv2D(filters, 3, padding="same", use_bias=False)(x)
        x = layers.MaxPooling2D()(layers.ReLU()(layers.BatchNormalization()(x)))
    x = layers.Dense(64)(layers.Flatten()(x))
    made = keras.Model(inputs, layers.Dense(10)(layers.ReLU()(layers.BatchNormalization()(x))))
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    made.compile("adam", loss, metrics=["accuracy"])
    fitted = made.fit(images[:512], labels[:512], batch_size=64, epochs=4, verbose=0)
    guessed = made.evaluate(images[512:], labels[512:], verbose=0)[1]
    own = np.argmax(made(images[512:], training=True), -1) == labels[512:]
    assert is_near_chance(fitted.history["accuracy"][-1], guessed, chance=0.1)  # seen: 1.0, 0.14
    assert own.mean() > 0.7  # seen: 0.9
