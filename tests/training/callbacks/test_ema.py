"""The moving average of the weights: measured, put back exactly, and kept at the end."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from conftest import compiled
from keras import layers

from tfaccel import UserError
from tfaccel.training.callbacks.ema import EMA

ROWS = 8


@pytest.fixture
def policy(request):
    """Models are made in it."""
    keras.config.set_dtype_policy(request.param)
    yield request.param
    keras.config.set_dtype_policy("float32")


def make(*before):
    dense = layers.Dense(1, kernel_initializer="ones")
    return keras.Sequential([keras.Input((3,)), *(each() for each in before), dense])


def model_of(num_replicas, *before, **optimizer):
    optimizer = {"use_ema": True, "ema_momentum": 0.7, **optimizer}
    sgd = keras.optimizers.SGD(0.01, momentum=0.9, **optimizer)
    return compiled(lambda: make(*before), num_replicas, optimizer=sgd, xla=False, loss="mse")


def data(seed=0, *, steps=3):
    random = np.random.default_rng(seed)
    x = random.normal(size=(steps * ROWS, 3)).astype(np.float32)
    return tf.data.Dataset.from_tensor_slices((x, x.sum(axis=1, keepdims=True) * 3)).batch(ROWS)


def values(variables):
    """Every replica's value, as bytes."""
    return [part.numpy().tobytes() for each in variables for part in each._value.values]


class Noted(keras.callbacks.Callback):
    """The weights after each update, and before, while and after each measurement."""

    def __init__(self):
        super().__init__()
        self.steps, self.before, self.measured, self.after = [], [], [], []
        self.num_updates = []  # before each measurement

    def weights(self):
        return [each.numpy() for each in self.model.trainable_variables]

    def on_train_batch_end(self, batch, logs=None):
        if num_updates(self.model) > len(self.steps):  # not one that loss scaling skipped
            self.steps.append(self.weights())
        self.bits = values(self.model.trainable_variables)

    def on_test_batch_begin(self, batch, logs=None):
        self.measured.append(self.weights())
        self.before.append(self.bits)
        self.num_updates.append(len(self.steps))

    def on_epoch_end(self, epoch, logs=None):
        self.after.append(values(self.model.trainable_variables))


def num_updates(model):
    return int(model.optimizer.iterations.numpy())


def averages(steps, momentum=0.7):
    """Of the weights after each step, as Keras defines it: it begins with the first."""
    average = steps[0]
    result = [average]
    for weights in steps[1:]:
        average = [momentum * a + (1 - momentum) * w for a, w in zip(average, weights, strict=True)]
        result.append(average)
    return result


@pytest.mark.parametrize(
    ("num_replicas", "policy"),
    [
        pytest.param(1, "float32", marks=pytest.mark.slow),
        (2, "mixed_float16"),
        pytest.param(1, "mixed_float16", marks=pytest.mark.slow),
        pytest.param(2, "float32", marks=pytest.mark.slow),
    ],
    indirect=["policy"],
)
def test_the_average_is_measured_and_the_weights_are_put_back(num_replicas, policy):
    model, noted = model_of(num_replicas, layers.BatchNormalization), Noted()
    test = data(1, steps=1)
    history = model.fit(
        data(), validation_data=test, epochs=2, verbose=0, callbacks=[EMA(), noted]
    ).history
    assert noted.after == noted.before  # the bits of every replica
    expected = averages(noted.steps)
    for measured, count in zip(noted.measured, noted.num_updates, strict=True):
        for one, other in zip(measured, expected[count - 1], strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-6)
    # At the end of `fit` they are Keras's gift to whoever evaluates, predicts or exports.
    for variable, average in zip(model.trainable_variables, expected[-1], strict=True):
        for part in variable._value.values:
            np.testing.assert_allclose(part, average, rtol=1e-6)
    assert model.evaluate(test, verbose=0) == pytest.approx(history["val_loss"][-1], rel=1e-6)


@pytest.mark.slow  # of stock Keras
def test_keras_own_swap_changes_the_bits():
    model, test, changed = model_of(1), data(1, steps=1), {}
    for swap in (EMA, keras.callbacks.SwapEMAWeights):
        noted = Noted()
        model.fit(data(), validation_data=test, epochs=2, verbose=0, callbacks=[swap(), noted])
        changed[swap] = noted.after != noted.before
    assert changed == {EMA: False, keras.callbacks.SwapEMAWeights: True}


@pytest.mark.parametrize("num_replicas", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_evaluating_twice_measures_the_average_twice(num_replicas):
    model = model_of(num_replicas)
    model.fit(data(), epochs=1, verbose=0)
    average = model.evaluate(data(1), verbose=0)
    optimizer = model.optimizer
    for each in model.trainable_variables:  # as a checkpoint of before the end of `fit` has them
        each.assign(each + 1.0)
    weights, own = model.evaluate(data(1), verbose=0), values(model.trainable_variables)
    kept = values(optimizer._model_variables_moving_average)
    ema = EMA()
    for _ in range(2):
        assert model.evaluate(data(1), verbose=0, callbacks=[ema]) == pytest.approx(average)
        assert values(model.trainable_variables) == own
        assert values(optimizer._model_variables_moving_average) == kept
        assert model.evaluate(data(1), verbose=0) == weights


def test_a_measurement_that_fails_is_mended_when_training_goes_on():
    class Failing(keras.callbacks.Callback):
        def on_test_batch_end(self, batch, logs=None):
            raise OSError

    model, ema = model_of(1), EMA()
    with pytest.raises(OSError):  # noqa: PT011
        model.fit(data(), validation_data=data(1), verbose=0, callbacks=[ema, Failing()])
    kept = values(model.optimizer._model_variables_moving_average)
    model.fit(data(), epochs=0, verbose=0, callbacks=[ema])
    assert values(model.trainable_variables) == kept


def test_steps_that_are_skipped_are_not_averaged_and_the_average_is_never_of_nothing():
    keras.config.set_dtype_policy("mixed_float16")
    model, noted = model_of(1), Noted()
    keras.config.set_dtype_policy("float32")
    overflow = tf.data.Dataset.from_tensors((np.ones((ROWS, 3)), np.full((ROWS, 1), 6e4)))
    before = [each.numpy() for each in model.trainable_variables]
    model.fit(overflow, validation_data=data(1), verbose=0, callbacks=[EMA(), noted])
    assert num_updates(model) == 0
    for variable, expected in zip(model.trainable_variables, before, strict=True):
        np.testing.assert_array_equal(variable, expected)  # stock Keras leaves zeros
    model.fit(data().repeat(5), verbose=0, callbacks=[EMA(), noted])
    assert 0 < num_updates(model) == len(noted.steps) < 16
    for variable, expected in zip(
        model.trainable_variables, averages(noted.steps)[-1], strict=True
    ):
        np.testing.assert_allclose(variable, expected, rtol=1e-6)


def test_an_optimizer_without_average_is_refused():
    model = model_of(1, use_ema=False)
    with pytest.raises(UserError, match="keeps no average of the weights; set ema_momentum"):
        model.fit(data(), verbose=0, callbacks=[EMA()])
