"""The small convolutional network of the MNIST recipe that tfaccel started with.

Nearly all of its parameters are in its first dense layer: 128 for each input value. Up to 30 x 30
pixels it equals the recipe's network. Larger images pass more convolutions and pooling, down to at
most 14 x 14. Without them, at 64 x 64 the layer would have 7.9 M parameters, and a checkpoint with
Adam 90 MiB.
"""

import keras
from keras import layers

LARGEST_SIDE = 14  # of the first dense layer's input; images of 28 x 28 pixels give 13


def build(*, image_shape: tuple[int, int, int], num_outputs: int) -> keras.Model:
    """Returns convolutions and two dense layers: 1.4 M parameters at 28 x 28, 0.5 M at 64 x 64.

    There are two convolutions, and one more each time a side is halved to reach LARGEST_SIDE.

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
    x = layers.MaxPooling2D()(x)
    while max(x.shape[1:3]) > LARGEST_SIDE:
        x = layers.Conv2D(64, 3, activation="relu", padding="same")(x)
        x = layers.MaxPooling2D([2 if side > LARGEST_SIDE else 1 for side in x.shape[1:3]])(x)
    x = layers.Dropout(0.25)(x)
    x = layers.Dense(128, activation="relu")(layers.Flatten()(x))
    x = layers.Dropout(0.5)(x)
    logits = layers.Dense(num_outputs, dtype="float32", name="logits")(x)
    return keras.Model(image, logits, name="mnist_cnn")
