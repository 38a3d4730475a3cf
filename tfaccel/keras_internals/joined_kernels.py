"""Lets XLA compute many weights, or check many of them, in one kernel.

XLA of TensorFlow 2.21 makes a kernel for the update of each weight, and for the check of each
matrix. A ViT-B/16 has 124 biases, scales and other small weights, and 76 matrices. Kernels as small
as these take 2 microseconds or more, with a pause before the next one. XLA joins kernels that read
a common array and have results of one shape. So values of one shape are multiplied by a common
array of ones here, which changes no bit of them.
"""

import collections
from collections.abc import Callable, Sequence

import tensorflow as tf

from tfaccel.keras_internals.written import written

_MOST_VALUES = 16_384  # of a small weight. The updates of larger ones wait for the memory.


def joined_updates(gradients: Sequence[tf.Tensor | None]) -> list[tf.Tensor | None]:
    """Returns the gradients of weights, of which XLA joins the updates of small ones.

    Args:
      gradients: of any shapes and dtypes, within a function that XLA compiles.
    """

    def ones_of(gradient):
        is_small = 1 < (gradient.shape.num_elements() or 0) <= _MOST_VALUES
        return gradient.shape if is_small else None

    return _read_together(gradients, ones_of)


def joined_sums(matrices: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    """Returns tensors of two or more axes, of which XLA joins the sums over the last axis.

    Args:
      matrices: of any shapes and dtypes, within a function that XLA compiles.
    """
    return _read_together(matrices, lambda each: each.shape[-1:])


def _read_together(values: Sequence, ones_of: Callable) -> list:
    """Returns the values, each multiplied by ones if others have its shape and dtype.

    Args:
      values: tensors, or None.
      ones_of: returns the shape of a tensor's ones; None if it is to stay as it is.
    """

    def kind_of(value):
        is_known = value is not None and value.shape.is_fully_defined()
        return (tuple(value.shape), value.dtype) if is_known and value.dtype.is_floating else None

    alike, ones = collections.Counter(map(kind_of, values)), {}

    def read(value):
        kind = kind_of(value)
        shape = None if kind is None or alike[kind] == 1 else ones_of(value)
        if shape is None:
            return value
        key = tuple(shape), value.dtype
        if key not in ones:
            ones[key] = written(tf.ones(*key))
        return value * ones[key]

    return [read(each) for each in values]
