"""The head and decoder of DeepLabV3+ (Chen et al. 2018, arXiv:1802.02611) over any backbone's maps.

Atrous spatial pyramid pooling sees the last map with a 1 x 1 convolution, three 3 x 3 convolutions
of different dilation, and the mean of the image. Its result is resized to the map of a quarter of
the image's sides, and both pass two 3 x 3 convolutions. Convolutions are dense, as in DeepLabV3:
GPUs run dilated depthwise convolutions slowly.
"""

import keras
from keras import layers

from tfaccel.config.segmentation import DECODER_LAYERS
from tfaccel.experiment.models.unet import convolution
from tfaccel.keras_internals.bilinear import Bilinear

CHANNELS = 256
LOW_LEVEL_CHANNELS = 48  # few, so that they do not outweigh the pyramid's (section 4.1 there)
LOW_LEVEL = 2  # halvings: a quarter of the image's sides
RATES = (6, 12, 18)  # for an output stride of 16; half of them for 32


def decode(maps: list[keras.KerasTensor | None], *, output_stride: int) -> keras.KerasTensor:
    """Returns a map of a quarter of the image's sides, [batch, height, width, 256].

    Args:
      maps: the backbone's feature maps by the number of halvings.
      output_stride: how many of the image's pixels a pixel of the last map stands for: 16 or 32.
    """
    low = maps[LOW_LEVEL]
    x = _pyramid(maps[-1], [rate * 16 // output_stride for rate in RATES])
    x = Bilinear(*low.shape[1:3], name=f"{DECODER_LAYERS}resized")(x)
    low = convolution(low, LOW_LEVEL_CHANNELS, 1, name=f"{DECODER_LAYERS}low_level")
    x = layers.Concatenate(name=f"{DECODER_LAYERS}both")([x, low])
    for index in (1, 2):
        x = convolution(x, CHANNELS, 3, name=f"{DECODER_LAYERS}{index}")
    return x


def _pyramid(x, rates: list[int]):
    """Returns the atrous spatial pyramid pooling of a map, with 256 channels."""
    name = f"{DECODER_LAYERS}pyramid"
    parts = [convolution(x, CHANNELS, 1, name=f"{name}_point")]
    for rate in rates:
        parts.append(convolution(x, CHANNELS, 3, name=f"{name}_{rate}", dilation_rate=rate))
    mean = layers.GlobalAveragePooling2D(keepdims=True, name=f"{name}_mean")(x)
    mean = convolution(mean, CHANNELS, 1, name=f"{name}_image")
    parts.append(layers.UpSampling2D(tuple(x.shape[1:3]), name=f"{name}_everywhere")(mean))
    x = layers.Concatenate(name=f"{name}_all")(parts)
    return convolution(x, CHANNELS, 1, name=f"{name}_joined")
