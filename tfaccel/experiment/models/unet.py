"""The decoder of a U-Net (Ronneberger et al. 2015, arXiv:1505.04597) over any backbone's maps.

Each step doubles the resolution by a 2 x 2 transposed convolution ("up-convolution"), appends the
backbone's map of that resolution, and has two 3 x 3 convolutions. Unlike the paper's, convolutions
are padded and normalized, so that the output has the image's size.
"""

import keras
from keras import layers

from tfaccel.config.segmentation import DECODER_LAYERS
from tfaccel.keras_internals.bilinear import Bilinear

# By the number of halvings: the widths of a step at 1/1, 1/2, ... of the image's sides.
CHANNELS = (16, 32, 64, 128, 256)


def decode(maps: list[keras.KerasTensor | None], size: tuple[int, int]) -> keras.KerasTensor:
    """Returns a map of the image's size, [batch, height, width, 16], for a layer to the classes.

    Args:
      maps: the backbone's feature maps by the number of halvings; None where it has none.
      size: the image's height and width.
    """
    x = maps[-1]
    for level in reversed(range(len(maps) - 1)):
        name, skip = f"{DECODER_LAYERS}{level}", maps[level]
        channels = CHANNELS[min(level, len(CHANNELS) - 1)]
        begin = {"kernel_initializer": "he_normal"}
        x = layers.Conv2DTranspose(channels, 2, strides=2, name=f"{name}_up", **begin)(x)
        wanted = tuple((x if skip is None else skip).shape[1:3]) if level else size
        if tuple(x.shape[1:3]) != wanted:  # a backbone without padding, such as InceptionV3
            x = Bilinear(*wanted, name=f"{name}_resized")(x)
        if skip is not None:
            x = layers.Concatenate(name=f"{name}_both")([x, skip])
        for index in (1, 2):
            x = convolution(x, channels, 3, name=f"{name}_{index}")
    return x


def convolution(x, channels: int, size: int, *, name: str, dilation_rate: int = 1):
    """Returns a padded convolution with batch normalization and ReLU."""
    x = layers.Conv2D(
        channels,
        size,
        padding="same",
        use_bias=False,
        dilation_rate=dilation_rate,
        kernel_initializer="he_normal",
        name=f"{name}_conv",
    )(x)
    # As in torchvision. With Keras's momentum of 0.99, tests of the first hundreds of steps would
    # have statistics from the start, which are far from those of a backbone's maps.
    x = layers.BatchNormalization(epsilon=1e-5, momentum=0.9, name=f"{name}_bn")(x)
    return layers.ReLU(name=f"{name}_relu")(x)
