"""Random bits by a hash of a seed and of a place: the same on any device, in any order.

bits = bits_at(first + columns * WEYL, second)     # first and second are two numbers of each row

XLA computes them where they are read, and need not keep them.
"""

import numpy as np
import tensorflow as tf

# The steps of a Weyl sequence, and the constants of lowbias32 (Chris Wellons, "Prospecting for Hash
# Functions"), which is in the public domain.
WEYL, FIRST, SECOND = (np.uint32(each) for each in (0x9E3779B9, 0x7FEB352D, 0x846CA68B))


def mixed(x: tf.Tensor) -> tf.Tensor:
    """Returns the hash of each value, uint32 as they are."""
    return shifted(shifted(shifted(x, 16) * FIRST, 15) * SECOND, 16)


def shifted(x: tf.Tensor, bits: int) -> tf.Tensor:
    """Returns each value with its upper bits added to the lower ones, without carries; uint32."""
    return x ^ tf.bitwise.right_shift(x, tf.constant(bits, tf.uint32))


def keys_of(seed: tf.Tensor) -> tf.Tensor:
    """Returns the two numbers of a seed from which those of a row are made, [2] uint32.

    Args:
      seed: [2] uint32.
    """
    return mixed(mixed(seed[0] + tf.constant([1, 2], tf.uint32)) ^ seed[1])


def bits_at(places: tf.Tensor, second: tf.Tensor) -> tf.Tensor:
    """Returns 32 bits for each place in a row, uint32.

    Args:
      places: a number of the row, plus WEYL for each place before this one in the row; uint32.
      second: another number of the row, uint32 in a shape that broadcasts with that of `places`.
    """
    bits = shifted(places, 16) * FIRST
    return shifted(shifted(bits ^ second, 15) * SECOND, 16)
