"""Several models in one process, as in a notebook: TensorFlow warns of no function of ours."""

import types

import keras
import numpy as np
import pytest
import tensorflow as tf
from conftest import compiled

from tfaccel.training.replica_checksums import Audit

X = np.ones((4, 3), "float32")


@pytest.fixture(autouse=True)
def listening(caplog):
    logger = tf.get_logger()
    logger.addHandler(caplog.handler)
    yield
    logger.removeHandler(caplog.handler)


def _model():
    def make():
        return keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])

    return compiled(make, 1, optimizer="sgd", loss="mse", xla=False)


def test_predictions_of_many_models(caplog):
    for _ in range(6):  # TensorFlow warns of the fifth
        _model().predict(X, verbose=0)
    assert "retracing" not in caplog.text


@pytest.mark.parametrize("xla", [pytest.param(False, marks=pytest.mark.slow), True])
def test_a_model_that_is_compiled_again_for_each_stage(caplog, xla):
    model = _model()
    for rows in (2, 3, 4, 2, 3, 4):  # each stage traces its own step, as that of a thaw does
        recompile = compiled(lambda: model, 1, optimizer="sgd", loss="mse", xla=xla)
        recompile.fit(X[:rows], X[:rows, :1], batch_size=4, verbose=0)
        recompile.evaluate(X[:rows], X[:rows, :1], batch_size=4, verbose=0)
    assert "retracing" not in caplog.text


def test_audits_of_many_models(caplog):
    alone = types.SimpleNamespace(device="/cpu:0", all_gather=tf.identity)
    for length in range(1, 7):
        audit = Audit(None)
        audit._replicas = [alone]  # of a model of so many variables
        assert audit._gather([tf.range(length)]).shape == (1, length)
    assert "retracing" not in caplog.text
