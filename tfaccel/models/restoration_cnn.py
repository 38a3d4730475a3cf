"""A small convolutional network from image to image: what it learns is added to its input.

A short form of Kim et al., "Accurate Image Super-Resolution Using Very Deep Convolutional Networks"
(2016): 5 of its 20 layers, without batch norm, which blurs what is to become sharp.
"""

import keras
from keras import layers

NUM_HIDDEN = 4


def build(*, image_shape: tuple[int, int, int], num_outputs: int) -> keras.Model:
    """Returns 3 x 3 convolutions of 64 channels: 115,000 parameters, each output sees 11 x 11.

    With as many outputs as channels the last layer gives the difference from the input, and starts
    at 0: untrained, the model gives its input. With another number, for masks, it gives logits.

    Input: [batch, height, width, channels] float. Output: [batch, height, width, num_outputs]
    float32: of 11 bits, float16 would lose the last of a pixel's 8.
    """
    image = x = keras.Input(image_shape, name="image")
    for _ in range(NUM_HIDDEN):
        x = layers.Conv2D(64, 3, padding="same", activation="relu", kernel_initializer="he_normal")(
            x
        )
    restores = num_outputs == image_shape[-1]
    start = "zeros" if restores else "glorot_uniform"
    last = layers.Conv2D(num_outputs, 3, padding="same", kernel_initializer=start, dtype="float32")
    output = last(x)
    if restores:
        output = layers.Add(dtype="float32", name="restored")([image, output])
    return keras.Model(image, output, name="restoration_cnn")
