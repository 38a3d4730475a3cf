"""A bias and GELU by Triton kernels, and their gradient, in a function that XLA compiles."""

import math

import tensorflow as tf

from tfaccel.keras_internals import gelu as by_xla
from tfaccel.keras_internals.call_module import call_module
from tfaccel.step.gelu import calls
from tfaccel.step.gelu.calls import Gelu


def bias_gelu(x: tf.Tensor, bias: tf.Tensor, *, approximate: bool) -> tf.Tensor:
    """Returns gelu(x + bias), computed in float32 and rounded once.

    Args:
      x: [..., columns], float16 or bfloat16. Its shape is known when the function is traced.
      bias: [columns], of the same dtype.
      approximate: whether it is the form with tanh.
    """
    of = _of(x, approximate)

    @tf.custom_gradient
    def run(x, bias):
        def backward(gradient):
            return _gradients(of)(gradient, x, bias)

        return _forward(of, x, bias), backward

    return run(x, bias)


def gelu_of_sum(total: tf.Tensor, x: tf.Tensor, bias: tf.Tensor, *, approximate: bool) -> tf.Tensor:
    """Returns gelu(total), where `total` is x + bias, and has the gradient.

    Arguments and result are those of `bias_gelu`. It is for a sum that others may use too.
    """
    of = _of(x, approximate)

    @tf.custom_gradient
    def run(total):
        def backward(gradient):
            # x and the bias are constants here. What the gradient's own gradient changes is total.
            @tf.custom_gradient
            def gradients(gradient, total):
                own, _ = _backward(of, gradient, x, bias)
                return own, lambda of_own: _of_plain(of, gradient, [total], [of_own])

            return gradients(gradient, total)

        return _forward(of, x, bias), backward

    return run(total)


def _of(x: tf.Tensor, approximate: bool) -> Gelu:
    *rows, columns = x.shape
    return Gelu(rows=math.prod(rows), columns=columns, dtype=x.dtype, approximate=approximate)


def _forward(of: Gelu, x: tf.Tensor, bias: tf.Tensor) -> tf.Tensor:
    shape = (of.rows, of.columns)
    given = [tf.reshape(x, shape), bias]
    (found,) = call_module(calls.forward(of), given, [tf.TensorSpec(shape, of.dtype)])
    return tf.reshape(found, x.shape)


def _backward(of: Gelu, gradient, x, bias) -> tuple[tf.Tensor, tf.Tensor]:
    """Returns the gradients of x and of the bias."""
    shape = (of.rows, of.columns)
    of_x, sums = call_module(
        calls.backward(of),
        [tf.reshape(x, shape), bias, tf.reshape(gradient, shape)],
        [tf.TensorSpec(shape, of.dtype), tf.TensorSpec(of.sums, tf.float32)],
    )
    return tf.reshape(of_x, x.shape), tf.cast(tf.reduce_sum(sums, axis=0), of.dtype)


def _gradients(of: Gelu):
    """Returns the gradients of (x, bias), as a function of (the output's gradient, x, bias)."""

    @tf.custom_gradient
    def gradients(gradient, x, bias):
        def backward(*of_gradients):
            return _of_plain(of, gradient, [x, bias], of_gradients)

        return _backward(of, gradient, x, bias), backward

    return gradients


def _of_plain(of: Gelu, gradient, terms: list[tf.Tensor], of_gradients) -> list[tf.Tensor]:
    """Returns the gradients of the gradients, of (gradient, *terms), as XLA computes them."""
    with tf.GradientTape() as outer:
        outer.watch([gradient, *terms])
        with tf.GradientTape() as inner:
            inner.watch(terms)
            found = by_xla.gelu(
                tf.add_n([tf.broadcast_to(each, gradient.shape) for each in terms]), of.approximate
            )
        first = inner.gradient(found, terms, output_gradients=gradient)
    return outer.gradient(first, [gradient, *terms], output_gradients=list(of_gradients))
