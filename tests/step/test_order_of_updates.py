"""A step that updates and assigns variables by turns does so in its order, as a graph too.

TensorFlow loses the order of stock Keras's updates (findings/tensorflow_lost_variable_order.sh).
"""

import functools

import keras
import numpy as np
import pytest
import tensorflow as tf
from conftest import compiled
from keras import layers

ROWS = np.random.default_rng(0).normal(size=(6, 4)).astype(np.float32)
SQUARE = np.random.default_rng(0).normal(size=(500, 500)).astype(np.float32)
EPOCHS = 3


class Critic(keras.Model):
    """Updates twice, and limits the weights of the last layer each time.

    The limit takes milliseconds, and the last layer's gradient does not depend on its weights. So
    nothing but the order of the program lets the second update wait for the limit.
    """

    def __init__(self, *, limit, optimizer=None):
        super().__init__()
        dense = [layers.Dense(4, "tanh"), layers.Dense(1, use_bias=False)]
        self.net = keras.Sequential([keras.Input((4,)), *dense])
        self.limit, self.its_optimizer = limit, lambda: optimizer or self.optimizer
        self.built = True

    def train_step(self, x):
        weights = self.net.trainable_variables
        for _ in range(2):
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(self.net(x))
            gradients = tape.gradient(loss, weights)
            self.its_optimizer().apply_gradients(zip(gradients, weights, strict=True))
            limit = self.limit(weights[-1])
            weights[-1].assign(tf.clip_by_value(weights[-1], -limit, limit))
        return {"loss": loss}


def slow(weight):
    """Returns 0.1 after a long product with a row of the weight."""
    return 0.1 * tf.math.sign(tf.reduce_sum(tf.abs(SQUARE @ (SQUARE + weight[0]))))


def weights_after_training(model):
    """Trains the model from the same weights each time."""
    for index, weight in enumerate(model.net.trainable_variables):
        weight.assign(np.random.default_rng(index).normal(size=weight.shape))
    model.fit(ROWS, batch_size=6, epochs=EPOCHS, shuffle=False, verbose=0)
    return [np.array(each) for each in model.net.trainable_variables]


@pytest.mark.parametrize(
    ("num_replicas", "is_attribute"),
    [(1, False), *(pytest.param(n, True, marks=pytest.mark.slow) for n in (1, 2))],
)
def test_the_second_update_waits_for_what_was_assigned_before(num_replicas, is_attribute):
    eager = Critic(limit=lambda _: 0.1)
    eager.compile(keras.optimizers.SGD(0.5), run_eagerly=True)
    wanted = weights_after_training(eager)

    optimizer = keras.optimizers.SGD(0.5)
    make = functools.partial(Critic, limit=slow, optimizer=None if is_attribute else optimizer)
    compiled_with = optimizer if is_attribute else keras.optimizers.SGD(0.5)
    model = compiled(make, num_replicas, optimizer=compiled_with, xla=False)
    for got, expected in zip(weights_after_training(model), wanted, strict=True):
        np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-6)
