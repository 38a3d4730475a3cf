"""A small convolutional network from image to image that learns the difference from its input.

It is a short form of EDSR (Lim et al., "Enhanced Deep Residual Networks for Single Image
Super-Resolution", 2017), which has 16 or more such residual blocks without batch norm.
"""

import keras
from keras import layers

NUM_CHANNELS = 32
NUM_BLOCKS = 2


def build(*, image_shape: tuple[int, int, int], num_outputs: int) -> keras.Model:
    """Returns six 3 x 3 convolutions with 39,000 parameters; each output pixel sees 13 x 13.

    If `num_outputs` equals the number of channels, the last layer gives the difference from the
    input. It starts at 0, so the untrained model returns its input. With another number, such as
    for masks, the model returns logits.

    Input: [batch, height, width, channels] float. Output: [batch, height, width, num_outputs]
    float32, because float16's 11 bits are too few for a large input plus a small difference.
    """
    image = keras.Input(image_shape, name="image")
    x = layers.Conv2D(NUM_CHANNELS, 3, padding="same")(image)
    for _ in range(NUM_BLOCKS):
        # A linear path leads around each block. Without it, the absolute error as the loss keeps
        # the model at the identity, which is its median.
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
