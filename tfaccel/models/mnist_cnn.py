"""The small convolutional network of the MNIST recipe this toolkit grew from."""

import keras
from keras import layers


def build(*, image_shape: tuple[int, int, int], num_outputs: int) -> keras.Model:
    """Returns two convolutions and two dense layers: 1.4 M parameters at 28 x 28.

    Input: [batch, height, width, channels] float, 0..1. Output: [batch, num_outputs] float32
    logits; in float16 they would overflow at 65,504 and lose the loss's small differences.

    Raises:
      ValueError: the images are too small to be convolved and pooled.
    """
    if min(image_shape[:2]) < 4:
        raise ValueError("images must be at least 4x4")
    image = keras.Input(image_shape, name="image")
    x = layers.Conv2D(32, 3, activation="relu", padding="same")(image)
    x = layers.Conv2D(64, 3, activation="relu")(x)
    x = layers.Dropout(0.25)(layers.MaxPooling2D()(x))
    x = layers.Dense(128, activation="relu")(layers.Flatten()(x))
    x = layers.Dropout(0.5)(x)
    logits = layers.Dense(num_outputs, dtype="float32", name="logits")(x)
    return keras.Model(image, logits, name="mnist_cnn")
