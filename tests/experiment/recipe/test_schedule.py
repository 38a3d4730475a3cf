"""The learning rate of every step, against the same in plain Python."""

import math

import keras
import numpy as np
import pytest
import tensorflow as tf

from tfaccel import UserError
from tfaccel.config import TrainConfig
from tfaccel.experiment.recipe import describe, make_schedule

IMAGENET = {"optimizer": "sgd", "learning_rate": 0.1, "base_batch_size": 256, "epochs": 90}


def rate(train, step, *, global_batch_size, num_steps):
    """The recipe in words, in float64, a step at a time."""
    rate = train.learning_rate
    if train.base_batch_size:
        rate *= global_batch_size / train.base_batch_size
    first, end = round(train.warmup_epochs * num_steps), train.epochs * num_steps
    if step < first:
        return rate * (step + 1) / first
    if train.decay == "step":
        for epoch in train.decay_epochs:
            rate *= train.decay_factor if step >= round(epoch * num_steps) else 1
    if train.decay == "cosine":
        rate *= (1 + math.cos(math.pi * (step - first) / (end - first))) / 2
    if train.decay == "linear":
        rate *= 1 - (step - first) / (end - first)
    return rate


CASES = [
    {"decay": "constant"},
    {"decay": "constant", "warmup_epochs": 5},
    {"decay": "step", "warmup_epochs": 5},
    {"decay": "step", "decay_epochs": (0.5, 2.3), "decay_factor": 0.2},
    {"decay": "step", "decay_epochs": ()},
    {"decay": "cosine", "warmup_epochs": 2.5},
    {"decay": "linear", "warmup_epochs": 90 * 5 / 24},
    {"decay": "linear"},
    {"decay": "linear", "warmup_epochs": 90},
]


@pytest.mark.parametrize("xla", [False, True])
@pytest.mark.parametrize("settings", CASES, ids=str)
def test_every_step_of_90_epochs_is_that_of_plain_python(settings, xla):
    train = TrainConfig(**IMAGENET, **settings)
    size = {"global_batch_size": 1024, "num_steps": 5004}
    schedule = make_schedule(train, **size)
    steps = np.unique([*range(0, 90 * 5004, 37), *range(90 * 5004 - 400, 90 * 5004)])
    for epoch in (1, 2, 5, 15, 30, 60, 80):  # where a threshold off by one would show
        steps = np.union1d(steps, epoch * 5004 + np.arange(-3, 4))
    rates = tf.function(schedule, jit_compile=xla, autograph=False)(tf.constant(steps, tf.int64))
    expected = [rate(train, int(step), **size) for step in steps]
    assert rates.dtype == tf.float32
    np.testing.assert_allclose(rates, expected, rtol=1e-5 if "cosine" in str(train) else 1e-6)


def test_the_first_step_and_the_edges():
    schedule = make_schedule(
        TrainConfig(**IMAGENET, decay="step", warmup_epochs=5),
        global_batch_size=1024,
        num_steps=313,
    )
    for step, expected in {
        0: 0.4 / 1565,
        1: 0.8 / 1565,
        1564: 0.4,
        1565: 0.4,
        30 * 313 - 1: 0.4,
        30 * 313: 0.04,
        60 * 313: 0.004,
        80 * 313 - 1: 0.004,
        80 * 313: 0.0004,
        90 * 313 + 1000: 0.0004,
    }.items():
        assert float(schedule(step)) == pytest.approx(expected, rel=2e-7)


@pytest.mark.parametrize("decay", ["cosine", "linear"])
def test_it_comes_to_zero_after_the_last_step_and_stays(decay):
    schedule = make_schedule(TrainConfig(epochs=3, decay=decay), global_batch_size=8, num_steps=1)
    rates = [float(schedule(step)) for step in range(5)]
    assert rates[0] == np.float32(1e-3)
    assert rates[0] > rates[1] > rates[2] > 0
    assert rates[3:] == [0, 0]


def test_steps_beyond_what_float32_counts_are_told_apart():
    total = 2**26
    train = TrainConfig(epochs=2, decay="step", decay_epochs=(1,))
    schedule = make_schedule(train, global_batch_size=8, num_steps=total // 2)
    rates = [float(schedule(total // 2 + each)) for each in (-1, 0, 1)]
    assert rates == pytest.approx([1e-3, 1e-4, 1e-4], rel=1e-6)


def test_an_optimizer_follows_it_and_a_resumed_one_goes_on():
    train = TrainConfig(learning_rate=1.0, epochs=1, decay="linear")
    schedule = make_schedule(train, global_batch_size=8, num_steps=4)
    weights = []
    for first in (0, 2):
        variable = keras.Variable(0.0 if first == 0 else weights[1])
        optimizer = keras.optimizers.SGD(schedule)
        optimizer.build([variable])
        optimizer.iterations.assign(first)
        for _ in range(first, 4):
            optimizer.apply([tf.constant(-1.0)], [variable])
            weights.append(float(variable))
    assert weights[:4] == [1, 1.75, 2.25, 2.5]
    assert weights[4:] == weights[2:4]


def test_it_is_written_with_an_optimizer_and_read_again():
    train = TrainConfig(**IMAGENET, decay="step", warmup_epochs=5)
    schedule = make_schedule(train, global_batch_size=512, num_steps=10)
    optimizer = keras.optimizers.SGD(schedule)
    read = keras.optimizers.deserialize(keras.optimizers.serialize(optimizer))
    assert read._learning_rate.get_config() == schedule.get_config()
    assert float(read._learning_rate(600)) == float(schedule(600))


# What is in the log at the start.
LINES = [
    (
        {"decay": "step", "warmup_epochs": 5},
        "learning rate: 0.1 x 1024/256 = 0.4, step; 0.0002556 at step 0, 0.4 at step 1565 "
        "(epoch 5), 0.04 at step 9390 (epoch 30), 0.004 at step 18780 (epoch 60), 0.0004 at step "
        "25040 (epoch 80), 0.0004 at step 28169",
    ),
    (
        {"decay": "linear"},
        "learning rate: 0.1 x 1024/256 = 0.4, linear; 0.4 at step 0, 0.2 at step 14085 "
        "(epoch 45), 0.0000142 at step 28169",
    ),
    ({"base_batch_size": None}, "learning rate: 0.1, constant"),
]


@pytest.mark.parametrize(("settings", "line"), LINES, ids=["step", "linear", "constant"])
def test_it_is_said_in_numbers(settings, line):
    train, size = TrainConfig(**IMAGENET | settings), {"global_batch_size": 1024, "num_steps": 313}
    assert describe(train, make_schedule(train, **size), **size) == line


def test_a_decay_before_the_end_of_warm_up_is_refused():
    train = TrainConfig(epochs=90, decay="step", decay_epochs=(3, 6), warmup_epochs=5)
    with pytest.raises(UserError, match=r"decay_epochs=\(3, 6\) with warmup_epochs=5"):
        make_schedule(train, global_batch_size=256, num_steps=10)
