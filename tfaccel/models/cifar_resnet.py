"""A small residual network for images of 32 x 32 pixels: ResNet-9.

From David Page, "How to Train Your ResNet" (myrtle.ai, 2018), first on DAWNBench's CIFAR-10 then:
wide and shallow, so that a GPU is busy. Its blocks are those of He et al., "Deep Residual Learning
for Image Recognition" (2016).
"""

import keras
from keras import layers


def build(*, image_shape: tuple[int, int, int], num_outputs: int) -> keras.Model:
    """Returns eight convolutions and a dense layer: 6.6 M parameters for 10 classes.

    Input: [batch, height, width, channels] float, of about mean 0 and deviation 1. Output:
    [batch, num_outputs] float32 logits.

    Raises:
      ValueError: the images are too small to be pooled three times.
    """
    if min(image_shape[:2]) < 8:
        raise ValueError("images must be at least 8x8")
    image = keras.Input(image_shape, name="image")
    x = _convolution(image, 64)
    x = layers.MaxPooling2D()(_convolution(x, 128))
    x = _residual(x, 128)
    x = layers.MaxPooling2D()(_convolution(x, 256))
    x = layers.MaxPooling2D()(_convolution(x, 512))
    x = _residual(x, 512)
    x = layers.GlobalMaxPooling2D()(x)
    # Page's 1/8: else the first logits are large, and so are the first gradients.
    x = layers.Rescaling(0.125, dtype="float32")(x)
    logits = layers.Dense(num_outputs, dtype="float32", name="logits")(x)
    return keras.Model(image, logits, name="cifar_resnet")


def _convolution(x, channels: int):
    # Batch norm has a bias of its own.
    x = layers.Conv2D(channels, 3, padding="same", use_bias=False)(x)
    return layers.ReLU()(layers.BatchNormalization(momentum=0.9)(x))


def _residual(x, channels: int):
    return layers.Add()([x, _convolution(_convolution(x, channels), channels)])
