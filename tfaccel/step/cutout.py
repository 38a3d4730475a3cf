"""Cutout: a square of each training image is set to 0, inside the compiled step.

`cut_out` follows DeVries and Taylor, "Improved Regularization of Convolutional Neural Networks with
Cutout" (2017, arXiv:1708.04552). It runs on the device that has the images.

    image = cut_out(image, 8, replica, model.optimizer)
"""

import keras
import tensorflow as tf

from tfaccel.common.errors import UserError
from tfaccel.keras_internals.optimizers import num_updates
from tfaccel.keras_internals.replica import Replica
from tfaccel.step import draws


def cut_out(x, side: int, replica: Replica, optimizer: keras.optimizers.Optimizer):
    """Returns the images with a square set to 0 around a random pixel of each.

    Args:
      x: one tensor, [rows, height, width, channels], in any nested structure.
      side: the side of the square in pixels; the image's borders clip it.
      replica: the replica that has these rows.
      optimizer: counts the updates.

    Raises:
      UserError: a row has not exactly one image, or the square covers the image.
    """
    image = _image(x, side)
    drawn = draws.uniform(
        (tf.shape(image)[0], 2),
        count=num_updates(optimizer),
        replica=replica,
        purpose=draws.CUTOUT,
    )
    hole = _hole(drawn, side, tf.cast(tf.shape(image)[1:3], tf.float32))
    return tf.nest.map_structure(lambda each: tf.where(hole, tf.zeros_like(each), each), x)


def _hole(drawn: tf.Tensor, side: int, size: tf.Tensor) -> tf.Tensor:
    """Returns the mask of the cut pixels, [rows, height, width, 1], from [rows, 2] in [0, 1).

    It computes in floats, because without XLA TensorFlow computes with int32 on the host.
    """
    within = []
    for axis in (0, 1):
        pixel = tf.range(size[axis])
        # If the side is even, the drawn pixel is the first one after the middle.
        start = tf.floor(drawn[:, axis, None] * size[axis]) - side // 2
        within.append((pixel >= start) & (pixel < start + side))
    return (within[0][:, :, None] & within[1][:, None, :])[..., None]


def _image(x, side: int) -> tf.Tensor:
    images = tf.nest.flatten(x)
    if len(images) != 1 or images[0].shape.rank != 4:
        received = ", ".join(str(each.shape[1:]) for each in images)
        raise UserError(
            f"cutout_pixels={side} with inputs of {received} for a row; expected one input, "
            "(height, width, channels): remove cutout_pixels"
        )
    height, width = images[0].shape[1:3]
    if side >= min(height or side + 1, width or side + 1):
        raise UserError(
            f"cutout_pixels={side} with images of {height}x{width}; expected a side below the "
            "image's, for example a quarter of it"
        )
    return images[0]
