"""Lets XLA cast many weights, update many or check many of them, in one kernel.

XLA of TensorFlow 2.21 makes a kernel for the cast of each weight to half precision, for its update,
and for the check of each matrix. A ViT-B/16 has 124 biases, scales and other small weights, and 76
matrices. Kernels as small as these take 2 microseconds or more, with a pause before the next one.
XLA joins kernels that read a common array and have results of one shape. So values of one shape are
multiplied by a common array of ones here, which changes no bit of them.
"""

import collections
import functools
import math
import weakref
from collections.abc import Callable, Sequence

import tensorflow as tf

from tfaccel.keras_internals.tape_gradient import on_tapes
from tfaccel.keras_internals.written import written

_HALF = {"float16", "bfloat16"}
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


def joined_casts(maybe_cast: Callable) -> Callable:
    """Returns a replacement of `AutocastScope.maybe_cast(self, value)`, whose casts XLA joins.

    It is for traced functions that XLA compiles. All variables whose last axes have one size are
    multiplied by the same ones, if they are float32 and cast to float16 or bfloat16.
    """
    ones = weakref.WeakKeyDictionary()  # by graph and number

    @functools.wraps(maybe_cast)
    def cast(self, value):
        shape, graph = value.shape, tf.compat.v1.get_default_graph()
        is_array = shape.rank and shape.is_fully_defined() and shape.num_elements() > 1
        if not is_array or value.dtype != tf.float32 or self.dtype not in _HALF:
            return maybe_cast(self, value)
        of_graph = ones.setdefault(graph, {})
        if shape[-1] not in of_graph:
            of_graph[shape[-1]] = written(tf.ones([shape[-1]]))
        return maybe_cast(self, _times_ones(value, of_graph[shape[-1]]))

    return cast


def _times_ones(value, ones: tf.Tensor) -> tf.Tensor:
    """Returns the value, whose gradient is its own as it comes: rows of a table stay some rows."""
    run = on_tapes(lambda value: (value * ones, lambda gradient: gradient))
    return run(tf.convert_to_tensor(value))


def _read_together(values: Sequence, ones_of: Callable) -> list:
    """Returns the values, each multiplied by ones if others have its shape and dtype.

    Args:
      values: tensors, or None.
      ones_of: returns the shape of a tensor's ones; None if it is to stay as it is.
    """

    def kind_of(value):
        is_known = value is not None and value.shape.is_fully_defined()
        return (tuple(value.shape), value.dtype) if is_known and value.dtype.is_floating else None

    kinds = [kind_of(each) for each in values]
    alike = collections.Counter(kinds)
    shapes = [
        None if kind is None or alike[kind] == 1 else ones_of(value)
        for kind, value in zip(kinds, values, strict=True)
    ]
    joined = [each for each in zip(values, shapes, strict=True) if each[1] is not None]

    @functools.cache
    def whole(dtype):
        sizes = [shape.num_elements() for value, shape in joined if value.dtype == dtype]
        return written(tf.ones([max(sizes)], dtype))

    @functools.cache
    def ones(shape, dtype):
        return tf.reshape(whole(dtype)[: math.prod(shape)], shape)

    return [
        value if shape is None else value * ones(tuple(shape), value.dtype)
        for value, shape in zip(values, shapes, strict=True)
    ]
