"""An error about shapes in a step says how many rows each replica has, and the way out."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from conftest import compiled, strategy_of

from tfaccel import UserError
from tfaccel.config import StepConfig
from tfaccel.runtime import collectives
from tfaccel.step.shapes import telling_rows

X = np.random.default_rng(0).normal(size=(6, 3)).astype("float32")
Y = X.sum(axis=1, keepdims=True)


def _best(losses):
    return tf.reduce_mean(tf.math.top_k(losses, k=4).values)  # more than the 3 rows of a replica


def _reshaped(losses):
    return tf.reduce_mean(tf.reshape(losses, (6, 1)))


def _cut(losses):
    return tf.reduce_mean(losses[5])


def _at_index(losses):  # TensorFlow notices it only when it runs
    return tf.reduce_mean(tf.gather(losses, [0, 5]))


def _of_all(losses):
    return _best(collectives.all_gather(losses))


def _trained(loss_of, num_replicas, **config):
    class Model(keras.Model):
        def train_step(self, data):
            x, y = data
            with tf.GradientTape() as tape:
                losses = tf.square(y - self(x, training=True))[:, 0]
                loss = loss_of(losses)
            gradients = tape.gradient(loss, self.trainable_variables)
            self.optimizer.apply_gradients(zip(gradients, self.trainable_variables, strict=True))
            return {"best": loss}

    def make():
        inputs = keras.Input((3,))
        return Model(inputs, keras.layers.Dense(1, kernel_initializer="ones")(inputs))

    settings = {"optimizer": keras.optimizers.SGD(0.1), "xla": False}
    model = compiled(make, num_replicas, config=StepConfig(**config), **settings)
    return model.fit(X, Y + X[:, :1], batch_size=6, shuffle=False, verbose=0)


@pytest.mark.parametrize(
    "loss_of",
    [
        _best,
        _at_index,
        *(pytest.param(each, marks=pytest.mark.slow) for each in (_reshaped, _cut)),
    ],
)
def test_an_error_names_the_rows_of_a_replica(loss_of):
    with pytest.raises((ValueError, tf.errors.InvalidArgumentError)) as caught:
        _trained(loss_of, 2)
    (note,) = caught.value.__notes__
    assert "divided over 2 replicas. A replica has 3 of the 6 rows." in note
    assert "tfaccel.collectives.all_gather(x)" in note


def test_an_error_names_the_parts_of_a_step():
    with pytest.raises(ValueError, match="last dimension") as caught:
        _trained(_best, 1, accumulation_steps=2)
    assert "divided in 2 parts (accumulation_steps)" in caught.value.__notes__[0]


def test_the_cure_trains_as_one_replica():
    one, two = _trained(_best, 1), _trained(_of_all, 2)
    np.testing.assert_allclose(two.history["best"], one.history["best"], rtol=1e-5)


def test_another_error_and_one_replica_have_no_note():
    def fails(losses):
        raise ValueError("the user's own")

    for loss_of, num_replicas in ((fails, 2), (lambda losses: losses[7], 1)):
        with pytest.raises(ValueError, match=r"own|slice index 7") as caught:
            _trained(loss_of, num_replicas)
        assert not hasattr(caught.value, "__notes__")


def test_an_error_of_tfaccel_in_a_loss_is_raised_without_the_words_of_keras():
    """Keras 3.16 raises an error of its own from each ValueError of a loss."""

    def keras_loss():
        try:
            raise UserError("use fewer rows")
        except ValueError as error:
            raise ValueError("Received target shape (1,)") from error

    def traced():
        try:
            keras_loss()
        except ValueError as error:
            raise error from None  # as TensorFlow does, which shortens tracebacks

    for raises in (keras_loss, traced):
        with pytest.raises(UserError, match="use fewer rows"), telling_rows(strategy_of(2), []):
            raises()
