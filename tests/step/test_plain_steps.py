"""Own steps that need no value of other replicas while they run, and those that do."""

import contextlib

import keras
import numpy as np
import pytest
import tensorflow as tf
from conftest import strategy_of
from programs import harness
from programs.harness import PROGRAMS, by_stock_keras, difference, here

from tfaccel.config import StepConfig
from tfaccel.keras_internals import row_operations
from tfaccel.keras_internals.one_replica import as_replica
from tfaccel.keras_internals.replica import local_replicas
from tfaccel.runtime.cluster import Cluster
from tfaccel.step import compile_model, plain_steps
from tfaccel.training import methods

X = np.random.default_rng(0).normal(size=(10, 4)).astype(np.float32)
Y = np.random.default_rng(1).normal(size=(10, 2)).astype(np.float32)


class Own(keras.Model):
    """A step of one's own, of which tests change a part."""

    def __init__(self):
        super().__init__()
        self.dense = keras.layers.Dense(2)
        self.dense.build((None, 4))
        self.kept = self.add_weight(shape=(), trainable=False, initializer="zeros")
        self.copy = self.add_weight(shape=(4, 2), trainable=False, initializer="zeros")
        self.tracker = keras.metrics.Mean(name="loss")
        self.built = True

    @property
    def metrics(self):
        return [self.tracker]

    def call(self, x):
        return self.dense(x)

    def loss_of(self, x, y):
        return tf.reduce_mean(tf.square(self(x) - y))

    def changed(self, loss, gradients):
        return gradients

    def behind(self, loss):
        return {}

    def weight_of(self, x):
        return None

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = self.loss_of(x, y)
        gradients = self.changed(loss, tape.gradient(loss, self.trainable_variables))
        self.optimizer.apply_gradients(zip(gradients, self.trainable_variables, strict=True))
        self.tracker.update_state(loss, sample_weight=self.weight_of(x))
        return {"loss": self.tracker.result()} | self.behind(loss)


def squares(self, x, y):
    return tf.square(self(x) - y)


def assigning(self, x, y):
    self.kept.assign(loss := tf.reduce_mean(squares(self, x, y)))
    return loss


def copying(self, loss):
    self.copy.assign(self.dense.kernel)
    return {}


def num_rows(self, x):
    return x.shape[0]


@tf.custom_gradient
def clipped(x):
    return tf.identity(x), lambda upstream: tf.clip_by_value(upstream, -0.1, 0.1)


def mean(self, x, y):
    return tf.reduce_mean(squares(self, x, y))


PLAIN = {
    "mean": {},
    "sum by rows": {"loss_of": lambda self, x, y: tf.reduce_sum(squares(self, x, y)) / x.shape[0]},
    "two means": {"loss_of": lambda self, x, y: mean(self, x, y) - 0.5 * tf.reduce_mean(self(x))},
    "scaled": {"changed": lambda self, loss, gradients: [0.5 * each for each in gradients]},
    "counter behind": {"behind": lambda self, loss: {"n": self.kept.assign_add(1.0) * 0.0}},
    "log": {"behind": lambda self, loss: {"twice": 2.0 * loss}},
}
NOT_PLAIN = {
    "root": ({"loss_of": lambda self, x, y: tf.sqrt(mean(self, x, y))}, "goes into Sqrt"),
    "sum": ({"loss_of": lambda self, x, y: tf.reduce_sum(squares(self, x, y))}, "no mean"),
    "product": ({"loss_of": lambda self, x, y: mean(self, x, y) ** 2}, "goes into"),
    "largest": ({"loss_of": lambda self, x, y: tf.reduce_max(squares(self, x, y))}, "max"),
    "masked": (
        {"loss_of": lambda self, x, y: tf.reduce_mean(tf.boolean_mask(self(x), y[:, 0] > 0))},
        "a mask has chosen",
    ),
    "centred": (
        {"loss_of": lambda self, x, y: tf.reduce_mean((y - tf.reduce_mean(y, 0)) * self(x))},
        "goes into Sub",
    ),
    "clipped": (
        {"changed": lambda self, loss, grads: [tf.clip_by_norm(each, 0.1) for each in grads]},
        "a mean over rows goes into",
    ),
    "own gradient": ({"loss_of": lambda self, x, y: mean(self, clipped(x), y)}, "custom_gradient"),
    "assigned": ({"loss_of": assigning}, "what depends on rows"),
    "copied behind": (
        {"behind": copying},
        "behind it",
    ),
    "sum as a log": ({"behind": lambda self, loss: {"n": loss * 5.0, "r": loss * loss}}, "Mul"),
    "result used": (
        {"behind": lambda self, loss: {"root": tf.sqrt(self.tracker.result())}},
        "computed from the result",
    ),
}


def compiled(methods_of: dict, **settings) -> tuple:
    """Returns a compiled model on two replicas, with some methods of its own."""
    strategy = strategy_of(2)
    with strategy.scope():
        keras.utils.set_random_seed(3)
        model = type("Changed", (Own,), methods_of)()
    config = StepConfig(**settings)
    compile_model(model, strategy, config, xla=True, optimizer=keras.optimizers.SGD(0.1))
    methods.extend(model, config, guard=contextlib.nullcontext, cluster=Cluster())
    return model, strategy


def why_not(methods_of: dict, *, in_parts: bool = False) -> str | None:
    model, strategy = compiled(methods_of)
    replica, step = local_replicas(strategy)[0], row_operations.noticed(model.train_step)
    batch = tf.constant(X[:5]), tf.constant(Y[:5])
    with as_replica(model, replica):
        settings = {"in_parts": in_parts, "has_padding": False}
        return plain_steps.analyzed(model, step, replica, batch, **settings)[1]


@pytest.mark.parametrize("name", PLAIN)
def test_a_plain_step_is_known(name):
    assert why_not(PLAIN[name]) is None


@pytest.mark.parametrize("name", NOT_PLAIN)
def test_a_step_that_needs_joined_values_is_not_plain(name):
    methods_of, words = NOT_PLAIN[name]
    assert words in (why_not(methods_of) or "plain")


def test_a_mean_of_parts_needs_their_rows():
    assert "the metric loss" in why_not({}, in_parts=True)
    traced = lambda self, x: tf.shape(x)[0]  # noqa: E731
    for rows in (num_rows, traced, lambda self, x: 2 * tf.shape(x)[0]):
        assert why_not({"weight_of": rows}, in_parts=True) is None


def fitted(model) -> tuple:
    logs = model.fit(X, Y, batch_size=5, epochs=2, shuffle=False, verbose=0).history
    return logs["loss"], [keras.ops.convert_to_numpy(each) for each in model.weights]


@pytest.mark.parametrize("parts", [2, pytest.param(1, marks=pytest.mark.slow)])
def test_a_plain_step_keeps_xla_on_two_uneven_cpu_replicas(parts):
    changes = {} if parts == 1 else {"weight_of": num_rows}
    model, _ = compiled(changes, accumulation_steps=parts)
    losses, weights = fitted(model)
    assert model.train_function.xla
    keras.utils.set_random_seed(3)
    stock = type("Changed", (Own,), changes)()
    stock.compile(keras.optimizers.SGD(0.1), jit_compile=False)
    wanted_losses, wanted = fitted(stock)
    np.testing.assert_allclose(losses, wanted_losses, rtol=1e-5)
    for got, each in zip(weights, wanted, strict=True):
        np.testing.assert_allclose(got, each, rtol=1e-5, atol=1e-6)


OWN_AND_PLAIN = (
    "VAE with trackers",
    "beta-VAE with warm-up",
    "energy-based model",
    "sum by x.shape[0]",
    "sum by tf.shape(x)[0], uneven",
    "sum of the columns' means",
    "weight decay by hand",
    "weight regularizers, own step",
    "masked autoencoder",
    "uncertainty weights",
    "gradient centralization",
    "physics-informed network",
    "parts in turns",
)


@pytest.mark.slow
@pytest.mark.parametrize("num_replicas", [2, 3])
@pytest.mark.parametrize("name", OWN_AND_PLAIN)
def test_a_plain_program_trains_with_xla_as_with_stock_keras(name, num_replicas, monkeypatch):
    models, make = [], harness.made
    monkeypatch.setattr(harness, "made", lambda each: models.append(make(each)) or models[-1])
    program = PROGRAMS[name]
    figure, where = difference(
        here(program, strategy_of(num_replicas), xla=True), by_stock_keras(program)
    )
    assert models[0].train_function.xla
    assert figure <= program.rtol, where
