"""Computes each row's weight: 0 for padding, else the weight from its class or from the data.

x, y, weight = weighted((image, label), real, class_weight)
"""

import dataclasses
from collections.abc import Callable

import keras
import tensorflow as tf

# Replaces weights of 0 of rows that are not padding: next to other weights it counts as nothing.
NEARLY_ZERO = 1e-30


def weighted(batch: tuple, real: tf.Tensor | None, class_weight: tf.Tensor | None) -> tuple:
    """Returns a batch as (x, y, weight).

    Args:
      batch: one replica's batch: x, (x, y) or (x, y, weight).
      real: [rows] float32, 0 for padding rows, else 1; None without padding.
      class_weight: [classes] float32; None if all classes weigh the same.
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
    """Makes a batch as `Deferred.make` does, and adds weights from "real" and "class_weight".

    Attributes:
      make: makes the batch from the other inputs.
    """

    make: Callable[[dict[str, tf.Tensor]], tuple]

    def __call__(self, batch: dict[str, tf.Tensor]) -> tuple:
        """Returns the batch, unchanged if it has neither "real" nor "class_weight"."""
        rest = dict(batch)
        real, class_weight = rest.pop("real", None), rest.pop("class_weight", None)
        made = self.make(rest)
        if real is None and class_weight is None:
            return made
        return weighted(made, real, class_weight)


def _masked(weight: tf.Tensor, real: tf.Tensor) -> tf.Tensor:
    """Returns weights that are 0 for padding rows and for no other rows."""
    weight = tf.cast(weight, tf.float32)
    own = tf.where(weight == 0, tf.constant(NEARLY_ZERO), weight)
    return own * _with_rank(real, weight)


def _with_rank(rows: tf.Tensor, like: tf.Tensor) -> tf.Tensor:
    return tf.reshape(rows, [-1] + [1] * (like.shape.rank - 1))
