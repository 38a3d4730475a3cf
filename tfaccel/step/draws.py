"""Random numbers inside the compiled step: a pure function of seed, update, replica and purpose.

Takes the optimizer, which counts the updates, and whose numbers they are; gives uniform ones, the
same on every device, with XLA and without. A resumed run draws the same. (A step that was skipped
is followed by one of the same draws, on other images.)

    drawn = uniform((rows, 2), count=num_updates(optimizer), replica=replica, purpose=CUTOUT)
"""

import tensorflow as tf

from tfaccel.keras_internals.replica import Replica
from tfaccel.keras_internals.seeds import global_seed

BLEND, CUTOUT = 0, 1  # purposes, whose numbers have nothing to do with one another
_MAX_REPLICAS = 2**20


def uniform(shape, *, count: tf.Tensor, replica: Replica | None, purpose: int = BLEND) -> tf.Tensor:
    """Returns numbers in [0, 1), float32.

    (`stateless_uniform` turns the same bits into other floats under XLA: TensorFlow 2.21.)

    Args:
      shape: of the result.
      count: of updates before this one.
      replica: whose they are; None for one that all replicas draw alike.
      purpose: BLEND or CUTOUT.
    """
    index = _MAX_REPLICAS - 1 if replica is None else replica.index
    # Seeds have 32 bits.
    key = tf.constant(global_seed() + purpose * 2**32, tf.int64)
    bits = tf.random.stateless_uniform(
        shape,
        tf.stack([key, count * _MAX_REPLICAS + index]),
        minval=None,
        maxval=None,
        dtype=tf.uint32,
        alg="philox",
    )
    return tf.cast(tf.bitwise.right_shift(bits, tf.constant(8, tf.uint32)), tf.float32) * 2.0**-24
