"""The share that each row keeps when mixup or cutmix blends it with the next row.

The input is `config.step` and a replica's images; the output is a weight for pixels and for labels.

    pixels, label = own_part(config, image, replica, model.optimizer)
    image = pixels * image + (1 - pixels) * next_image
"""

import functools

import keras
import numpy as np
import tensorflow as tf

from tfaccel.config import StepConfig
from tfaccel.keras_internals.optimizers import num_updates
from tfaccel.keras_internals.replica import Replica
from tfaccel.step import draws

# TensorFlow cannot draw beta-distributed numbers under XLA. A table of quantiles turns uniform
# numbers into them. It is linear between knots: the distribution function is off by 1/1024 at most.
NUM_KNOTS = 1025


def own_part(
    config: StepConfig, image: tf.Tensor, replica: Replica, optimizer: keras.optimizers.Optimizer
) -> tuple[tf.Tensor, tf.Tensor]:
    """Returns the share that each row keeps, in 0..1: one for its pixels and one for its label.

    Args:
      config: gives mixup_alpha and cutmix_alpha; at least one is above 0.
      image: [rows, height, width, channels] for cutmix, [rows, ...] for mixup alone.
      replica: the replica that has these rows.
      optimizer: counts the updates.

    Returns:
      [rows, 1 or height, 1 or width, 1] float32, and [rows, 1] float32.
    """
    draw = functools.partial(draws.uniform, count=num_updates(optimizer), replica=replica)
    rows = tf.shape(image)[0]
    if not config.cutmix_alpha:
        return _mixup(config.mixup_alpha, draw((rows, 1)), image.shape.rank)
    in_box = _cutmix(config.cutmix_alpha, draw((rows, 3)), image.shape[1:3])
    if not config.mixup_alpha:
        return in_box
    throughout = _mixup(config.mixup_alpha, draw((rows, 1)), image.shape.rank)
    # Each step uses one of the two, the same for all rows of all replicas.
    is_mixup = draw((), replica=None) < 0.5
    return tuple(tf.where(is_mixup, *each) for each in zip(throughout, in_box, strict=True))


def _mixup(alpha: float, drawn: tf.Tensor, rank: int) -> tuple:
    own = _beta(alpha, drawn[:, :1])
    return tf.reshape(own, [-1] + [1] * (rank - 1)), own


def _cutmix(alpha: float, drawn: tf.Tensor, size) -> tuple:
    """Cuts a box as Yun et al. do: centered on a uniform pixel, clipped at the image's borders."""
    side = tf.sqrt(1 - _beta(alpha, drawn[:, 0]))
    inside = tf.ones([1, 1, 1], tf.bool)
    for axis, length in enumerate(size):
        half = tf.floor(side * length) // 2
        center = tf.floor(drawn[:, 1 + axis] * length)
        pixel = tf.range(length, dtype=tf.float32)
        within = (pixel >= (center - half)[:, None]) & (pixel < (center + half)[:, None])
        inside &= tf.expand_dims(within, 2 - axis)
    own = 1 - tf.cast(inside, tf.float32)[..., None]
    return own, tf.reduce_mean(own, [1, 2])


def _beta(alpha: float, drawn: tf.Tensor) -> tf.Tensor:
    """Returns Beta(alpha, alpha) numbers, made from uniform ones."""
    knots = tf.constant(_quantiles(alpha))
    position = drawn * (NUM_KNOTS - 1)
    below = tf.cast(position, tf.int32)
    low, high = tf.gather(knots, below), tf.gather(knots, below + 1)
    return low + (position - tf.cast(below, tf.float32)) * (high - low)


@functools.cache
def _quantiles(alpha: float) -> np.ndarray:
    import scipy.special  # here, because it takes 0.16 s of each start

    return scipy.special.betaincinv(alpha, alpha, np.linspace(0, 1, NUM_KNOTS)).astype(np.float32)
