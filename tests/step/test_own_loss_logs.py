"""A loss that a step of the user's returns is logged, however many replicas there are."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from conftest import compiled
from keras import layers

X = np.random.default_rng(0).normal(size=(12, 3)).astype(np.float32)
Y = X.sum(1, keepdims=True)


class ReturnsLoss(keras.Model):
    """Its steps compute a loss that Keras does not know."""

    def __init__(self):
        super().__init__()
        keras.utils.set_random_seed(0)
        self.dense = layers.Dense(1)
        self.dense.build((None, 3))
        self.built = True

    def call(self, x):
        return self.dense(x)

    def loss_of(self, data):
        x, y, _ = keras.utils.unpack_x_y_sample_weight(data)
        return tf.reduce_mean(tf.square(self(x) - y))

    def train_step(self, data):
        with tf.GradientTape() as tape:
            loss = self.loss_of(data)
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply_gradients(zip(gradients, self.trainable_variables, strict=True))
        return self.logs_of(loss)

    def test_step(self, data):
        return {"loss": self.loss_of(data)}

    def logs_of(self, loss):
        return {"loss": loss}


class WithMean(ReturnsLoss):
    """Averages its loss by a metric of its own, which has the name of Keras's."""

    def __init__(self):
        super().__init__()
        self.mean = keras.metrics.Mean(name="loss")

    @property
    def metrics(self):
        return [self.mean]

    def logs_of(self, loss):
        self.mean.update_state(loss)
        return {"loss": self.mean.result()}


class ByKeras(ReturnsLoss):
    """Gives its loss to Keras."""

    def train_step(self, data):
        x, y, _ = keras.utils.unpack_x_y_sample_weight(data)
        with tf.GradientTape() as tape:
            loss = self.compute_loss(x, y, self(x))
        self._loss_tracker.update_state(loss)
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply_gradients(zip(gradients, self.trainable_variables, strict=True))
        return {"loss": self._loss_tracker.result()}


def losses_of_steps(make, num_epochs):
    """A slow reference: the loss of each step, [epochs, steps], computed by hand."""
    model, optimizer, losses = make(), keras.optimizers.SGD(0.1), []
    for _ in range(num_epochs):
        for start in range(0, len(X), 4):
            with tf.GradientTape() as tape:
                loss = model.loss_of((X[start : start + 4], Y[start : start + 4]))
            gradients = tape.gradient(loss, model.trainable_variables)
            optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
            losses.append(float(loss))
    return np.reshape(losses, (num_epochs, -1)), model


@pytest.mark.parametrize(
    ("num_replicas", "loss"),
    [
        (1, None),
        (2, "mse"),
        *(pytest.param(*each, marks=pytest.mark.slow) for each in [(1, "mse"), (2, None)]),
    ],
)
def test_a_returned_loss_is_logged(num_replicas, loss):
    wanted, trained = losses_of_steps(ReturnsLoss, 2)
    model = compiled(
        ReturnsLoss, num_replicas, optimizer=keras.optimizers.SGD(0.1), xla=False, loss=loss
    )
    seen = []
    see = keras.callbacks.LambdaCallback(on_train_batch_end=lambda _, logs: seen.append(logs))
    tested = {"validation_data": (X, Y), "validation_batch_size": 12}
    settings = {"batch_size": 4, "epochs": 2, "shuffle": False, "verbose": 0, "callbacks": [see]}
    history = model.fit(X, Y, **settings, **tested).history
    assert [each["loss"] for each in seen] == pytest.approx(wanted.ravel().tolist(), rel=1e-5)
    assert history["loss"] == pytest.approx(wanted[:, -1].tolist(), rel=1e-5)
    expected = float(trained.loss_of((X, Y)))
    assert history["val_loss"][-1] == pytest.approx(expected, rel=1e-5)
    assert model.evaluate(X, Y, batch_size=12, verbose=0) == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("make", [WithMean, ByKeras])
def test_a_mean_that_the_step_updates_stays_that_of_the_epoch(make):
    wanted, _ = losses_of_steps(make, 2)
    model = compiled(make, 1, optimizer=keras.optimizers.SGD(0.1), xla=False, loss="mse")
    history = model.fit(X, Y, batch_size=4, epochs=2, shuffle=False, verbose=0).history
    assert history["loss"] == pytest.approx(wanted.mean(axis=1).tolist(), rel=1e-5)
