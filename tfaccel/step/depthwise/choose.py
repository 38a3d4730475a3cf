"""Decides which kernels compute the depthwise convolutions of a traced step, and says so."""

import math

import tensorflow as tf

from tfaccel.step import triton_calls
from tfaccel.step.depthwise import calls
from tfaccel.step.depthwise.calls import Depthwise
from tfaccel.step.depthwise.depthwise import convolved
from tfaccel.step.own_kernels import OwnKernels


class Depthwises(OwnKernels):
    """Computes the depthwise convolutions of a model's steps, some by tfaccel's kernels."""

    what = "depthwise convolutions"

    def __call__(self, x: tf.Tensor, kernel: tf.Tensor, is_same: bool) -> tf.Tensor | None:
        """Returns a convolution with strides of 1; None if the kernels do not take it.

        Args:
          x: [images, height, width, channels].
          kernel: [height, width, channels], of the same dtype.
          is_same: whether zeros are added around x, so that the output is as large as x.
        """
        if self.are_off or not _is_taken(x, kernel, is_same):
            return None
        self.say_used()
        images, height, width, channels = x.shape
        of = Depthwise(images, height, width, channels, kernel.shape[0], is_same, x.dtype)
        return convolved(of, x, kernel)


def _is_taken(x, kernel, is_same: bool) -> bool:
    if not tf.is_symbolic_tensor(x) or x.dtype not in triton_calls.TYPES:
        return False
    if kernel.dtype != x.dtype or not x.shape.is_fully_defined():
        return False
    window = kernel.shape[0]
    if kernel.shape[1] != window or window not in calls.WINDOWS:
        return False
    if x.shape[3] % calls.MULTIPLE_OF_CHANNELS or not x.shape.num_elements():
        return False
    if not is_same and min(x.shape[1:3]) < window:
        return False
    # A program counts the values of an image.
    return math.prod(x.shape[1:]) <= triton_calls.LARGEST
