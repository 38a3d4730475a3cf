"""A label beyond the model's outputs is named by `evaluate`, as it is by `fit`."""

import keras
import numpy as np
import pytest
from conftest import compiled

from tfaccel.callbacks.finite import NonFiniteError
from tfaccel.config import StepConfig

X = np.random.default_rng(0).normal(size=(10, 4)).astype("float32")
Y = np.arange(10) % 3


def _model(num_replicas=1, *, xla=False, from_logits=True, **settings):
    def make():
        end = None if from_logits else "softmax"
        return keras.Sequential([keras.Input((4,)), keras.layers.Dense(3, activation=end)])

    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=from_logits)
    settings = {"loss": loss, "metrics": ["accuracy"], **settings}
    return compiled(make, num_replicas, optimizer="sgd", xla=xla, **settings)


def _labels(wrong):
    y = Y.copy()
    y[6] = wrong
    return y


@pytest.mark.parametrize(
    ("num_replicas", "xla", "wrong"),
    [
        *[(1, False, -1), (1, True, 3), (2, False, 3), (2, True, -1)],
        *(
            pytest.param(*each, marks=pytest.mark.slow)
            for each in [(1, False, 3), (1, True, -1), (2, False, -1), (2, True, 3)]
        ),
    ],
)
def test_evaluate_names_a_label_beyond_the_outputs(num_replicas, xla, wrong):
    model = _model(num_replicas, xla=xla)
    words = "label is beyond the model's outputs at step 2" if xla else f"label {wrong} is beyond"
    with pytest.raises(NonFiniteError, match=words):
        model.evaluate(X, _labels(wrong), batch_size=4, verbose=0)
    assert np.isfinite(model.evaluate(X, Y, batch_size=4, verbose=0)).all()


@pytest.mark.parametrize("xla", [False, True])
def test_fit_names_one_of_validation_and_test_on_batch_does(xla):
    model = _model(xla=xla, from_logits=False)
    with pytest.raises(NonFiniteError, match="label"):
        model.fit(X, Y, batch_size=5, validation_data=(X, _labels(9)), verbose=0)
    with pytest.raises(NonFiniteError, match="label"):
        model.test_on_batch(X, _labels(9))


def test_fit_names_one_of_training_without_xla():
    with pytest.raises(NonFiniteError, match="the label 9 is beyond the model's 3 outputs"):
        _model().fit(X, _labels(9), verbose=0)


def test_a_label_that_is_skipped_is_warned_of(caplog):
    model = _model(xla=True, config=StepConfig(nonfinite="skip"))
    assert np.isnan(model.evaluate(X, _labels(5), verbose=0)[0])
    assert "label is beyond the model's outputs at step 1" in caplog.text


def test_a_label_that_the_loss_ignores_is_none_beyond_the_outputs():
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True, ignore_class=-1)
    model = _model(xla=True, loss=loss)
    assert np.isfinite(model.evaluate(X, _labels(-1), verbose=0)).all()


def test_a_loss_that_is_not_finite_for_other_reasons_is_given_as_it_is():
    model = _model(xla=True)
    model.layers[0].kernel.assign(np.full((4, 3), np.nan))
    assert np.isnan(model.evaluate(X, Y, verbose=0)[0])


@pytest.mark.parametrize("num_replicas", [1, 2])
def test_labels_made_probabilities_are_named_too(num_replicas):
    loss = keras.losses.CategoricalCrossentropy(from_logits=True)
    model = _model(num_replicas, loss=loss, config=StepConfig(label_smoothing=0.1))
    with pytest.raises(NonFiniteError, match="label is beyond the model's outputs at step 1"):
        model.evaluate(X, _labels(5), batch_size=10, verbose=0)


class Rows:
    """The rows, one by one, of which one has a label beyond the outputs."""

    def __len__(self):
        return 8

    def __getitem__(self, index):
        return X[index], _labels(3)[index]


def test_steps_in_a_row_are_counted_one_by_one(setup):
    run = setup(xla=True)
    with run.scope():
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3)])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    run.compile(model, "sgd", loss, steps_per_execution=2)
    with pytest.raises(NonFiniteError, match="at step 4 of the evaluation"):
        model.evaluate(run.examples(Rows(), global_batch_size=2), verbose=0)
