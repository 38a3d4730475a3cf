"""Keras's layer normalization in a step that XLA compiles: one read for both moments, one layout.

XLA gives the operand of a sum over rows the layout in which that sum reads memory in order. In a
network whose learned positions are added to every example, the gradient of the positions is such a
sum, over the batch. From it the layout "batch last" spread over all tensors between the blocks, and
each matrix product had them transposed before and after. In a ViT-B/16 with a batch of 128,
the kernels beside its products moved 48.6 GB a step, and 31.2 GB with the layout that `ordered`
asks for (XLA of JAX 0.9.0, compiled for an H100, 2026-11-28).
"""

import functools
import numbers
from collections.abc import Callable

import keras
import tensorflow as tf

from tfaccel.keras_internals.layouts import in_order
from tfaccel.keras_internals.product_sums import keeping_sum

# Inputs of more axes are normalized as a matrix of rows. XLA of TensorFlow 2.21 gives a program of
# the GPU a whole row of pixels, 56 x 96 values in the first stage of ConvNeXt-Tiny. The gradient
# then took 0.50 ms, of which the memory needs 0.05. As a matrix, a program has 8 x 96 values. Three
# axes, as in a ViT, were no quicker as a matrix: 34.8 and 34.6 ms a step (H200, 2026-11-28).
_MOST_AXES = 3


def ordered(call: Callable) -> Callable:
    """Returns a replacement of a normalization's `call` whose inputs are in order: (self, inputs).

    It is for GPUs.
    """

    @functools.wraps(call)
    def with_order(self, inputs, *args, **kwargs):
        inputs = tf.convert_to_tensor(inputs)
        return call(self, keeping_sum(inputs, in_order(inputs)), *args, **kwargs)

    return with_order


def one_pass(normalize: Callable, own: Callable | None = None) -> Callable:
    """Returns a replacement of Keras's function for layer normalization of float16 and bfloat16.

    It computes the variance as E[x^2] - E[x]^2 in float32, as `flax.linen.LayerNorm` does by
    default, and has a gradient that reads the inputs once more, where TensorFlow's keeps float32
    tensors of their size.

    Args:
      normalize: (x, gamma, beta, axis, epsilon, rms_scaling), which computes all other forms.
      own: (x, gamma, beta, epsilon), which computes what it can by kernels of its own, and returns
        None for all else; None: there are no such kernels.
    """

    @functools.wraps(normalize)
    def norm(x, gamma=None, beta=None, axis=-1, epsilon=None, rms_scaling=False):
        x = tf.convert_to_tensor(x)
        axes = [axis] if isinstance(axis, int) else list(axis)
        is_of_rows = x.shape.rank is not None and axes in ([-1], [x.shape.rank - 1])
        size = x.shape[-1] if is_of_rows else None
        epsilon = keras.config.epsilon() if epsilon is None else epsilon
        is_plain = all(e is None or e.shape == [size] for e in (gamma, beta)) and isinstance(
            epsilon, numbers.Real
        )
        is_half = x.dtype in (tf.float16, tf.bfloat16)
        if rms_scaling or not is_of_rows or not is_plain or not is_half:
            return normalize(x, gamma, beta, axis, epsilon, rms_scaling)
        gamma = tf.ones([size]) if gamma is None else tf.cast(gamma, tf.float32)
        beta = tf.zeros([size]) if beta is None else tf.cast(beta, tf.float32)
        epsilon = float(epsilon)
        found = None if own is None else own(x, gamma, beta, epsilon)
        if found is not None:
            return found
        epsilon = tf.constant(epsilon, tf.float32)
        if x.shape.rank <= _MOST_AXES:
            return _normalized(x, gamma, beta, epsilon)
        return tf.reshape(_normalized(tf.reshape(x, [-1, size]), gamma, beta, epsilon), tf.shape(x))

    return norm


@tf.custom_gradient
def _normalized(x, gamma, beta, epsilon):
    def backward(gradient):
        # Again, for a gradient of this gradient; XLA has it once.
        return *gradients_by_xla(x, gamma, gradient, epsilon=epsilon), None

    unit, _ = _unit(x, epsilon)
    return tf.cast(unit * gamma + beta, x.dtype), backward


def gradients_by_xla(
    x: tf.Tensor, gamma: tf.Tensor, gradient: tf.Tensor, *, epsilon: tf.Tensor | float
) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
    """Returns the gradients of x, gamma and beta of a layer normalization, as XLA computes them.

    Args:
      x: [..., columns].
      gamma: [columns], float32.
      gradient: the output's, of the shape of x.
      epsilon: what is added to the variance.
    """
    unit, scale = _unit(x, epsilon)
    gradient = tf.cast(gradient, tf.float32)
    own = gradient * gamma
    along = tf.reduce_mean(own * unit, axis=-1, keepdims=True)
    of_x = scale * (own - tf.reduce_mean(own, axis=-1, keepdims=True) - unit * along)
    rows = list(range(x.shape.rank - 1))
    of_gamma, of_beta = (tf.reduce_sum(e, axis=rows) for e in (gradient * unit, gradient))
    return tf.cast(of_x, x.dtype), of_gamma, of_beta


def _unit(x: tf.Tensor, epsilon: tf.Tensor | float) -> tuple[tf.Tensor, tf.Tensor]:
    """Returns each row with mean 0 and variance 1, and what it was multiplied by, in float32."""
    wide = tf.cast(x, tf.float32)
    mean = tf.reduce_mean(wide, axis=-1, keepdims=True)
    variance = tf.reduce_mean(wide * wide, axis=-1, keepdims=True) - mean * mean
    scale = tf.math.rsqrt(tf.maximum(variance, 0.0) + epsilon)
    return (wide - mean) * scale, scale
