"""A square of each training image set to 0, on its device, inside the compiled step.

Takes a replica's images; gives them with the squares of DeVries and Taylor, "Improved
Regularization of Convolutional Neural Networks with Cutout" (2017, arXiv:1708.04552).

    image = cut_out(image, 8, replica, model.optimizer)
"""

import keras
import tensorflow as tf

from tfaccel.common.errors import UserError
from tfaccel.keras_internals.optimizers import num_updates
from tfaccel.keras_internals.replica import Replica
from tfaccel.step import draws


def cut_out(x, side: int, replica: Replica, optimizer: keras.optimizers.Optimizer):
    """Returns the images, in their dtype, each with a square about a pixel of its own set to 0.

    Args:
      x: one tensor, [rows, height, width, channels], in whatever structure.
      side: of the square, in pixels; the image's borders cut it.
      replica: whose rows they are.
      optimizer: that counts the updates.

    Raises:
      UserError: there is no one image for a row, or the square covers it.
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
    """Returns whether a pixel is cut out, [rows, height, width, 1], of [rows, 2] in [0, 1).

    In floats: without XLA, TensorFlow computes with int32 on the host.
    """
    within = []
    for axis in (0, 1):
        pixel = tf.range(size[axis])
        # Of an even side, the drawn pixel is the first after the middle.
        start = tf.floor(drawn[:, axis, None] * size[axis]) - side // 2
        within.append((pixel >= start) & (pixel < start + side))
    return (within[0][:, :, None] & within[1][:, None, :])[..., None]


def _image(x, side: int) -> tf.Tensor:
    images = tf.nest.flatten(x)
    if len(images) != 1 or images[0].shape.rank != 4:
        received = ", ".join(str(each.shape[1:]) for each in images)
        raise UserError(
            f"cutout_pixels={side} with inputs of {received} for a row; expected one, (height, "
            "width, channels): leave it out"
        )
    height, width = images[0].shape[1:3]
    if side >= min(height or side + 1, width or side + 1):
        raise UserError(
            f"cutout_pixels={side} with images of {height}x{width}; expected a side below the "
            "image's, e.g. a quarter of it"
        )
    return images[0]
