"""GELU with a gradient that reads its input alone, for steps that XLA compiles."""

import math

import tensorflow as tf

_NORMAL = 1 / math.sqrt(2 * math.pi)
_TANH_SCALE, _TANH_CUBE = math.sqrt(2 / math.pi), 0.044715  # of Hendrycks and Gimpel (2016)


def gelu(x, approximate: bool = True) -> tf.Tensor:
    """Returns `keras.ops.gelu`, computed in float32 at least, with a gradient of one pass.

    TensorFlow's gradient keeps two tensors of the size of the input between the passes, and XLA
    writes and reads them.
    """
    x = tf.convert_to_tensor(x)
    return _gelu_tanh(x) if approximate else _gelu_erf(x)


def widened(x: tf.Tensor) -> tf.Tensor:
    """Returns a tensor in float32 if it is of half precision, else as it is."""
    return tf.cast(x, tf.float32) if x.dtype in (tf.float16, tf.bfloat16) else x


def _below(wide: tf.Tensor) -> tf.Tensor:
    """Returns the share of the normal distribution that is below each value."""
    return 0.5 * (1.0 + tf.math.erf(wide * math.sqrt(0.5)))


@tf.custom_gradient
def _gelu_erf(x):
    wide = widened(x)

    def backward(gradient):
        wide = widened(x)
        density = _NORMAL * tf.exp(-0.5 * wide * wide)
        return tf.cast(widened(gradient) * (_below(wide) + wide * density), x.dtype)

    return tf.cast(wide * _below(wide), x.dtype), backward


@tf.custom_gradient
def _gelu_tanh(x):
    wide = widened(x)
    inner = _TANH_SCALE * (wide + _TANH_CUBE * wide * wide * wide)

    def backward(gradient):
        wide = widened(x)
        square = wide * wide
        tanh = tf.tanh(_TANH_SCALE * wide * (1.0 + _TANH_CUBE * square))
        slope = _TANH_SCALE * (1.0 + 3.0 * _TANH_CUBE * square)
        own = 0.5 * (1.0 + tanh) + 0.5 * wide * (1.0 - tanh * tanh) * slope
        return tf.cast(widened(gradient) * own, x.dtype)

    return tf.cast(0.5 * wide * (1.0 + tf.tanh(inner)), x.dtype), backward
