"""Layer normalization by Triton kernels, and its gradient, in a function that XLA compiles."""

import math
from collections.abc import Callable, Sequence

import tensorflow as tf

from tfaccel.keras_internals.call_module import call_module
from tfaccel.keras_internals.layer_norm import gradients_by_xla
from tfaccel.keras_internals.product_bias import with_sums
from tfaccel.step.layer_norm import calls
from tfaccel.step.layer_norm.calls import LayerNorm


def normalized(x: tf.Tensor, gamma: tf.Tensor, beta: tf.Tensor, *, epsilon: float) -> tf.Tensor:
    """Returns gamma (x - mean) / sqrt(variance + epsilon) + beta, computed in float32.

    Args:
      x: [..., columns], float16 or bfloat16. Its shape is known when the function is traced.
      gamma: [columns], float32.
      beta: [columns], float32.
      epsilon: what is added to the variance.
    """
    *rows, columns = x.shape
    of = LayerNorm(rows=math.prod(rows), columns=columns, dtype=x.dtype, epsilon=epsilon)
    shape, moment = (of.rows, of.columns), tf.TensorSpec((of.rows,), tf.float32)

    @tf.custom_gradient
    def run(x, gamma, beta):
        found, means, scales = call_module(
            calls.forward(of),
            [tf.reshape(x, shape), gamma, beta],
            [tf.TensorSpec(shape, of.dtype), moment, moment],
        )

        def backward(gradient):
            return _gradients(of, means, scales)(x, gamma, gradient)

        return tf.reshape(found, x.shape), backward

    return run(x, gamma, beta)


def normalized_sum(
    x: tf.Tensor, terms: Sequence[tf.Tensor], gamma: tf.Tensor, beta: tf.Tensor, *, epsilon: float
) -> tuple[tf.Tensor, tf.Tensor]:
    """Returns the sum of a residual, a matrix product and a bias, and its layer normalization.

    The sum is computed in float32, and rounded once. The rounded sum is normalized.

    Args:
      x: the sum [..., columns], as XLA computes it if something reads it; it gets the gradient.
      terms: residual [..., columns], product of the same number of values, bias [columns], all of
        float16 or all of bfloat16. Their shapes are known when the function is traced.
      gamma: [columns], float32.
      beta: [columns], float32.
      epsilon: what is added to the variance.
    """
    residual, product, bias = terms
    *rows, columns = x.shape
    of = LayerNorm(math.prod(rows), columns, x.dtype, epsilon, is_of_sum=True)
    shape, moment = (of.rows, of.columns), tf.TensorSpec((of.rows,), tf.float32)

    @tf.custom_gradient
    def run(x, gamma, beta):
        total, found, means, scales = call_module(
            calls.forward(of),
            [tf.reshape(residual, shape), tf.reshape(product, shape), bias, gamma, beta],
            [*[tf.TensorSpec(shape, of.dtype)] * 2, moment, moment],
        )

        def backward(of_total, gradient):
            gradients = _gradients(of, means, scales, total)
            own, *of_weights, of_bias = gradients(x, gamma, of_total, gradient)
            return with_sums(own, of_bias), *of_weights

        return tuple(tf.reshape(each, x.shape) for each in (total, found)), backward

    return run(x, gamma, beta)


def _gradients(
    of: LayerNorm, means: tf.Tensor, scales: tf.Tensor, total: tf.Tensor | None = None
) -> Callable:
    """Returns the gradients of x, gamma, beta and, of a sum, its bias, as a function.

    It is of (x, gamma, the sum's gradient as an output if it is one, the normalization's gradient).

    Args:
      of: the layer normalization.
      means: [rows], as the forward kernel returns them.
      scales: the same.
      total: x as the kernel of a sum has computed it; None: it is no sum. It is a constant here: a
        gradient of the gradient goes to x.
    """
    shape = (of.rows, of.columns)

    @tf.custom_gradient
    def gradients(x, gamma, *of_outputs):
        values = x if total is None else total
        own, sums = call_module(
            calls.backward(of),
            [
                *(tf.reshape(values, shape), gamma),
                *(tf.reshape(each, shape) for each in of_outputs),
                *(means, scales),
            ],
            [tf.TensorSpec(shape, of.dtype), tf.TensorSpec(of.parts, tf.float32)],
        )
        of_gamma, of_beta, *of_bias = tf.unstack(tf.reduce_sum(sums, axis=0))
        of_bias = (tf.cast(each, of.dtype) for each in of_bias)
        found = (tf.reshape(own, x.shape), of_gamma, of_beta, *of_bias)

        def backward(*of_found):
            given = [x, gamma, *of_outputs]
            with tf.GradientTape() as tape:
                tape.watch(given)
                again = _gradients_by_xla(of, *given)
            return tape.gradient(again, given, output_gradients=of_found)

        return found, backward

    return gradients


def _gradients_by_xla(
    of: LayerNorm, x: tf.Tensor, gamma: tf.Tensor, *of_outputs: tf.Tensor
) -> tuple[tf.Tensor, ...]:
    """Returns what the kernel of the gradients does, without it, computed in float32."""
    if not of.is_of_sum:
        return gradients_by_xla(x, gamma, *of_outputs, epsilon=of.epsilon)
    x, of_total, gradient = (tf.cast(each, tf.float32) for each in (x, *of_outputs))
    found, of_gamma, of_beta = gradients_by_xla(x, gamma, gradient, epsilon=of.epsilon)
    found += of_total
    of_bias = tf.reduce_sum(tf.reshape(found, (of.rows, of.columns)), axis=0)
    return tf.cast(found, of.dtype), of_gamma, of_beta, tf.cast(of_bias, of.dtype)
