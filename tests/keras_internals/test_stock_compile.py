"""A model of a run that `model.compile` compiled: on several replicas, `fit` says so."""

import keras
import numpy as np
import pytest
from conftest import strategy_of

from tfaccel import UserError
from tfaccel.config import StepConfig
from tfaccel.keras_internals import keras_methods
from tfaccel.step import compile_model

X = np.ones((4, 3), "float32")


@pytest.fixture
def make(monkeypatch):
    """Returns a model, in the scope of the run's strategy, and what is said."""
    said = []
    monkeypatch.setattr(keras_methods, "summary", lambda text, *words: said.append(text % words))

    def make(num_replicas):
        strategy = strategy_of(num_replicas)
        monkeypatch.setattr(keras_methods, "latest", lambda: strategy)
        with strategy.scope():
            return keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)], name="made"), said

    return make


def test_several_workers_need_run_compile(make, monkeypatch):
    model, _ = make(2)
    monkeypatch.setattr(keras_methods, "num_local", lambda strategy: 1)
    model.compile("sgd", "mse")
    with pytest.raises(UserError, match=r"^fit of model made: the model was compiled by model.com"):
        model.fit(X, X[:, :1], verbose=0)
    with pytest.raises(UserError, match="with the same arguments, in place of"):
        model.train_on_batch(X, X[:, :1])


def test_predict_needs_no_compile(make, monkeypatch):
    model, said = make(2)
    monkeypatch.setattr(keras_methods, "num_local", lambda strategy: 1)
    assert model.predict(X, verbose=0).shape == (4, 1)
    assert not said


def test_several_replicas_of_a_process_train_with_one_line(make):
    model, said = make(2)
    model.compile("sgd", "mse")
    for _ in range(2):
        model.fit(X, X[:, :1], verbose=0)
    (line,) = said
    assert line.startswith("fit of model made: the model was compiled by model.compile, so Keras's")


def test_a_plain_compile_after_run_compile_is_noticed(make):
    model, said = make(2)
    compile_model(model, model.distribute_strategy, StepConfig(), "sgd", "mse", xla=False)
    model.fit(X, X[:, :1], verbose=0)
    assert not said
    model.compile("sgd", "mse")
    model.evaluate(X, X[:, :1], verbose=0)
    assert len(said) == 1


def test_one_replica_says_nothing(make):
    model, said = make(1)
    model.compile("sgd", "mse")
    model.evaluate(X, X[:, :1], verbose=0)
    assert not said
