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

from tfaccel.keras_internals.moved import numpy
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
        if not (is_known and x.shape.is_fully_defined()):
            return plain(x)
        return called(tf.sqrt, x)[0]

    return patched(numpy, "sqrt", sqrt)


@tf.custom_gradient
def rsqrt(x: tf.Tensor):
    """Returns 1 / sqrt(x), within a function that XLA compiles. Its gradient has a gradient, too.

    Args:
      x: floating, of a shape that is fully known.
    """
    (outputs,) = called(tf.math.rsqrt, x)

    def gradient(of_outputs):
        return tf.raw_ops.RsqrtGrad(y=rsqrt(x), dy=of_outputs)

    return outputs, gradient


def called(operation: Callable, *inputs: tf.Tensor) -> list[tf.Tensor]:
    """Returns the results of `operation(*inputs)`, which get no gradient.

    Args:
      operation: one that is there for good, as each shape's function is kept for it.
      inputs: of shapes that are fully known.
    """
    function = _function(operation, tuple((tuple(each.shape), each.dtype) for each in inputs))
    dtypes = [each.dtype for each in function.outputs]
    results = tf.raw_ops.PartitionedCall(args=list(inputs), Tout=dtypes, f=function)
    for result, each in zip(results, function.outputs, strict=True):
        result.set_shape(each.shape)
    return results


@functools.cache
def _function(operation: Callable, inputs: tuple[tuple[tuple[int, ...], tf.DType], ...]):
    with tf.init_scope(), tf.device(None):
        traced = tf.function(
            operation, autograph=False, experimental_attributes={"_noinline": True}
        )
        return traced.get_concrete_function(*(tf.TensorSpec(*each) for each in inputs))
