"""Subclassed models, of which Keras knows no inputs and outputs, train like all others."""

import functools

import keras
import numpy as np
import pytest
from conftest import compiled

X = np.random.default_rng(0).normal(size=(10, 3)).astype("float32")
Y = X.sum(axis=1, keepdims=True)


class Subclassed(keras.Model):
    """One dense layer, whose weights begin as ones."""

    def __init__(self, **settings):
        super().__init__(**settings)
        self.dense = keras.layers.Dense(1, kernel_initializer="ones", bias_initializer="ones")

    def call(self, x, training=False):
        return self.dense(x)


class Rows:
    """The rows, one by one."""

    def __len__(self):
        return len(X)

    def __getitem__(self, index):
        return X[index], Y[index]


def _called(model):
    model(X[:1])
    return model


def _built(model):
    model.build((None, 3))
    return model


@functools.cache
def _by_stock_keras():
    """The weights after two epochs, and the loss of each."""
    model = Subclassed()
    model.compile(keras.optimizers.SGD(0.1), "mse", run_eagerly=True)
    history = model.fit(X, Y, batch_size=4, shuffle=False, epochs=2, verbose=0)
    return model.get_weights(), history.history["loss"]


def _as_made(model):
    return model


@pytest.mark.parametrize(
    ("prepare", "num_replicas"),
    [
        *[(_as_made, 2), (_called, 1), (_built, 1)],
        *(
            pytest.param(*each, marks=pytest.mark.slow)
            for each in [(_as_made, 1), (_called, 2), (_built, 2)]
        ),
    ],
)
def test_a_subclassed_model_trains_as_with_stock_keras(prepare, num_replicas):
    model = compiled(
        lambda: prepare(Subclassed()),
        num_replicas,
        optimizer=keras.optimizers.SGD(0.1),
        loss="mse",
        xla=False,
    )
    history = model.fit(X, Y, batch_size=4, shuffle=False, epochs=2, verbose=0)
    weights, losses = _by_stock_keras()
    np.testing.assert_allclose(history.history["loss"], losses, rtol=1e-5)
    for own, wanted in zip(model.get_weights(), weights, strict=True):
        np.testing.assert_allclose(own, wanted, rtol=1e-4)


def test_a_subclassed_model_trains_and_evaluates_on_a_loader(setup):
    run = setup(xla=False)
    with run.scope():
        model = Subclassed()
    run.compile(model, keras.optimizers.SGD(0.1), "mse")
    train = run.examples(Rows(), global_batch_size=4)
    test = run.examples(Rows(), global_batch_size=4)
    history = model.fit(train, validation_data=test, epochs=2, verbose=0)
    weights, losses = _by_stock_keras()
    np.testing.assert_allclose(history.history["loss"], losses, rtol=1e-5)
    loss = model.evaluate(test, verbose=0)
    np.testing.assert_allclose(loss, np.mean((X @ weights[0] + weights[1] - Y) ** 2), rtol=1e-4)
    assert model.predict(test, verbose=0).shape == (10, 1)
    run.compile(model, keras.optimizers.SGD(0.01), "mse")  # to train on, from these weights
    assert model.fit(train, epochs=1, verbose=0).history["loss"][0] < losses[0]


def test_a_subclassed_model_within_another_trains(setup):
    run = setup(xla=False)
    with run.scope():
        inner = _called(Subclassed())
        model = keras.Sequential([inner])  # not built: it knows no inputs either
    run.compile(model, keras.optimizers.SGD(0.1), "mse")
    train = run.examples(Rows(), global_batch_size=4)
    history = model.fit(train, validation_data=train, epochs=2, verbose=0)
    np.testing.assert_allclose(history.history["loss"], _by_stock_keras()[1], rtol=1e-5)
