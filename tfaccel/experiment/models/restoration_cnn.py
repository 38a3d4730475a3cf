"""A small convolutional network from image to image: what it learns is added to its input.

A short form of EDSR (Lim et al., "Enhanced Deep Residual Networks for Single Image
Super-Resolution", 2017): residual blocks without batch norm, of which it has 16 or more.
"""

import keras
from keras import layers

NUM_CHANNELS = 32
NUM_BLOCKS = 2


def build(*, image_shape: tuple[int, int, int], num_outputs: int) -> keras.Model:
    """Returns six 3 x 3 convolutions of 39,000 parameters; each output pixel sees 13 x 13.

    With as many outputs as channels the last layer gives the difference from the input, and starts
    at 0: untrained, the model gives its input. With another number, as for masks, it gives logits.

    Input: [batch, height, width, channels] float. Output: [batch, height, width, num_outputs]
    float32: float16's 11 bits are too few where an image is a large input plus a small difference.
    """
    image = keras.Input(image_shape, name="image")
    x = layers.Conv2D(NUM_CHANNELS, 3, padding="same")(image)
    for _ in range(NUM_BLOCKS):
        # Around each block the way is linear: without it, absolute error as the loss keeps the
        # model at the identity, which is its median.
        y = layers.Conv2D(
            NUM_CHANNELS, 3, padding="same", activation="relu", kernel_initializer="he_normal"
        )(x)
        x = layers.Add()([x, layers.Conv2D(NUM_CHANNELS, 3, padding="same")(y)])
    restores = num_outputs == image_shape[-1]
    output = layers.Conv2D(
        num_outputs,
        3,
        padding="same",
        kernel_initializer="zeros" if restores else "glorot_uniform",
        dtype="float32",
        name="difference" if restores else "logits",
    )(x)
    if restores:
        output = layers.Add(dtype="float32", name="restored")([image, output])
    return keras.Model(image, output, name="restoration_cnn")
