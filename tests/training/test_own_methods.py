"""Methods of the user's own: `fit`, `evaluate`, `predict` and `compile` of any signature."""

import functools

import keras
import numpy as np
import pytest
from conftest import compiled

from tfaccel.training.callbacks.finite import NonFiniteError

X = np.random.default_rng(0).normal(size=(8, 3)).astype("float32")
Y = X.sum(axis=1, keepdims=True)


class Base(keras.Model):
    """One dense layer, whose weights begin as ones."""

    def __init__(self):
        super().__init__()
        self.dense = keras.layers.Dense(1, kernel_initializer="ones")

    def call(self, x):
        return self.dense(x)


class Keywords(Base):
    """As KerasHub's tasks have it."""

    def fit(self, x=None, y=None, **kwargs):
        return super().fit(x, y, **kwargs)

    def evaluate(self, x, y=None, **kwargs):
        return super().evaluate(x, y, **kwargs)

    def predict(self, *inputs, **kwargs):
        return super().predict(*inputs, **kwargs)


class Positions(Base):
    """Which passes all on by position."""

    def fit(self, *args, **kwargs):
        return super().fit(*args, **kwargs)


class NoCallbacks(Base):
    """Whose `fit` takes data alone, as one pair."""

    def fit(self, data, batch_size=4, verbose=0, shuffle=False):
        return super().fit(*data, batch_size, 1, verbose, shuffle=shuffle)

    def predict(self, data):
        return super().predict(data, verbose=0)


class Twice(Base):
    """Which warms up first, and names Keras's class."""

    def fit(self, x, y, **kwargs):
        self.dense.trainable = True
        keras.Model.fit(self, x, y, **kwargs)
        return super().fit(x, y, **kwargs)


SETTINGS = {"batch_size": 4, "shuffle": False, "verbose": 0}
FITS = {
    Keywords: lambda model, x: model.fit(x, Y, **SETTINGS),
    Positions: lambda model, x: model.fit(x, Y, 4, 1, 0, [], shuffle=False),
    NoCallbacks: lambda model, x: model.fit((x, Y)),
    Twice: lambda model, x: model.fit(x, Y, **SETTINGS),
}


def _compiled(kind, num_replicas):
    optimizer = keras.optimizers.SGD(0.1)
    return compiled(kind, num_replicas, optimizer=optimizer, loss="mse", xla=False)


@functools.cache
def _by_stock_keras():
    """After one fit and after two: the loss, the weights, the answers and the loss of a test."""
    stock = Base()
    stock.compile(keras.optimizers.SGD(0.1), "mse", jit_compile=False)
    found = []
    for _ in range(2):
        loss = stock.fit(X, Y, **SETTINGS).history["loss"]
        answers = stock.predict(X, verbose=0)
        tested = stock.evaluate(X, Y, verbose=0)
        found.append((loss, stock.get_weights()[0], answers, tested))
    return found


@pytest.mark.parametrize(
    ("kind", "num_replicas"),
    [
        *[(Twice, 2), (Keywords, 1), (Positions, 1), (NoCallbacks, 1)],
        *(
            pytest.param(*each, marks=pytest.mark.slow)
            for each in [(Twice, 1), (Keywords, 2), (Positions, 2), (NoCallbacks, 2)]
        ),
    ],
)
def test_a_fit_of_the_models_own_trains_as_with_stock_keras(kind, num_replicas):
    loss, weight, answers, tested = _by_stock_keras()[kind is Twice]
    model = _compiled(kind, num_replicas)
    np.testing.assert_allclose(FITS[kind](model, X).history["loss"], loss, rtol=1e-5)
    np.testing.assert_allclose(model.get_weights()[0], weight, rtol=1e-4)
    if "predict" in vars(kind):  # of the others it is Keras's own
        settings = {} if kind is NoCallbacks else {"verbose": 0}
        np.testing.assert_allclose(model.predict(X, **settings), answers, rtol=1e-4)
    if "evaluate" in vars(kind):
        np.testing.assert_allclose(model.evaluate(X, Y, verbose=0), tested, rtol=1e-4)


@pytest.mark.parametrize(
    "kind", [pytest.param(Keywords, marks=pytest.mark.slow), Positions, NoCallbacks, Twice]
)
def test_a_fit_of_the_models_own_names_what_is_not_finite(kind):
    with pytest.raises(NonFiniteError, match="not finite at step 2"):
        FITS[kind](_compiled(kind, 1), np.where(np.arange(8)[:, None] == 5, np.nan, X))


class Rows:
    """The rows, one by one."""

    def __len__(self):
        return len(X)

    def __getitem__(self, index):
        return X[index], Y[index]


@pytest.mark.parametrize("kind", [pytest.param(Keywords, marks=pytest.mark.slow), Positions])
def test_a_fit_of_the_models_own_saves_and_goes_on(kind, setup, tmp_path):
    def train(num_epochs):
        run = setup(xla=False)
        with run.scope():
            model = kind()
        run.compile(model, keras.optimizers.SGD(0.1), "mse")
        loader = run.examples(Rows(), global_batch_size=4)
        saved = run.checkpoints(tmp_path / str(kind.__name__))
        return model.fit(loader, epochs=num_epochs, callbacks=[saved], verbose=0)

    train(1)
    assert train(2).epoch == [0, 1]
