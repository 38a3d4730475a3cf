"""Lets TensorFlow translate some operations for XLA once for each shape, not once for each use.

TensorFlow 2.21 translates most operations for XLA in 0.05 ms. For some, such as Sqrt and Rsqrt, it
sets up MLIR each time, which takes 5 ms (one CPU core). AdamW has 400 square roots in a ViT-B/16.
In a branch or a loop, a call of a function that is not inlined is translated once for each shape.
XLA itself inlines it later, so its program is the same.

    with square_roots_once():           # while an update is traced for XLA
        optimizer.apply(gradients)
    y = rsqrt(x)
"""

import contextlib
import functools
from collections.abc import Callable

import keras
import tensorflow as tf
from keras.src.backend.tensorflow import numpy

from tfaccel.keras_internals.patching import patched


def square_roots_once() -> contextlib.AbstractContextManager:
    """Returns a context in which `keras.ops.sqrt` is translated once for each shape.

    It is for updates of an optimizer: the square roots have no gradient.
    """
    plain = numpy.sqrt

    @functools.wraps(plain)
    def sqrt(x):
        x = keras.ops.convert_to_tensor(x)
        x = tf.convert_to_tensor(x) if isinstance(x, keras.Variable) else x
        is_known = tf.is_symbolic_tensor(x) and x.dtype.is_floating
        return _called(tf.sqrt, x) if is_known and x.shape.is_fully_defined() else plain(x)

    return patched(numpy, "sqrt", sqrt)


@tf.custom_gradient
def rsqrt(x: tf.Tensor):
    """Returns 1 / sqrt(x), within a function that XLA compiles. Its gradient has a gradient, too.

    Args:
      x: floating, of a shape that is fully known.
    """
    outputs = _called(tf.math.rsqrt, x)

    def gradient(of_outputs):
        return tf.raw_ops.RsqrtGrad(y=rsqrt(x), dy=of_outputs)

    return outputs, gradient


def _called(operation: Callable, x: tf.Tensor) -> tf.Tensor:
    """Returns `operation(x)`, which has the shape and dtype of x."""
    function = _function(operation, tuple(x.shape), x.dtype)
    outputs = tf.raw_ops.PartitionedCall(args=[x], Tout=[x.dtype], f=function)[0]
    outputs.set_shape(x.shape)
    return outputs


@functools.cache
def _function(operation: Callable, shape: tuple[int, ...], dtype: tf.DType):
    with tf.init_scope(), tf.device(None):
        traced = tf.function(
            operation, autograph=False, experimental_attributes={"_noinline": True}
        )
        return traced.get_concrete_function(tf.TensorSpec(shape, dtype))
