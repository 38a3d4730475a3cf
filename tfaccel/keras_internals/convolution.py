"""Quicker convolutions: as matrix products, with more channels, or without a useless bias.

The functions take methods of Keras's `Conv2D`, `Conv2DTranspose` and `BatchNormalization`, and
return replacements. tfaccel/keras_internals/layer_paths.py puts these into the classes while a step
is traced.

    Conv2D.convolution_op = in_eights(Conv2D.convolution_op)                # with XLA, on a GPU
    Conv2D.convolution_op = as_product(Conv2D.convolution_op)               # with XLA
    Conv2DTranspose.call = transposed_as_product(Conv2DTranspose.call)      # with XLA
    biases = CancelledBiases(xla=True)
    Conv2D.call = biases.added(Conv2D.call)
    BatchNormalization.call = biases.cancelled(BatchNormalization.call)
"""

import functools
import itertools
import math
from collections.abc import Callable

import keras
import tensorflow as tf

from tfaccel.keras_internals.batch_norm import has_keras_moments
from tfaccel.keras_internals.written import written, written_if_of_norm

MULTIPLE_OF_CHANNELS = 8  # that cuDNN's kernels take as they are
MOST_PIXELS = 32  # in a window of grey pixels: the backward pass keeps all rows


def as_product(convolution_op: Callable) -> Callable:
    """Returns a replacement of `Conv2D.convolution_op` with three kinds as matrix products.

    XLA passes convolutions to cuDNN. It can compile a matrix product itself, together with the
    operations before and after it, and it chooses the quickest way.

    Windows of 1 x 1: The product saves 2.7% of a ResNet-50 step, in which two thirds of the
    convolutions are of this kind (H200, 2026-11-22). Strides drop the pixels between them first.

    Small windows of grey images, such as MNIST: The quick kernels of cuDNN take channels in eights.
    Here each window becomes a row of the matrix. Forward and backward of 128 x 28 x 28 to 32
    filters of 3 x 3 take 6.1 ms instead of 7.9 (one CPU core, 2026-11-23).

    Windows that touch and do not overlap, as a ViT cuts an image into patches: each patch becomes a
    row of the matrix. For cuDNN, zeros are added to the three channels of an image, up to eight. So
    the patches of a batch of 128 took 0.95 of the 43.2 ms of a ViT-B/16 step (H200, 2026-11-28).

    Args:
      convolution_op: Keras's own `(self, inputs, kernel)`. The inputs are [batch, height, width,
        channels], the kernel is [height, width, channels, filters].
    """

    @functools.wraps(convolution_op)
    def product(self, inputs, kernel):
        is_plain = self.groups == 1 and self.data_format == "channels_last"
        if is_plain and self.kernel_size == (1, 1):
            if self.strides != (1, 1):
                inputs = inputs[:, :: self.strides[0], :: self.strides[1]]
            inputs = written_if_of_norm(inputs)
        elif is_plain and _cuts_patches(self, inputs):
            inputs = _patches(inputs, self.kernel_size)
        elif is_plain and _sees_little(self, inputs):
            inputs = _windows(inputs, self.kernel_size, padding=self.padding)
        else:
            return convolution_op(self, inputs, kernel)
        kernel = keras.ops.convert_to_tensor(kernel)
        return tf.tensordot(inputs, tf.reshape(kernel, [-1, kernel.shape[-1]]), axes=1)

    return product


def in_eights(convolution_op: Callable) -> Callable:
    """Returns a replacement of `Conv2D.convolution_op` that adds zeros up to eight channels.

    cuDNN's kernels take channels in eights. XLA adds zeros to the channels of float16, but not of
    bfloat16 (xla/service/gpu/transforms/cudnn_pad_for_convolutions.cc), and images have three. The
    gradient of the kernel is the slowest: https://github.com/pytorch/pytorch/issues/54404.

    It applies to bfloat16, fewer than eight channels, and windows of more than one pixel without
    strides. With strides, four channels suffice by NVIDIA's guide to convolutions.

    Args:
      convolution_op: as in `as_product`.
    """

    @functools.wraps(convolution_op)
    def convolution(self, inputs, kernel):
        is_few = self.data_format == "channels_last" and (inputs.shape[-1] or 8) < 8
        is_dense = self.groups == 1 and self.strides == (1, 1) and self.kernel_size != (1, 1)
        if not (is_few and is_dense and inputs.dtype == tf.bfloat16):
            return convolution_op(self, inputs, kernel)
        zeros = [0, MULTIPLE_OF_CHANNELS - inputs.shape[-1]]
        inputs = tf.pad(inputs, [*[[0, 0]] * 3, zeros])
        kernel = tf.pad(keras.ops.convert_to_tensor(kernel), [*[[0, 0]] * 2, zeros, [0, 0]])
        return convolution_op(self, inputs, kernel)

    return convolution


def transposed_as_product(call: Callable) -> Callable:
    """Returns a replacement of `Conv2DTranspose.call`: windows side by side as a product.

    XLA passes the layer to cuDNN as the gradient of a convolution with strides. If the windows
    touch and do not overlap, each pixel becomes one window, so it is a product. The windows find
    their places where the outputs are read: in a U-Net, where they are joined with the outputs of
    its other branch.

    All else uses `call`: windows that overlap or leave gaps, padding of the outputs, channels
    first, inputs of unknown height, width or channels.

    Args:
      call: Keras's own `(self, inputs)`. The inputs are [batch, height, width, channels], the
        kernel is [height, width, filters, channels].
    """

    @functools.wraps(call)
    def product(self, inputs):
        if not _sets_side_by_side(self, inputs):
            return call(self, inputs)
        kernel = keras.ops.convert_to_tensor(self.kernel)
        height, width, filters, channels = kernel.shape
        kernel = tf.reshape(kernel, [-1, channels])
        products = tf.tensordot(written_if_of_norm(inputs), kernel, axes=[[3], [1]])
        rows, columns = inputs.shape[1:3]
        windows = tf.reshape(products, [-1, rows, columns, height, width, filters])
        outputs = tf.reshape(
            tf.transpose(windows, [0, 1, 3, 2, 4, 5]),
            [-1, rows * height, columns * width, filters],
        )
        if self.use_bias:
            outputs = outputs + keras.ops.convert_to_tensor(self.bias)
        return outputs if self.activation is None else self.activation(outputs)

    return product


def _sets_side_by_side(layer, inputs) -> bool:
    touches = layer.strides == layer.kernel_size and layer.dilation_rate == (1, 1)
    is_plain = layer.data_format == "channels_last" and layer.output_padding is None
    return touches and is_plain and inputs.shape[1:].is_fully_defined()


def _sees_little(layer, inputs) -> bool:
    height, width = layer.kernel_size
    is_dense = layer.strides == (1, 1) and layer.dilation_rate == (1, 1)
    is_known = inputs.shape[1:].is_fully_defined()
    return is_known and inputs.shape[-1] == 1 and is_dense and height * width <= MOST_PIXELS


def _cuts_patches(layer, inputs) -> bool:
    touches = layer.strides == layer.kernel_size and layer.dilation_rate == (1, 1)
    sizes = inputs.shape[1:3]
    if not touches or None in sizes:
        return False
    fits = all(size % each == 0 for size, each in zip(sizes, layer.kernel_size, strict=True))
    return inputs.shape[-1] % MULTIPLE_OF_CHANNELS != 0 and (fits or layer.padding == "valid")


def _patches(inputs: tf.Tensor, size: tuple[int, int]) -> tf.Tensor:
    """Returns patches as rows, [batch, rows, columns, values of a patch]; the rest is left out."""
    height, width = size
    rows, columns = inputs.shape[1] // height, inputs.shape[2] // width
    inputs = inputs[:, : rows * height, : columns * width]
    cut = tf.reshape(inputs, [-1, rows, height, columns, width, inputs.shape[-1]])
    return tf.reshape(
        tf.transpose(cut, [0, 1, 3, 2, 4, 5]),
        [-1, rows, columns, math.prod([*size, cut.shape[-1]])],
    )


def _windows(inputs: tf.Tensor, size: tuple[int, int], *, padding: str) -> tf.Tensor:
    """Returns each pixel's window, [batch, height, width, pixels of a window], of one channel."""
    if padding == "same":
        around = [[(each - 1) // 2, each // 2] for each in size]
        inputs = tf.pad(inputs, [[0, 0], *around, [0, 0]])
    height, width = (inputs.shape[1 + axis] - size[axis] + 1 for axis in (0, 1))
    shifts = itertools.product(range(size[0]), range(size[1]))
    shifted = [inputs[:, top : top + height, left : left + width] for top, left in shifts]
    return tf.concat(shifted, axis=-1)


class CancelledBiases:
    """Leaves out biases that a batch normalization subtracts again, and gives them the gradient 0.

    A bias shifts a whole channel, and the normalization subtracts the mean of the channel. The
    gradient of the bias would be only rounding errors, and would need a sum over all activations:
    4.6% of the step of Keras's ResNet-50, in which 53 convolutions have such a bias (H200,
    2026-11-22). If anything else reads the outputs of the convolution, those outputs have the bias,
    and the bias gets its gradient.
    """

    def __init__(self, *, xla: bool):
        """Knows no convolution yet. Make one for each trace; `xla`: whether XLA compiles it."""
        self._xla = xla
        # id of the biased outputs: (they, so that no other tensor gets the id; outputs; bias)
        self._added = {}

    def added(self, call: Callable) -> Callable:
        """Returns a replacement of `Conv2D.call`, `(self, inputs)`, that notes the bias."""

        @functools.wraps(call)
        def call_noted(conv, inputs):
            is_linear = conv.activation in (None, keras.activations.linear)
            if not conv.use_bias or not is_linear or conv.data_format != "channels_last":
                return call(conv, inputs)
            outputs = conv.convolution_op(inputs, conv.kernel)
            bias = tf.convert_to_tensor(keras.ops.convert_to_tensor(conv.bias))  # no variable
            biased = _biased(outputs, bias) if self._xla else outputs + bias
            self._added[id(biased)] = biased, outputs, bias
            return biased

        return call_noted

    def cancelled(self, call: Callable) -> Callable:
        """Returns a replacement of `BatchNormalization.call` that takes inputs without a bias.

        Args:
          call: A `call` from tfaccel/keras_internals/batch_norm.py, which accepts a bias.
        """

        @functools.wraps(call)
        def call_without(norm, inputs, training=None, mask=None):
            if not (_takes_mean_away(norm, training, mask) and id(inputs) in self._added):
                return call(norm, inputs, training=training, mask=mask)
            _, outputs, bias = self._added[id(inputs)]
            in_mean = tf.stop_gradient(tf.cast(bias, tf.float32))
            return call(norm, _without(outputs, bias), training=training, bias=in_mean)

        return call_without


@tf.custom_gradient
def _biased(outputs: tf.Tensor, bias: tf.Tensor):
    """Returns outputs + bias, [batch, height, width, channels], for XLA.

    The gradient of the bias is a sum over the gradient of the outputs. XLA writes the latter in
    half precision for the convolution. If it was computed in float32, as by a layer norm, XLA would
    write it once more in float32, only for the sum. In a ConvNeXt-Tiny that was 1.8 of 26.0 GB a
    step (batch 128; tools/gpu_program.py).
    """

    def gradient(of_outputs):
        of_outputs = written(of_outputs)
        return of_outputs, tf.reduce_sum(of_outputs, [0, 1, 2])

    return outputs + bias, gradient


def _takes_mean_away(norm, training, mask) -> bool:
    """Returns whether the layer subtracts the mean of each channel of its inputs."""
    is_training = training is True and norm.trainable
    is_plain = mask is None and not norm.renorm and norm.axis in (-1, 3) and has_keras_moments(norm)
    # A moving mean of another dtype would lose digits when the bias is added and subtracted.
    return is_training and is_plain and norm.moving_mean.dtype == "float32"


def _without(outputs: tf.Tensor, bias: tf.Tensor) -> tf.Tensor:
    """Returns the outputs unchanged, but the bias gets a gradient of 0 from them."""
    # An optimizer skips a variable without a gradient, and so its weight decay.
    return tf.identity_n([outputs, bias])[0]
