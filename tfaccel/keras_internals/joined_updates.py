"""Lets XLA update small weights of one shape in one kernel.

XLA of TensorFlow 2.21 makes a kernel for the update of each weight. A ViT-B/16 has 124 biases,
scales and other small weights, whose kernels take 2 microseconds each and a pause before the next
one. XLA joins kernels that read a common array and have outputs of one shape. So all gradients of
one shape are multiplied by a common array of ones here, which changes no bit of them.
"""

import collections
from collections.abc import Sequence

import tensorflow as tf

from tfaccel.keras_internals.written import written

_MOST_VALUES = 16_384  # of a small weight. The kernels of larger ones wait for the memory.


def joined(gradients: Sequence[tf.Tensor | None]) -> list[tf.Tensor | None]:
    """Returns the gradients of weights, whose small ones of one shape XLA reads together.

    Args:
      gradients: of any shapes and dtypes, within a function that XLA compiles.
    """
    alike = collections.Counter(_kind(each) for each in gradients)
    ones = {}

    def read_with_others(gradient):
        kind = _kind(gradient)
        if kind is None or alike[kind] == 1:
            return gradient
        if kind not in ones:
            ones[kind] = written(tf.ones(*kind))
        return gradient * ones[kind]

    return [read_with_others(each) for each in gradients]


def _kind(gradient: tf.Tensor | None) -> tuple[tuple[int, ...], tf.DType] | None:
    """Returns the shape and dtype of a small gradient; None of others."""
    if gradient is None or not gradient.dtype.is_floating or not gradient.shape.is_fully_defined():
        return None
    is_small = 1 < gradient.shape.num_elements() <= _MOST_VALUES
    return (tuple(gradient.shape), gradient.dtype) if is_small else None
