"""A loss of any size, and a batch for it, for tests of what half precision loses of gradients."""

import keras
import numpy as np
import tensorflow as tf


@keras.saving.register_keras_serializable("tests")
class Scaled(keras.losses.Loss):
    """A mean squared error times a factor."""

    def __init__(self, factor=1.0, **others):
        super().__init__(**others)
        self.factor = factor

    def call(self, y_true, y_pred):
        return self.factor * tf.reduce_mean(tf.square(y_true - y_pred), axis=-1)


def batch(rows=32):
    draw = np.random.default_rng(0)
    return draw.normal(size=(rows, 8)).astype("f4"), draw.normal(size=(rows, 4)).astype("f4")
