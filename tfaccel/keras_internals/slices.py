"""Cuts a weight into equal slices, one for each replica, and puts slices together.

The values of a weight stand in a row, as `reshape(weight, [-1])` has them. Each replica owns as
many as the next one: ceil(values / replicas), and of a large weight a multiple of BLOCK, so that no
block of an 8-bit state (tfaccel/step/states/blockwise.py) lies in two slices. Zeros fill the last
slices up.

    own = own_slice(weight, index=1, num_replicas=4)        # [slice]
    slices = in_slices(weight, num_replicas=4)              # [4, slice]
    weight = whole_of(slices, weight.shape)
"""

import math
from collections.abc import Sequence

import tensorflow as tf

BLOCK = 256  # values
LARGE = 4096  # values of a weight whose states may be in blocks


def slice_size(shape: Sequence[int], num_replicas: int) -> int:
    """Returns the number of values in each replica's slice of a weight of that shape."""
    values = math.prod(shape)
    unit = BLOCK if values >= LARGE else 1
    return math.ceil(values / (num_replicas * unit)) * unit


def own_slice(
    whole: tf.Tensor, *, index: int, num_replicas: int, size: int | None = None
) -> tf.Tensor:
    """Returns one replica's slice, [slice] in the dtype of the weight.

    Args:
      whole: the weight, of any shape that is fully known.
      index: of the replica.
      num_replicas: the number of replicas of all workers.
      size: of the slice; None for `slice_size` of a weight.
    """
    size = slice_size(whole.shape, num_replicas) if size is None else size
    own = tf.reshape(whole, [-1])[index * size : (index + 1) * size]
    missing = size - own.shape[0]
    return tf.pad(own, [[0, missing]]) if missing else own


def in_slices(whole: tf.Tensor, *, num_replicas: int) -> tf.Tensor:
    """Returns the slices of all replicas, [replicas, slice]."""
    size, flat = slice_size(whole.shape, num_replicas), tf.reshape(whole, [-1])
    missing = num_replicas * size - flat.shape[0]
    flat = tf.pad(flat, [[0, missing]]) if missing else flat
    return tf.reshape(flat, [num_replicas, size])


def whole_of(slices: tf.Tensor, shape: Sequence[int]) -> tf.Tensor:
    """Returns the weight of that shape from the slices of all replicas, [replicas, slice]."""
    return tf.reshape(tf.reshape(slices, [-1])[: math.prod(shape)], shape)
