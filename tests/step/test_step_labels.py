"""A label beyond the model's outputs is named by `fit` and `evaluate`, with the cure."""

import itertools

import keras
import numpy as np
import pytest
import tensorflow as tf
from conftest import compiled

from tfaccel.config import StepConfig
from tfaccel.training.callbacks.finite import NonFiniteError

X = np.random.default_rng(0).normal(size=(8, 4)).astype("float32")
Y = np.arange(8) % 3


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
        *[(1, False, -1), (1, True, 3)],
        *(
            pytest.param(*each, marks=pytest.mark.slow)
            for each in [
                (1, False, 3),
                (1, True, -1),
                *itertools.product([2], [False, True], [-1, 3]),
            ]
        ),
    ],
)
def test_evaluate_names_a_label_beyond_the_outputs(num_replicas, xla, wrong):
    model = _model(num_replicas, xla=xla)
    where = " at step 2 of the evaluation" if xla else ""
    words = f"the label {wrong} is beyond the model's 3 outputs{where}; give labels from 0 to 2,"
    with pytest.raises(NonFiniteError, match=words):
        model.evaluate(X, _labels(wrong), batch_size=4, verbose=0)
    assert np.isfinite(model.evaluate(X, Y, batch_size=4, verbose=0)).all()


@pytest.mark.parametrize("xla", [pytest.param(False, marks=pytest.mark.slow), True])
def test_fit_names_one_of_validation_and_test_on_batch_does(xla):
    model = _model(xla=xla, from_logits=False)
    with pytest.raises(NonFiniteError, match="label"):
        model.fit(X, Y, batch_size=4, validation_data=(X, _labels(9)), verbose=0)
    with pytest.raises(NonFiniteError, match="label"):
        model.test_on_batch(X, _labels(9))


@pytest.mark.parametrize("wrong", [255, pytest.param(-1, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("num_replicas", "xla"),
    [
        *[(1, False), (2, True)],
        *(pytest.param(*each, marks=pytest.mark.slow) for each in [(1, True), (2, False)]),
    ],
)
def test_fit_names_one_of_training(num_replicas, xla, wrong):
    where = " at step 2, which was not applied" if xla else ""
    words = (
        f"^the label {wrong} is beyond the model's 3 outputs{where}; give labels from 0 to 2, or "
        f"give the model's last layer more outputs; if {wrong} marks rows or pixels to ignore, "
        "give them the label 0 and the sample_weight 0$"
    )
    with pytest.raises(NonFiniteError, match=words):
        _model(num_replicas, xla=xla).fit(X, _labels(wrong), batch_size=4, shuffle=False, verbose=0)


def test_with_the_cure_such_a_label_counts_nothing():
    weights = (np.arange(8) != 6).astype("float32")
    model = _model(xla=True)
    before, trained = model.get_weights(), []
    for label in (0, 2):
        model.set_weights(before)
        y = _labels(label)
        model.fit(X, y, batch_size=8, sample_weight=weights, shuffle=False, verbose=0)
        trained.append(model.get_weights()[0])
    np.testing.assert_array_equal(*trained)
    assert np.isfinite(trained[0]).all()
    assert not np.array_equal(trained[0], before[0])


@pytest.mark.parametrize("method", ["evaluate", pytest.param("fit", marks=pytest.mark.slow)])
def test_one_in_a_mask_is_named_by_its_value(method):
    def make():
        return keras.Sequential([keras.Input((2, 2, 1)), keras.layers.Conv2D(3, 1)])

    masks = np.zeros((4, 2, 2), "uint8")
    masks[3, 1, 0], masks[3, 1, 1] = 7, 255
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model = compiled(make, 1, optimizer="sgd", loss=loss)
    images = np.ones((4, 2, 2, 1), "float32")
    for y in (masks, masks[..., None].astype("float32")):
        with pytest.raises(NonFiniteError, match="the label 255 is beyond the model's 3 outputs"):
            getattr(model, method)(images, y, batch_size=2, verbose=0)


def test_labels_that_differ_on_two_replicas_are_none_that_was_not_given():
    y = _labels(5)
    y[0] = 9
    with pytest.raises(NonFiniteError, match="a label is beyond the model's 3 outputs at step 1"):
        _model(2, xla=True).fit(X, y, batch_size=8, shuffle=False, verbose=0)


@pytest.mark.parametrize("num_replicas", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_step_that_a_loss_scale_would_skip_is_named(num_replicas, policy):
    model = _model(num_replicas, xla=True)
    with pytest.raises(NonFiniteError, match="the label 4 is beyond the model's 3 outputs"):
        model.fit(X, _labels(4), batch_size=8, verbose=0)


@pytest.fixture
def policy():
    keras.config.set_dtype_policy("mixed_float16")
    yield
    keras.config.set_dtype_policy("float32")


def test_in_parts_of_a_batch_one_is_named_too():
    model = _model(xla=True, config=StepConfig(accumulation_steps=2))
    with pytest.raises(NonFiniteError, match="the label 8 is beyond the model's 3 outputs"):
        model.fit(X, _labels(8), batch_size=8, verbose=0)


def test_a_label_that_is_skipped_is_warned_of(caplog):
    model = _model(xla=True, config=StepConfig(nonfinite="skip"))
    assert np.isnan(model.evaluate(X, _labels(5), verbose=0)[0])
    assert "the label 5 is beyond the model's 3 outputs at step 1" in caplog.text


def test_a_label_that_the_loss_ignores_is_none_beyond_the_outputs():
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True, ignore_class=-1)
    model = _model(xla=True, loss=loss)
    assert np.isfinite(model.evaluate(X, _labels(-1), verbose=0)).all()


def test_a_loss_that_is_not_finite_for_other_reasons_is_given_as_it_is():
    model = _model(xla=True)
    model.layers[0].kernel.assign(np.full((4, 3), np.nan))
    assert np.isnan(model.evaluate(X, Y, verbose=0)[0])


@pytest.fixture
def check_numerics():
    tf.debugging.enable_check_numerics()
    yield
    tf.debugging.disable_check_numerics()


def test_a_search_for_infinities_finds_none_in_the_check_of_labels(check_numerics):
    model = _model(xla=False, metrics=[])
    model.fit(X, Y, batch_size=4, verbose=0)
    assert np.isfinite(model.evaluate(X, Y, batch_size=4, verbose=0)).all()


@pytest.mark.parametrize("num_replicas", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_labels_made_probabilities_are_named_too(num_replicas):
    loss = keras.losses.CategoricalCrossentropy(from_logits=True)
    model = _model(num_replicas, loss=loss, config=StepConfig(label_smoothing=0.1))
    with pytest.raises(NonFiniteError, match="a label is beyond the model's 3 outputs at step 1"):
        model.evaluate(X, _labels(5), batch_size=8, verbose=0)
    with pytest.raises(NonFiniteError, match="a label is beyond the model's 3 outputs at step 1"):
        model.fit(X, _labels(5), batch_size=8, verbose=0)


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
