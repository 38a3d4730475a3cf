"""Where Keras convolves each channel alone: replacements that may use another implementation.

The functions take functions of Keras's TensorFlow backend, and return replacements. A replacement
asks `convolved(x, kernel, is_same)`, which returns the convolution, or None if it does not take it.

    nn.conv = of_groups(nn.conv, convolved)             # while a step for XLA is traced
    nn.depthwise_conv = of_layer(nn.depthwise_conv, convolved)
    nn.separable_conv = of_separable(nn.separable_conv, convolved)

Shapes: x [images, height, width, channels], kernel [height, width, channels], both of one dtype.
"""

import functools
from collections.abc import Callable

import keras
import tensorflow as tf


def of_groups(conv: Callable, convolved: Callable) -> Callable:
    """Returns a replacement of Keras's `conv`, for those with as many groups as channels."""

    @functools.wraps(conv)
    def replaced(
        inputs, kernel, strides=1, padding="valid", data_format=None, dilation_rate=1
    ):  # fmt: skip
        found = None
        if _is_plain(inputs, strides, data_format, dilation_rate):
            kernel = keras.ops.convert_to_tensor(kernel)
            if kernel.shape[2] == 1 and kernel.shape[3] == inputs.shape[3]:
                found = convolved(inputs, kernel[:, :, 0], _is_same(padding))
        if found is None:
            return conv(inputs, kernel, strides, padding, data_format, dilation_rate)
        return found

    return replaced


def of_layer(depthwise_conv: Callable, convolved: Callable) -> Callable:
    """Returns a replacement of Keras's `depthwise_conv`, for those with one output a channel."""

    @functools.wraps(depthwise_conv)
    def replaced(
        inputs, kernel, strides=1, padding="valid", data_format=None, dilation_rate=1
    ):  # fmt: skip
        found = None
        if _is_plain(inputs, strides, data_format, dilation_rate):
            kernel = keras.ops.convert_to_tensor(kernel)
            if kernel.shape[3] == 1 and kernel.shape[2] == inputs.shape[3]:
                found = convolved(inputs, kernel[:, :, :, 0], _is_same(padding))
        if found is None:
            return depthwise_conv(inputs, kernel, strides, padding, data_format, dilation_rate)
        return found

    return replaced


def of_separable(separable_conv: Callable, convolved: Callable) -> Callable:
    """Returns a replacement of Keras's `separable_conv`. What joins the channels is a product."""

    @functools.wraps(separable_conv)
    def replaced(
        inputs,
        depthwise_kernel,
        pointwise_kernel,
        strides=1,
        padding="valid",
        data_format=None,
        dilation_rate=1,
    ):
        found = None
        if _is_plain(inputs, strides, data_format, dilation_rate):
            kernel = keras.ops.convert_to_tensor(depthwise_kernel)
            if kernel.shape[3] == 1 and kernel.shape[2] == inputs.shape[3]:
                found = convolved(inputs, kernel[:, :, :, 0], _is_same(padding))
        if found is None:
            return separable_conv(
                inputs,
                depthwise_kernel,
                pointwise_kernel,
                strides,
                padding,
                data_format,
                dilation_rate,
            )
        return tf.tensordot(found, keras.ops.convert_to_tensor(pointwise_kernel)[0, 0], axes=1)

    return replaced


def _is_plain(inputs, strides, data_format, dilation_rate) -> bool:
    """Returns whether it is in two dimensions, channels last, with nothing skipped."""
    steps = (strides, 1 if dilation_rate is None else dilation_rate)
    ones = all(each == 1 or tuple(each) == (1, 1) for each in steps)
    is_last = keras.config.image_data_format() if data_format is None else data_format
    return len(inputs.shape) == 4 and is_last == "channels_last" and ones


def _is_same(padding: str) -> bool:
    return padding.lower() == "same"
