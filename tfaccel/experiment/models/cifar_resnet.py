"""A residual network for images of 32 x 32 pixels. It is wide and shallow, to keep a GPU busy.

It follows the network of Keller Jordan's airbench96, which reaches 96% on CIFAR-10 in 37 epochs
("94% on CIFAR-10 in 3.29 Seconds on a Single GPU", 2024, arXiv:2404.00498). That one descends from
David Page's ResNet-9 (myrtle.ai, 2018). There are three differences:

  - It is 1.5 times as wide and has one more residual block, on the whole image. Both are needed for
    files whose JPEG compression blurs colors.
  - airbench96's first layer whitens 2 x 2 pixels with statistics of the training images; here a
    convolution learns that.
  - Batch norm also learns its scale.

As in airbench96, outside training the logits are the mean of those of an image and its mirror
image. The residual blocks are those of He et al., "Deep Residual Learning for Image Recognition"
(2016).
"""

import keras
from keras import layers

from tfaccel.keras_internals.mirrored import MeanWithMirror, WithMirror


def build(*, image_shape: tuple[int, int, int], num_outputs: int) -> keras.Model:
    """Returns twelve convolutions and a dense layer: 22.4 M parameters for 10 classes.

    An image of 32 x 32 takes 1.42 billion multiplications, and three times as many in training.

    Input: [batch, height, width, channels] float, with a mean near 0 and a deviation near 1.
    Output: [batch, num_outputs] float32 logits.

    Raises:
      ValueError: the images are too small to be pooled three times.
    """
    if min(image_shape[:2]) < 8:
        raise ValueError("images must be at least 8x8")
    image = keras.Input(image_shape, name="image")
    x = _with_residual(_activated(_convolution(WithMirror()(image), 64)))
    for channels in (192, 576, 768):
        # Pooling before batch norm leaves batch norm a quarter of the pixels.
        x = _with_residual(_activated(layers.MaxPooling2D()(_convolution(x, channels))))
    x = layers.GlobalMaxPooling2D()(x)
    # As in airbench96: without it the first logits are large, and so are the first gradients.
    x = layers.Rescaling(1 / 9, dtype="float32")(x)
    logits = layers.Dense(num_outputs, dtype="float32", name="logits")(x)
    return keras.Model(image, MeanWithMirror(dtype="float32")(logits), name="cifar_resnet")


def _with_residual(x):
    channels = x.shape[-1]
    y = _activated(_convolution(x, channels))
    y = layers.BatchNormalization(momentum=0.9)(_convolution(y, channels))
    return layers.Activation("gelu")(layers.Add()([x, y]))


def _convolution(x, channels: int):
    # The batch norm that follows has its own bias.
    return layers.Conv2D(channels, 3, padding="same", use_bias=False)(x)


def _activated(x):
    return layers.Activation("gelu")(layers.BatchNormalization(momentum=0.9)(x))
