"""Rounds float32 to bfloat16 at random, so that small updates are not lost.

A state in bfloat16 has 8 bits of precision. To the nearest, a second moment v with beta_2 = 0.999
would not fall when gradients become smaller: v - 0.001 * v is nearer to v than to any other number.
So the number above or below is chosen at random, and the nearer one is the more probable. The mean
is exact (stochastic rounding; Gupta et al. 2015, arXiv:1502.02551).

    bits = random_bits(1000, key=(seed, step, 7))
    rounded = to_bfloat16(values, bits)                 # of 1000 values

The bits are a function of the key and of a value's place. They are the same on every replica, on
every device, with XLA and without it. XLA computes them in the kernel that rounds, so they take no
memory.
"""

from collections.abc import Sequence

import tensorflow as tf


def random_bits(num: int, *, key: Sequence, first: int = 0) -> tf.Tensor:
    """Returns random bits, [num] uint32.

    Args:
      num: the number of values.
      key: integers or integer scalars, of which the lower 32 bits count. Other keys give bits that
        are independent of these.
      first: the place of the first value. A part of a vector gets the bits that it would have in
        the whole vector.
    """
    mixed = tf.constant(0, tf.uint32)
    for each in key:
        mixed = _mix(
            tf.bitwise.bitwise_xor(mixed, tf.cast(each, tf.uint32)) + tf.constant(_STEP, tf.uint32)
        )
    places = tf.cast(tf.range(first, first + num, dtype=tf.int64), tf.uint32)
    return _mix(tf.bitwise.bitwise_xor(places, mixed))


def to_bfloat16(values: tf.Tensor, bits: tf.Tensor) -> tf.Tensor:
    """Returns values rounded at random: a number of bfloat16 stays, and so do infinity and NaN.

    Args:
      values: float32, of any shape.
      bits: uint32, of the same shape.
    """
    # A bfloat16 is the upper half of a float32. So add a random number below 2**16 to the bits, and
    # then cut the lower half off.
    added = tf.bitwise.right_shift(bits, tf.constant(16, tf.uint32))
    raised = tf.bitcast(values, tf.uint32) + added
    upper = tf.bitwise.bitwise_and(raised, tf.constant(0xFFFF0000, tf.uint32))
    rounded = tf.bitcast(upper, tf.float32)
    return tf.cast(tf.where(tf.math.is_nan(values), values, rounded), tf.bfloat16)


_STEP = 0x9E3779B9  # 2**32 / golden ratio: a key of 0 is mixed, too


def _mix(bits: tf.Tensor) -> tf.Tensor:
    """Returns a hash of each uint32: the function "lowbias32" of Wellons's hash-prospector.

    It changes each bit of the result with a probability of nearly one half if one bit of the input
    changes. Philox is slower here: XLA writes its numbers to memory.
    """
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B)):
        bits = _shifted(bits, shift) * tf.constant(factor, tf.uint32)
    return _shifted(bits, 16)


def _shifted(bits: tf.Tensor, by: int) -> tf.Tensor:
    shifted = tf.bitwise.right_shift(bits, tf.constant(by, tf.uint32))
    return tf.bitwise.bitwise_xor(bits, shifted)
