"""What each row of a batch weighs: 0 for padding, or as its class, or as its data say.

Takes a batch, which rows are real and the classes' weights; gives (x, y, weight).

    x, y, weight = weighted((image, label), real, class_weight)
"""

import dataclasses
from collections.abc import Callable

import keras
import tensorflow as tf

# What a row weighs that has a weight of 0 and is no padding: nothing, next to any other.
NEARLY_ZERO = 1e-30


def weighted(batch: tuple, real: tf.Tensor | None, class_weight: tf.Tensor | None) -> tuple:
    """Returns (x, y, weight) of a batch, with or without y, or with weights of its own.

    Args:
      batch: of one replica.
      real: [rows] float32, 0 for padding; None where there is none.
      class_weight: [classes] float32; None where all weigh alike.
    """
    x, y, own = keras.utils.unpack_x_y_sample_weight(batch)
    if class_weight is not None:
        classes = tf.gather(class_weight, y)
        own = classes if own is None else own * _with_rank(classes, own)
    if real is None:
        return x, y, own
    if own is None:
        return x, y, real
    return x, y, tf.nest.map_structure(lambda each: _masked(each, real), own)


@dataclasses.dataclass(frozen=True)
class Weighing:
    """Makes a batch as `Deferred.make` does, and weighs it by "real" and "class_weight" of it.

    Attributes:
      make: makes the batch of what else there is.
    """

    make: Callable[[dict[str, tf.Tensor]], tuple]

    def __call__(self, batch: dict[str, tf.Tensor]) -> tuple:
        """Returns the batch; as it is where neither is there."""
        rest = dict(batch)
        real, class_weight = rest.pop("real", None), rest.pop("class_weight", None)
        made = self.make(rest)
        if real is None and class_weight is None:
            return made
        return weighted(made, real, class_weight)


def _masked(weight: tf.Tensor, real: tf.Tensor) -> tf.Tensor:
    """Returns weights that are 0 for padding, and for padding alone."""
    weight = tf.cast(weight, tf.float32)
    own = tf.where(weight == 0, tf.constant(NEARLY_ZERO), weight)
    return own * _with_rank(real, weight)


def _with_rank(rows: tf.Tensor, like: tf.Tensor) -> tf.Tensor:
    return tf.reshape(rows, [-1] + [1] * (like.shape.rank - 1))
