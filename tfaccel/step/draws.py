"""Random numbers inside the compiled step: a pure function of seed, update, replica and purpose.

The numbers are uniform, and the same on every device, with XLA and without it. The optimizer counts
the updates, so a resumed run draws the same numbers. (The step after a skipped step repeats its
draws, on other images.)

    drawn = uniform((rows, 2), count=num_updates(optimizer), replica=replica, purpose=CUTOUT)
"""

import tensorflow as tf

from tfaccel.keras_internals.replica import Replica
from tfaccel.keras_internals.seeds import global_seed

BLEND, CUTOUT = 0, 1  # purposes: the numbers of one are independent of the other's
_MAX_REPLICAS = 2**20


def uniform(shape, *, count: tf.Tensor, replica: Replica | None, purpose: int = BLEND) -> tf.Tensor:
    """Returns float32 numbers in [0, 1).

    (`stateless_uniform` cannot make them: under XLA it turns the same bits into other floats,
    TensorFlow 2.21.)

    Args:
      shape: the shape of the result.
      count: how many updates were made before this one.
      replica: the replica that uses the numbers; None for numbers that all replicas share.
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
