"""A bias and GELU by Triton kernels, and their gradient, in a function that XLA compiles.

The GELU may be in another layer than the bias. So they are two functions: `with_bias` of
keras_internals/product_bias.py and `bias_gelu`. Each has a gradient of its own. One kernel computes
both gradients: that of the total x + bias, and that of the bias, which is the former summed over
the rows. `bias_gelu` returns the total's gradient, and hands on the bias's with it.
"""

import math

import tensorflow as tf

from tfaccel.keras_internals import gelu as by_xla
from tfaccel.keras_internals.call_module import call_module
from tfaccel.keras_internals.product_bias import with_sums
from tfaccel.step.gelu import calls
from tfaccel.step.gelu.calls import Gelu


def bias_gelu(total: tf.Tensor, x: tf.Tensor, bias: tf.Tensor, *, approximate: bool) -> tf.Tensor:
    """Returns gelu(total), computed in float32 from x and the bias, and rounded once.

    Args:
      total: x + bias, as `with_bias` returns it; it gets the gradient.
      x: [..., columns], float16 or bfloat16. Its shape is known when the function is traced.
      bias: [columns], of the same dtype.
      approximate: whether it is the form with tanh.
    """
    *rows, columns = x.shape
    of = Gelu(rows=math.prod(rows), columns=columns, dtype=x.dtype, approximate=approximate)

    @tf.custom_gradient
    def run(total):
        def backward(gradient):
            own, sums = _gradients(of, x, bias)(gradient, total)
            return with_sums(own, sums)

        return _forward(of, x, bias), backward

    return run(total)


def _forward(of: Gelu, x: tf.Tensor, bias: tf.Tensor) -> tf.Tensor:
    shape = (of.rows, of.columns)
    given = [tf.reshape(x, shape), bias]
    (found,) = call_module(calls.forward(of), given, [tf.TensorSpec(shape, of.dtype)])
    return tf.reshape(found, x.shape)


def _gradients(of: Gelu, x: tf.Tensor, bias: tf.Tensor):
    """Returns the gradients of (total, bias), as a function of (the output's gradient, total)."""
    shape = (of.rows, of.columns)

    @tf.custom_gradient
    def gradients(gradient, total):
        # x and the bias are constants here: a gradient of this gradient goes to the total.
        own, sums = call_module(
            calls.backward(of),
            [tf.reshape(x, shape), bias, tf.reshape(gradient, shape)],
            [tf.TensorSpec(shape, of.dtype), tf.TensorSpec(of.sums, tf.float32)],
        )
        own = tf.reshape(own, x.shape)
        sums = tf.cast(tf.reduce_sum(sums, axis=0), of.dtype)

        def backward(of_own, of_sums):
            return _of_plain(of, gradient, total, of_own + of_sums)

        return (own, sums), backward

    return gradients


def _of_plain(of: Gelu, gradient, total, of_own) -> list[tf.Tensor]:
    """Returns the gradients, to (gradient, total), of the total's gradient, without a kernel."""
    with tf.GradientTape() as outer:
        outer.watch([gradient, total])
        with tf.GradientTape() as inner:
            inner.watch(total)
            found = by_xla.gelu(total, of.approximate)
        own = inner.gradient(found, total, output_gradients=gradient)
    return outer.gradient(own, [gradient, total], output_gradients=of_own)
