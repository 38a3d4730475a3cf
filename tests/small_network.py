"""A network of two layers in place of `mnist_cnn`, which experiments build quickly."""

import contextlib

import keras
import pytest
from keras import layers

from tfaccel.experiment import models


def build(*, image_shape, num_outputs):
    image = keras.Input(image_shape, name="image")
    x = layers.Flatten()(layers.Conv2D(4, 3, activation="relu")(image))
    logits = layers.Dense(num_outputs, dtype="float32", name="logits")(x)
    return keras.Model(image, logits, name="small")


@contextlib.contextmanager
def as_mnist_cnn():
    """Within the context, the name `mnist_cnn` means this network."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(models.OWN, "mnist_cnn", build)
        yield
