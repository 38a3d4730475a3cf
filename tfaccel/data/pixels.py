"""Decoded images and their draws to batches, as TensorFlow operations for any device.

Takes uint8 images of one size and the feed's draws; gives what the model is trained on.

    image, label = examples(pixels, label, draws, images=images, augment=augment, dtype="float16")

Meant to be compiled with XLA, which makes one loop of it: on 2 CPU cores mirroring and normalising
256 images of 224x224 takes 45 us each, not 1,900, and a random window of 256x256 pixels 280 us, not
the 780 of tf.image.crop_and_resize (2026-11-21).
"""

import math

import numpy as np
import tensorflow as tf

from tfaccel.config import AugmentConfig, ImageConfig
from tfaccel.data.draws import ATTEMPTS

# RGB to lightness and two axes of colour, as DALI's color_twist has it; back by the exact inverse.
RGB_TO_YIQ = np.array([[0.299, 0.587, 0.114], [0.596, -0.274, -0.321], [0.211, -0.523, 0.311]])
MIDDLE_GREY = 128.0  # what contrast spreads from, as in DALI


def examples(pixels, second, draws, *, images: ImageConfig, augment: AugmentConfig, dtype: str):
    """Returns (image, label) or, for pairs, (image, target).

    Args:
      pixels: [rows, height, width, channels] uint8.
      second: [rows] int32, the labels; or the targets, like `pixels`.
      draws: the feed's, by kind; see `tfaccel.data.draws`.
      images: size, channels, mean and std; and what targets are.
      augment: which window is taken.
      dtype: of the images.
    """
    settings = {"images": images, "augment": augment, "dtype": dtype}
    image = augmented(pixels, draws, **settings)
    if second.shape.rank == 1:
        return image, second
    shared = {kind: each for kind, each in draws.items() if kind != "color"}
    return image, augmented(second, shared, kind=images.targets, **settings)


def augmented(
    pixels, draws, *, images: ImageConfig, augment: AugmentConfig, dtype: str, kind: str = "image"
):
    """Returns [rows, *image_size, channels]: the window, resized, warped, mirrored and coloured.

    Args:
      pixels: [rows, height, width, channels] uint8.
      draws: the feed's, by kind.
      images: size, channels, mean and std.
      augment: which window is taken.
      dtype: of an image.
      kind: "image", interpolated and normalised: (pixel / 255 - mean) / std; or "mask", the nearest
        pixel's value, int32.
    """
    is_mask = kind == "mask"
    pixels = _windows(pixels, draws, images.image_size, augment, nearest=is_mask)
    if "warp" in draws:
        pixels = _warped(pixels, draws["warp"], nearest=is_mask)
    if "mirror" in draws:
        pixels = _mirrored(pixels, draws["mirror"])
    if is_mask:
        return tf.cast(pixels, tf.int32)
    pixels = tf.cast(pixels, tf.float32)
    if "color" in draws:
        pixels = _colored(pixels, draws["color"])
    mean, std = (np.array(each, np.float32) for each in (images.mean, images.std))
    return tf.cast(pixels * (1 / (255 * std)) - mean / std, dtype)


# Windows. Places and sizes are pairs, vertical first, reckoned in float64, as in every loader.


def window(source_size, image_size, augment: AugmentConfig, draws=None):
    """Returns the (top, left) and the (height, width) of a window in source pixels.

    Args:
      source_size: [2] (height, width) of the image.
      image_size: (height, width) of the batches.
      augment: which window.
      draws: [..., n] of the kind "window", for random windows.

    Returns:
      Two tensors, [2] int32; for random windows [..., 2].
    """
    source = tf.cast(source_size, tf.float64)
    size = tf.constant(image_size, tf.float64)
    if augment.window == "random_resized_crop":
        corner, size = _random_resized(source, augment, tf.cast(draws, tf.float64))
    elif augment.window == "random_crop":
        corner = _anywhere(source, size, tf.cast(draws, tf.float64))
        size = tf.broadcast_to(size, tf.shape(corner))
    else:
        if augment.window == "stretch":
            size = source
        elif augment.window == "resized_center_crop":
            scale = tf.reduce_min(source / size) * augment.center_fraction
            size = tf.maximum(_round(size * scale), 1)
        corner = _centred(source, size)
    return tf.cast(corner, tf.int32), tf.cast(size, tf.int32)


def _random_resized(source, augment, draws):
    """The first attempt that fits, anywhere; else all of the image, cut to the nearest shape."""
    area, ratio = draws[..., :ATTEMPTS] * source[0] * source[1], draws[..., ATTEMPTS:-2]
    sizes = tf.stack([_round(tf.sqrt(area / ratio)), _round(tf.sqrt(area * ratio))], axis=-1)
    fits = tf.reduce_all((sizes >= 1) & (sizes <= source), axis=-1)
    first = tf.argmax(tf.cast(fits, tf.int32), axis=-1)
    found = tf.reduce_any(fits, axis=-1, keepdims=True)
    drawn = tf.gather(sizes, first, axis=-2, batch_dims=first.shape.rank)
    least, largest = augment.crop_ratio
    nearest = tf.stack([_round(source[1] / least), _round(source[0] * largest)])
    size = tf.where(found, drawn, tf.clip_by_value(nearest, 1, source))
    return tf.where(found, _anywhere(source, size, draws), _centred(source, size)), size


def _anywhere(source, size, draws):
    # A draw just below 1 may be 1 in float32: not past what is free.
    return tf.minimum(tf.floor(draws[..., -2:] * (source - size + 1)), source - size)


def _centred(source, size):
    return tf.floor((source - size) / 2)


def _round(value):
    return tf.floor(value + 0.5)


# Resizing, one axis after the other: each new pixel is a weighted sum of a few old ones.


def _windows(pixels, draws, image_size, augment, *, nearest):
    """Returns the windows at `image_size`: uint8 where nothing is interpolated, else float32."""
    source_size = tuple(pixels.shape[1:3])
    if "window" in draws:
        corner, size = window(source_size, image_size, augment, draws["window"])
        shrink = [old / new for old, new in zip(source_size, image_size, strict=True)]
        shrink = shrink if min(shrink) >= 2 else [1, 1]  # see is_shrunk
        is_copy = augment.window == "random_crop"
    else:
        top, left, *size = fixed_window(source_size, image_size, augment)
        pixels = pixels[:, top : top + size[0], left : left + size[1]]
        if tuple(size) == tuple(image_size):
            return pixels
        shrink = [max(1, old / new) for old, new in zip(size, image_size, strict=True)]
        corner, size, is_copy = [[0, 0]], [size], False
    for axis in (1, 0):  # columns first: half the time of rows first, on a CPU
        where = tf.broadcast_to(corner, (pixels.shape[0], 2))[:, axis]
        length = tf.broadcast_to(size, (pixels.shape[0], 2))[:, axis]
        if nearest or is_copy:
            index = where[:, None] + nearest_index(length[:, None], image_size[axis])
            pixels = tf.gather(pixels, index, axis=axis + 1, batch_dims=1)
        else:
            pixels = _resized(pixels, where, length, image_size[axis], axis + 1, shrink[axis])
    return pixels


def fixed_window(source_size, image_size, augment: AugmentConfig) -> list[int]:
    """Returns (top, left, height, width) of a window that is not random, as numbers."""
    with tf.init_scope(), tf.device("/cpu:0"):  # now, not in the graph
        return [int(each) for pair in window(source_size, image_size, augment) for each in pair]


def is_shrunk(size, image_size):
    """Whether a random window of `size` (height, width) is so large that shrinking must average.

    To more than half, plain bilinear interpolation skips no pixel, and costs a fraction. Windows
    that are not random are averaged always, so that every loader evaluates on the same.
    """
    return tf.reduce_all(tf.cast(size, tf.float32) >= 2 * np.array(image_size, np.float32))


def nearest_index(length, new_length: int):
    """Returns which of `length` pixels is nearest to each of `new_length`: [..., new_length]."""
    return (2 * tf.range(new_length) + 1) * length // (2 * new_length)


def _resized(pixels, start, length, new_length: int, axis: int, shrink: float):
    """Returns the pixels from start to start + length along an axis, as `new_length` ones.

    Args:
      pixels: [rows, height, width, channels].
      start: [rows] int32.
      length: [rows] int32.
      new_length: in pixels.
      axis: 1 or 2.
      shrink: the most that length / new_length can be; 1 for plain bilinear interpolation.
    """
    scale = tf.cast(length, tf.float32)[:, None] / new_length
    center = (tf.range(new_length, dtype=tf.float32) + 0.5) * scale
    reach = tf.maximum(scale, 1.0) if shrink > 1 else tf.ones_like(scale)
    # No more pixel centres than this are within reach of a place; those outside weigh nothing.
    steps = tf.range(math.ceil(2 * shrink), dtype=tf.float32)
    place = tf.floor(center - reach + 0.5)[..., None] + steps
    weight = tf.maximum(0.0, 1 - tf.abs(place + 0.5 - center[..., None]) / reach[..., None])
    length = tf.cast(length, tf.float32)[:, None, None]
    weight = tf.where((place >= 0) & (place < length), weight, 0.0)
    weight /= tf.reduce_sum(weight, axis=-1, keepdims=True)
    index = start[:, None, None] + tf.cast(tf.clip_by_value(place, 0, length - 1), tf.int32)
    shape = [-1, new_length, 1, 1] if axis == 1 else [-1, 1, new_length, 1]
    return sum(
        tf.cast(tf.gather(pixels, index[..., step], axis=axis, batch_dims=1), tf.float32)
        * tf.reshape(weight[..., step], shape)
        for step in range(steps.shape[0])
    )


# What follows the window.


def _warped(pixels, matrix, *, nearest):
    """Returns each pixel from where an affine map of output to input (x, y) says; 0 from outside.

    By gathers: in XLA half the time of ImageProjectiveTransformV3 (830 against 1,770 us for 224x224
    pixels, 2 CPU cores, 2026-11-21), which XLA has not.

    Args:
      pixels: [rows, height, width, channels].
      matrix: [rows, 2, 3] float32.
      nearest: whether values are taken as they are.
    """
    rows, height, width, channels = pixels.shape
    x, y = tf.meshgrid(*(tf.range(side, dtype=tf.float32) + 0.5 for side in (width, height)))
    matrix = matrix[..., None, None]
    x, y = (each[:, 0] * x + each[:, 1] * y + each[:, 2] for each in (matrix[:, 0], matrix[:, 1]))
    flat = tf.reshape(pixels, (rows * height * width, channels))
    first = tf.range(rows)[:, None, None] * (height * width)

    def at(row, column):
        inside = (row >= 0) & (row < height) & (column >= 0) & (column < width)
        row, column = (tf.cast(tf.where(inside, each, 0), tf.int32) for each in (row, column))
        found = tf.gather(flat, first + row * width + column)
        return tf.where(inside[..., None], found, tf.zeros_like(found))

    if nearest:
        return at(tf.floor(y), tf.floor(x))
    top, left = tf.floor(y - 0.5), tf.floor(x - 0.5)
    down, right = (y - 0.5 - top)[..., None], (x - 0.5 - left)[..., None]
    corners = [[at(top + i, left + j) for j in (0, 1)] for i in (0, 1)]
    upper, lower = (
        tf.cast(a, tf.float32) * (1 - right) + tf.cast(b, tf.float32) * right for a, b in corners
    )
    return upper * (1 - down) + lower * down


def _mirrored(pixels, flags):
    """Mirrors top to bottom, and left to right, where the two flags of a row are 1."""
    for axis in (1, 2):
        flag = flags[:, axis - 1, None, None, None] == 1
        pixels = tf.where(flag, tf.reverse(pixels, [axis]), pixels)
    return pixels


def _colored(pixels, draws):
    """Saturation and hue in YIQ, then contrast, then brightness; cut to 0..255. As DALI does it."""
    brightness, contrast, saturation, hue = (draws[:, i, None, None, None] for i in range(4))
    if pixels.shape[-1] == 3:
        matrix = _twist(saturation[..., 0], hue[..., 0] * (math.pi / 180))
        pixels = tf.reduce_sum(pixels[..., None, :] * matrix[:, None, None], axis=-1)
    pixels = ((pixels - MIDDLE_GREY) * contrast + MIDDLE_GREY) * brightness
    return tf.clip_by_value(pixels, 0.0, 255.0)


def _twist(saturation, radians):
    """Returns RGB to RGB, as [rows, 3, 3], from [rows, 1, 1] factors and angles."""
    to_yiq = tf.constant(RGB_TO_YIQ, tf.float32)
    lightness, first, second = to_yiq[0:1], to_yiq[1:2], to_yiq[2:3]
    cosine, sine = saturation * tf.cos(radians), saturation * tf.sin(radians)
    turned = [
        tf.zeros_like(cosine) + lightness,
        cosine * first + sine * second,
        cosine * second - sine * first,
    ]
    from_yiq = tf.constant(np.linalg.inv(RGB_TO_YIQ), tf.float32)
    # Summed by hand: as a product of matrices a GPU would round it to TensorFloat-32.
    return sum(from_yiq[:, each : each + 1] * turned[each] for each in range(3))
