"""Stateful recurrent layers: each replica goes on with its own rows, as stock Keras does."""

import contextlib

import keras
import numpy as np
import pytest
import tensorflow as tf
from conftest import strategy_of
from keras import layers

from tfaccel.common.errors import UserError
from tfaccel.config import StepConfig
from tfaccel.data.deferred import Deferred
from tfaccel.keras_internals.stateful import states_of
from tfaccel.keras_internals.variables import components
from tfaccel.runtime.cluster import Cluster
from tfaccel.step import compile_model
from tfaccel.training import methods

KINDS = {
    "LSTM": lambda: layers.LSTM(3, stateful=True),
    "GRU": lambda: layers.GRU(3, stateful=True),
    "SimpleRNN": lambda: layers.SimpleRNN(3, stateful=True),
    "Bidirectional": lambda: layers.Bidirectional(layers.LSTM(3, stateful=True)),
    "cells": lambda: layers.RNN([layers.GRUCell(3), layers.GRUCell(2)], stateful=True),
}


def data(rows):
    draw = np.random.default_rng(0)
    x = draw.normal(size=(3 * rows, 4, 2)).astype(np.float32)
    return x, draw.normal(size=(3 * rows, 1)).astype(np.float32)


def model_of(kind, rows):
    keras.utils.set_random_seed(3)
    inputs = keras.Input(batch_shape=(rows, 4, 2))
    return keras.Model(inputs, layers.Dense(1)(KINDS[kind]()(inputs)))


def compiled(kind, rows, num_replicas, *, xla=False, **settings):
    if num_replicas == 0:
        model = model_of(kind, rows)
        model.compile(loss="mse", optimizer="sgd", jit_compile=False)
        return model
    strategy = strategy_of(num_replicas)
    with strategy.scope():
        model = model_of(kind, rows)
    compile_model(model, strategy, StepConfig(), xla=xla, loss="mse", optimizer="sgd", **settings)
    methods.extend(model, StepConfig(), guard=contextlib.nullcontext, cluster=Cluster())
    return model


def reset(model):
    for each in model.layers:
        if hasattr(each, "reset_state"):
            each.reset_state()


def results(kind, rows, num_replicas, **settings):
    """Returns what training, evaluation and prediction give, one after the other, and the states.

    The states are reset once in between.
    """
    model = compiled(kind, rows, num_replicas, **settings)
    (x, y), found = data(rows), []
    fit = {"batch_size": rows, "shuffle": False, "verbose": 0}
    found += model.fit(x, y, epochs=2, **fit).history["loss"]
    found += [np.array(each) for each in states_of(model)]
    if kind != "cells":  # Keras cannot reset nested states
        reset(model)
    found += model.fit(x, y, **fit).history["loss"]
    found.append(model.evaluate(x, y, batch_size=rows, verbose=0))
    found.append(model.predict(x, batch_size=rows, verbose=0))
    found.append(model.predict(x, batch_size=rows, verbose=0))
    for each in states_of(model):
        first, *others = [value.numpy() for value in components(each)]
        for other in others:
            np.testing.assert_array_equal(other, first)
        found.append(first)
    return found + [np.array(each) for each in model.trainable_variables]


CASES = [
    pytest.param(
        kind,
        rows,
        num_replicas,
        xla,
        marks=[] if (kind, rows, num_replicas, xla) == ("LSTM", 5, 2, False) else pytest.mark.slow,
    )
    for kind in KINDS
    for rows, num_replicas, xla in [
        (5, 2, False),
        (6, 1, False),
        (6, 2, True),
        (6, 3, False),
        (7, 3, False),
    ]
]


@pytest.mark.parametrize(("kind", "rows", "num_replicas", "xla"), CASES)
def test_states_go_on_as_with_stock_keras(kind, rows, num_replicas, xla):
    wanted = results(kind, rows, 0)
    if kind == "LSTM":  # the same rows predict otherwise the second time
        assert np.abs(wanted[6] - wanted[7]).max() > 1e-4
    for value, expected in zip(results(kind, rows, num_replicas, xla=xla), wanted, strict=True):
        np.testing.assert_allclose(value, expected, rtol=1e-4, atol=1e-5)


class Deferring:
    """Gives three batches at once, which the step takes apart."""

    def __init__(self, x, y, rows, num_replicas):
        own = rows // num_replicas
        self._deferred = [
            Deferred(
                {
                    name: tf.constant(
                        each.reshape(3, rows, *each.shape[1:])[:, start : start + own]
                    )
                    for name, each in (("x", x), ("y", y))
                },
                {},
                pair,
            )
            for start in range(0, rows, own)
        ]

    def take(self, _num_steps, *, may_wait):
        deferred, self._deferred = self._deferred, None
        return deferred

    def __iter__(self):
        return iter(())


def pair(batch):
    return batch["x"], batch["y"]


def test_deferred_batches(in_one_function):
    """Of several steps in a function, as on the GPUs of one process."""
    theirs, (x, y) = compiled("LSTM", 6, 0), data(6)
    theirs.fit(x, y, batch_size=6, shuffle=False, verbose=0)
    model = compiled("LSTM", 6, 2, xla=True, steps_per_execution=3)
    model.train_function(Deferring(x, y, 6, 2))
    found = states_of(model) + model.trainable_variables
    for ours, wanted in zip(found, states_of(theirs) + theirs.trainable_variables, strict=True):
        np.testing.assert_allclose(np.array(ours), np.array(wanted), rtol=1e-4, atol=1e-5)


def test_deferred_batches_of_other_rows_say_so(in_one_function):
    model = compiled("LSTM", 6, 2, xla=True, steps_per_execution=3)
    with pytest.raises(UserError, match=r"has 2 rows on a replica.*has 3 for it"):
        model.train_function(Deferring(*data(4), 4, 2))


def test_deferred_batches_need_equal_shares(in_one_function):
    model = compiled("LSTM", 5, 2, xla=True, steps_per_execution=3)
    with pytest.raises(UserError, match="has 5 rows, which 2 replicas cannot share"):
        model.train_function(Deferring(*data(4), 4, 2))


def test_a_batch_that_is_not_full_says_so():
    model = compiled("LSTM", 6, 2)
    x, y = data(6)
    with pytest.raises(UserError, match=r"a batch has 4 rows.*has 6"):
        model.fit(x[:4], y[:4], batch_size=6, verbose=0)
