"""Two sums over the same axes of arrays of one shape.

    mean, mean_of_squares = (each / n for each in sums_at_once(x, tf.square(x), axes=(0, 1, 2)))

XLA makes one kernel of a reduction with two results. It also makes one kernel of two reductions of
arrays that it computes from common ones, but only after it has decided what to write to memory. And
where it splits a sum over many rows into two sums, the second ones stay two kernels. These were 242
of the 1,630 kernels of a DenseNet-121's step (tools/gpu_program.py).
"""

import functools
from collections.abc import Sequence

import tensorflow as tf
from tensorflow.compiler.tf2xla.python import xla

from tfaccel.keras_internals.lowered_once import called


def sums_in_turn(a: tf.Tensor, b: tf.Tensor, axes: Sequence[int]) -> tuple[tf.Tensor, tf.Tensor]:
    """Returns the sums of a and of b over the axes."""
    axes = tf.constant(axes)
    return tf.reduce_sum(a, axes), tf.reduce_sum(b, axes)


def sums_at_once(a: tf.Tensor, b: tf.Tensor, axes: Sequence[int]) -> tuple[tf.Tensor, tf.Tensor]:
    """Returns the sums of a and of b, float32, over the axes, within a function for XLA.

    Args:
      a, b: float32, of one shape.
      axes: counted from 0.
    """
    kept = [1 if axis in axes else -1 for axis in range(len(a.shape))]
    reduce = _reduction(tuple(axes))

    @tf.custom_gradient
    def sums(a, b):
        def gradient(of_a, of_b):
            each = (tf.reshape(of_sum, kept) for of_sum in (of_a, of_b))
            return tuple(tf.broadcast_to(of_sum, tf.shape(a)) for of_sum in each)

        # TensorFlow takes 12 ms to translate such a reduction.
        is_known = a.shape.is_fully_defined()
        return tuple(called(reduce, a, b) if is_known else reduce(a, b)), gradient

    return sums(a, b)


@functools.cache
def _reduction(axes: tuple[int, ...]):
    """Returns the function of two arrays that sums both over the axes."""

    def reduce(a, b):
        zero = tf.constant(0, tf.float32)
        return xla.variadic_reduce([a, b], [zero, zero], list(axes), _both())

    return reduce


@functools.cache
def _both():
    """Returns the function that adds two pairs of numbers."""
    number = tf.TensorSpec((), tf.float32)
    with tf.init_scope(), tf.device(None):
        add = tf.function(lambda a, b, to_a, to_b: (a + to_a, b + to_b), autograph=False)
        return add.get_concrete_function(*4 * [number])
