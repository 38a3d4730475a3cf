"""Dropout whose bits XLA computes where they are read, on a GPU.

    dropout = hashed(random.dropout)      # takes the place of Keras's function of a backend

TensorFlow draws a float by Philox for each value. XLA writes all four words of a draw to memory,
and compiles a kernel of its own for each of several parts. In BERT-base, 25 layers of dropout were
365 of 614 such kernels and moved 6.5 of 46 GB a step (JAX 0.9's XLA for an H100, 2026-12-01). These
bits are a hash of the seed and of a value's place instead, 32 bits for each. So a value is dropped
with the rate itself, where a float in bfloat16 has steps of 1/128.
"""

import functools
import math
from collections.abc import Callable, Sequence

import tensorflow as tf

from tfaccel.keras_internals.hashed_bits import WEYL, bits_at, keys_of, mixed
from tfaccel.keras_internals.patching import patched
from tfaccel.keras_internals.xla_gradients import optimization_barrier


def hashed(own: Callable) -> Callable:
    """Returns a replacement of the backend's `dropout` for a function that XLA compiles."""

    @functools.wraps(own)
    def dropout(*args, **kwargs):
        with patched(tf.nn.experimental, "stateless_dropout", _dropped):
            return own(*args, **kwargs)  # draws the seed

    return dropout


def _dropped(
    x: tf.Tensor, rate: float, seed: tf.Tensor, noise_shape: Sequence | None = None, **_unused
) -> tf.Tensor:
    """Takes the place of `tf.nn.experimental.stateless_dropout`, with other numbers of a seed."""
    shape = tf.convert_to_tensor(tf.shape(x) if noise_shape is None else noise_shape, tf.int32)
    known = tf.get_static_value(shape)
    sizes = tf.unstack(shape) if known is None else known.tolist()
    kept = x * tf.cast(1 / (1 - rate), x.dtype)
    return tf.where(keeps(sizes, seed, rate), kept, tf.zeros([], x.dtype))


def keeps(sizes: Sequence[int | tf.Tensor], seed: tf.Tensor, rate: float) -> tf.Tensor:
    """Returns which values are kept, bool.

    Args:
      sizes: the size of each axis; a number, or a scalar of int32 if it is not known yet.
      seed: [2] int32.
      rate: the share of values that are dropped, from 0 to below 1.
    """

    def of_axis(axis: int, factor: tf.Tensor) -> tf.Tensor:
        own = tf.cast(tf.range(sizes[axis]), tf.uint32) * factor
        return tf.reshape(own, [-1 if each == axis else 1 for each in range(rank)])

    rank, one = len(sizes), tf.constant(1, tf.uint32)
    rows = of_axis(0, one) if rank else one
    keys = tf.reshape(keys_of(tf.bitcast(seed, tf.uint32)), [2, *[1] * rank])
    # Behind a barrier, so that XLA hashes the rows' numbers once and not anew for each value.
    places, second = tf.unstack(optimization_barrier(mixed(keys ^ rows))[0])
    factor = tf.constant(WEYL)
    for axis in range(rank - 1, 0, -1):
        # Each sum has the rows, or TensorFlow would make a constant of the sum, which is large.
        places += of_axis(axis, factor)
        factor *= tf.cast(sizes[axis], tf.uint32)
    return bits_at(places, second) >= tf.constant(math.floor(rate * 2**32), tf.uint32)
