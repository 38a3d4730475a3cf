"""A depthwise convolution by Triton kernels, and its gradient, in a function that XLA compiles.

A convolution is linear in x and in the kernel. So the gradient of each of its three forms (the
output, the gradient of x, the gradient of the kernel) is made of the other two.
"""

import tensorflow as tf

from tfaccel.keras_internals.call_module import call_module
from tfaccel.step.depthwise import calls
from tfaccel.step.depthwise.calls import Depthwise


def convolved(of: Depthwise, x: tf.Tensor, kernel: tf.Tensor) -> tf.Tensor:
    """Returns a depthwise convolution, summed in float32 and rounded once.

    Args:
      of: its shapes and dtype.
      x: [images, height, width, channels].
      kernel: [window, window, channels].
    """

    @tf.custom_gradient
    def run(x, kernel):
        def backward(gradient):
            return _of_x(of, gradient, kernel), _of_kernel(of, x, gradient)

        (found,) = call_module(
            calls.forward(of), [x, _wide(kernel)], [tf.TensorSpec(of.output_shape, of.dtype)]
        )
        return found, backward

    return run(x, kernel)


def _of_x(of: Depthwise, gradient: tf.Tensor, kernel: tf.Tensor) -> tf.Tensor:
    """Returns the gradient of x."""

    @tf.custom_gradient
    def run(gradient, kernel):
        def backward(of_result):
            return convolved(of, of_result, kernel), _of_kernel(of, of_result, gradient)

        (found,) = call_module(
            calls.of_x(of), [gradient, _wide(kernel)], [tf.TensorSpec(of.shape, of.dtype)]
        )
        return found, backward

    return run(gradient, kernel)


def _of_kernel(of: Depthwise, x: tf.Tensor, gradient: tf.Tensor) -> tf.Tensor:
    """Returns the gradient of the kernel."""

    @tf.custom_gradient
    def run(x, gradient):
        def backward(of_result):
            return _of_x(of, gradient, of_result), convolved(of, x, of_result)

        (sums,) = call_module(
            calls.of_kernel(of), [x, gradient], [tf.TensorSpec(of.sums, tf.float32)]
        )
        return tf.cast(tf.reduce_sum(sums, axis=0), of.dtype), backward

    return run(x, gradient)


def _wide(kernel: tf.Tensor) -> tf.Tensor:
    return tf.cast(kernel, tf.float32)
