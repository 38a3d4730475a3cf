"""Where Keras convolves each channel alone: replacements that may use another implementation.

The functions take functions of Keras's TensorFlow backend, and return replacements. A replacement
asks `convolved(x, kernel, is_same)`, which returns the convolution, or None if it does not take it.

    nn.conv = of_conv(nn.conv, convolved, axis=2)       # while a step for XLA is traced
    nn.depthwise_conv = of_conv(nn.depthwise_conv, convolved, axis=3)
    nn.separable_conv = of_separable(nn.separable_conv, convolved)

Shapes: x [images, height, width, channels], kernel [height, width, channels], both of one dtype.
"""

import functools
from collections.abc import Callable

import keras
import tensorflow as tf


def of_conv(conv: Callable, convolved: Callable, *, axis: int) -> Callable:
    """Returns a replacement of Keras's `conv` or `depthwise_conv`.

    Args:
      conv: Keras's function.
      convolved: as this module says.
      axis: of the kernel's two last axes the one that has a single value for each channel.
    """

    @functools.wraps(conv)
    def replaced(inputs, kernel, *args, **kwargs):
        found = _found(convolved, axis, inputs, kernel, *args, **kwargs)
        return conv(inputs, kernel, *args, **kwargs) if found is None else found

    return replaced


def of_separable(separable_conv: Callable, convolved: Callable) -> Callable:
    """Returns a replacement of Keras's `separable_conv`. What joins the channels is a product."""

    @functools.wraps(separable_conv)
    def replaced(inputs, depthwise_kernel, pointwise_kernel, *args, **kwargs):
        found = _found(convolved, 3, inputs, depthwise_kernel, *args, **kwargs)
        if found is None:
            return separable_conv(inputs, depthwise_kernel, pointwise_kernel, *args, **kwargs)
        return tf.tensordot(found, keras.ops.convert_to_tensor(pointwise_kernel)[0, 0], axes=1)

    return replaced


def _found(
    convolved: Callable,
    axis: int,
    inputs,
    kernel,
    strides=1,
    padding: str = "valid",
    data_format: str | None = None,
    dilation_rate=1,
) -> tf.Tensor | None:
    """Returns what `convolved` does; None if nothing, or if each channel is not convolved alone.

    Args:
      convolved: as this module says.
      axis: as in `of_conv`.
      inputs: and all else: what the three functions of Keras have in common.
    """
    if len(inputs.shape) != 4 or not _are_ones(strides) or not _are_ones(dilation_rate or 1):
        return None
    if (data_format or keras.config.image_data_format()) != "channels_last":
        return None
    kernel = keras.ops.convert_to_tensor(kernel)
    if kernel.shape[axis] != 1 or kernel.shape[5 - axis] != inputs.shape[3]:
        return None
    return convolved(inputs, tf.squeeze(kernel, axis), padding.lower() == "same")


def _are_ones(steps) -> bool:
    return steps in (1, (1, 1), [1, 1])  # Conv2D passes a list
