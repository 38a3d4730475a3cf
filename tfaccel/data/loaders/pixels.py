"""Decoded images and their draws to batches, as TensorFlow operations for any device.

Takes uint8 images of one size and the feed's draws; gives what the model is trained on.

    image, label = examples(pixels, label, draws, images=images, augment=augment, dtype="float16")

Compiled with XLA, on any device: on 2 CPU cores a random window of 256x256 pixels, resized to
224x224 and mirrored, takes 400 us, where tf.image.crop_and_resize takes 780, and mirroring as one
operation 1,100 more (2026-11-21).
"""

import functools
import math

import numpy as np
import tensorflow as tf

from tfaccel.config import CROPS, AugmentConfig, ImageConfig
from tfaccel.data.draws import ATTEMPTS
from tfaccel.data.loaders.windows import nearest_index
from tfaccel.data.source import ArraySource, ImageSource

# RGB to lightness and two axes of colour, as DALI's color_twist has it; back by the exact inverse.
RGB_TO_YIQ = np.array([[0.299, 0.587, 0.114], [0.596, -0.274, -0.321], [0.211, -0.523, 0.311]])
MIDDLE_GREY = 128.0  # what contrast spreads from, as in DALI

_compiled = functools.partial(tf.function, jit_compile=True, autograph=False)


def batch_spec(
    source: ImageSource | ArraySource, images: ImageConfig, *, rows: int, dtype: str
) -> tuple[tf.TensorSpec, tf.TensorSpec]:
    """Returns the `tf.TensorSpec`s of one replica's batch.

    Args:
      source: labelled or paired.
      images: size, channels, and what targets are.
      rows: of the batch.
      dtype: of the images.
    """
    image = tf.TensorSpec((rows, *images.image_size, images.channels), dtype)
    if source.targets is None:
        return image, tf.TensorSpec((rows,), tf.int64)
    is_mask = images.targets == "mask"
    return image, tf.TensorSpec((rows, *images.image_size, 1), tf.uint8) if is_mask else image


def examples(pixels, second, draws, *, images: ImageConfig, augment: AugmentConfig, dtype: str):
    """Returns (image, label) or, for pairs, (image, target).

    Args:
      pixels: [rows, height, width, channels] uint8.
      second: [rows] int64, the labels; or the targets, like `pixels`.
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
        pixel's value, uint8.
    """
    is_mask = kind == "mask"
    pixels = _windows(pixels, draws, images.image_size, augment, nearest=is_mask)
    if "warp" in draws:
        pixels = _warped(pixels, draws["warp"], is_mask)
    mean, std = (tuple(each) for each in (images.mean, images.std))
    dtype = "uint8" if is_mask else dtype
    return _finished(pixels, draws.get("mirror"), draws.get("color"), mean, std, dtype)


# Windows. Places and sizes are pairs, vertical first, reckoned in float64, as in every loader. The
# same formulas as windows.py has in NumPy, which says why; test_windows.py compares the two.


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
    area, ratio = draws[..., :ATTEMPTS] * tf.reduce_prod(source), draws[..., ATTEMPTS:-2]
    sizes = _round(tf.sqrt(tf.stack([area / ratio, area * ratio], axis=-1)))
    fits = tf.reduce_all((sizes >= 1) & (sizes <= source), axis=-1)
    first = tf.argmax(tf.cast(fits, tf.int32), axis=-1)
    found = tf.reduce_any(fits, axis=-1, keepdims=True)
    drawn = tf.gather(sizes, first, axis=-2, batch_dims=first.shape.rank)
    least, largest = augment.crop_ratio
    nearest = _round(tf.reverse(source, [0]) * [1 / least, largest])
    size = tf.where(found, drawn, tf.clip_by_value(nearest, 1, source))
    return tf.where(found, _anywhere(source, size, draws), _centred(source, size)), size


def _anywhere(source, size, draws):
    # A draw just below 1 may be 1 in float32: not past what is free.
    return tf.minimum(tf.floor(draws[..., -2:] * (source - size + 1)), source - size)


def _centred(source, size):
    return tf.floor((source - size) / 2)


def _round(value):
    return tf.floor(value + 0.5 + 1e-9)  # see windows.py


def resizes(source_size, image_size, augment: AugmentConfig) -> bool:
    """Returns whether windows are interpolated, and not taken as they are."""
    if augment.window in CROPS:
        return False
    is_random = augment.window == "random_resized_crop"
    return is_random or fixed_window(source_size, image_size, augment)[2:] != list(image_size)


# Resizing, one axis after the other: each new pixel is a weighted sum of a few old ones. Compiled
# in parts: of both axes and the weights' arithmetic XLA would make one loop, and go through all of
# it for every pixel. Between parts go no int32, which TensorFlow would keep in the host's memory.


def _windows(pixels, draws, image_size, augment, *, nearest):
    """Returns the windows at `image_size`: uint8 where nothing is interpolated, else float32."""
    source_size = tuple(pixels.shape[1:3])
    if "window" in draws:
        corner, size = _random_windows(draws["window"], source_size, image_size, augment)
        shrink = [old / new for old, new in zip(source_size, image_size, strict=True)]
        shrink = shrink if min(shrink) >= 2 else [1, 1]  # see is_shrunk
        nearest = nearest or augment.window == "random_crop"  # which is not resized
    else:
        top, left, *size = fixed_window(source_size, image_size, augment)
        pixels = pixels[:, top : top + size[0], left : left + size[1]]
        if tuple(size) == tuple(image_size):
            return pixels
        shrink = [max(1, old / new) for old, new in zip(size, image_size, strict=True)]
        corner, size = tf.constant([[0.0, 0.0]]), tf.constant([size], tf.float32)
    for axis in (0, 1):  # rows first: each lies together in memory
        taps = _nearest_tap if nearest else functools.partial(_taps, shrink=shrink[axis])
        index, weight = taps(corner[:, axis], size[:, axis], image_size[axis])
        # Half the bytes between the two; what it rounds is below 0.07 of 255 levels.
        pixels = _weighted(pixels, index, weight, axis + 1, "float16" if axis == 0 else "float32")
    return pixels


@_compiled
def _random_windows(draws, source_size, image_size, augment):
    pairs = window(source_size, image_size, augment, draws)
    return tuple(tf.cast(each, tf.float32) for each in pairs)


def fixed_window(source_size, image_size, augment: AugmentConfig) -> list[int]:
    """Returns (top, left, height, width) of a window that is not random, as numbers."""
    with tf.init_scope(), tf.device("/cpu:0"):  # now, not in the graph
        corner, size = window(source_size, image_size, augment)
        return [*corner.numpy().tolist(), *size.numpy().tolist()]


def is_shrunk(size, image_size):
    """Whether a random window of `size` (height, width) is so large that shrinking must average.

    To more than half, plain bilinear interpolation skips no pixel, and costs a fraction. Windows
    that are not random are averaged always, so that every loader evaluates on the same.
    """
    return tf.reduce_all(tf.cast(size, tf.float32) >= 2 * np.array(image_size, np.float32))


@_compiled
def _nearest_tap(start, length, new_length: int):
    """Returns as `_taps` does, with one pixel for each new one, which is not weighted."""
    index = nearest_index(tf.cast(length, tf.int32)[:, None], new_length)
    return (start[:, None] + tf.cast(index, tf.float32))[..., None], None


@_compiled
def _taps(start, length, new_length: int, shrink: float):
    """Returns which pixels make each of `new_length`, and how much each counts.

    Args:
      start: [rows] float32, of the window, in pixels.
      length: [rows] float32, likewise.
      new_length: in pixels.
      shrink: the most that length / new_length can be; 1 for plain bilinear interpolation.

    Returns:
      Two tensors, [rows, new_length, taps] float32.
    """
    length = length[:, None]
    scale = length / new_length
    center = (tf.range(new_length, dtype=tf.float32) + 0.5) * scale
    reach = tf.maximum(scale, 1.0) if shrink > 1 else tf.ones_like(scale)
    # No more pixel centres than this are within reach of a place; those outside weigh nothing.
    taps = tf.range(math.ceil(2 * shrink), dtype=tf.float32)
    place = tf.floor(center - reach + 0.5)[..., None] + taps
    weight = tf.maximum(0.0, 1 - tf.abs(place + 0.5 - center[..., None]) / reach[..., None])
    weight = tf.where((place >= 0) & (place < length[..., None]), weight, 0.0)
    weight /= tf.reduce_sum(weight, axis=-1, keepdims=True)
    return start[:, None, None] + tf.clip_by_value(place, 0, length[..., None] - 1), weight


@_compiled
def _weighted(pixels, index, weight, axis: int, dtype: str):
    """Returns weighted sums of pixels along an axis, or pixels themselves.

    Args:
      pixels: [rows, height, width, channels].
      index: [rows or 1, new length, taps] float32, whole numbers.
      weight: likewise; None for one tap that counts alone.
      axis: 1 or 2.
      dtype: of weighted sums.
    """
    index = tf.cast(tf.broadcast_to(index, [pixels.shape[0], *index.shape[1:]]), tf.int32)
    taken = [
        tf.gather(pixels, index[..., tap], axis=axis, batch_dims=1) for tap in range(index.shape[2])
    ]
    if weight is None:
        return taken[0]
    shape = [-1, index.shape[1], 1, 1] if axis == 1 else [-1, 1, index.shape[1], 1]
    weighted = (
        tf.cast(each, tf.float32) * tf.reshape(weight[..., tap], shape)
        for tap, each in enumerate(taken)
    )
    return tf.cast(sum(weighted), dtype)


# What follows the window.


@_compiled
def _warped(pixels, matrix, nearest: bool):
    """Returns each pixel from where an affine map of output to input (x, y) says; 0 from outside.

    By gathers: in XLA a quarter of the time of ImageProjectiveTransformV3 (440 against 1,770 us for
    224x224 pixels, 2 CPU cores, 2026-11-21), which XLA has not.

    Args:
      pixels: [rows, height, width, channels].
      matrix: [rows, 2, 3] float32.
      nearest: whether values are taken as they are.
    """
    rows, height, width, channels = pixels.shape
    x, y = tf.meshgrid(*(tf.range(side, dtype=tf.float32) + 0.5 for side in (width, height)))
    matrix = matrix[..., None, None]
    x, y = (each[:, 0] * x + each[:, 1] * y + each[:, 2] for each in (matrix[:, 0], matrix[:, 1]))
    if nearest:
        row, column = tf.floor(y), tf.floor(x)
        inside = (row >= 0) & (row < height) & (column >= 0) & (column < width)
        row, column = (tf.cast(tf.where(inside, each, 0), tf.int32) for each in (row, column))
        place = tf.range(rows)[:, None, None] * (height * width) + row * width + column
        found = tf.gather(tf.reshape(pixels, (-1, channels)), place)
        return tf.where(inside[..., None], found, tf.zeros_like(found))
    # Of four corners it is faster to have black around the image than to ask whether each is inside
    # (440 against 1,240 us); of one it is not. Two pixels, so that a clipped corner and its
    # neighbours are all outside.
    top, left = tf.floor(y - 0.5), tf.floor(x - 0.5)
    down, right = (y - 0.5 - top)[..., None], (x - 0.5 - left)[..., None]
    flat = tf.reshape(tf.pad(pixels, [(0, 0), (2, 2), (2, 2), (0, 0)]), (-1, channels))
    row, column = tf.clip_by_value(top, -2, height) + 2, tf.clip_by_value(left, -2, width) + 2
    row, column = (tf.cast(each, tf.int32) for each in (row, column))
    first = tf.range(rows)[:, None, None] * ((height + 4) * (width + 4))
    place = first + row * (width + 4) + column
    corners = [[tf.gather(flat, place + i * (width + 4) + j) for j in (0, 1)] for i in (0, 1)]
    upper, lower = (
        tf.cast(a, tf.float32) * (1 - right) + tf.cast(b, tf.float32) * right for a, b in corners
    )
    return upper * (1 - down) + lower * down


@_compiled
def _finished(pixels, mirror, color, mean: tuple, std: tuple, dtype: str):
    """Mirrors, colours and normalises; a mask, which is uint8, is mirrored alone."""
    if mirror is not None:
        pixels = _mirrored(pixels, mirror)
    if dtype == "uint8":
        return tf.cast(pixels, tf.uint8)
    pixels = tf.cast(pixels, tf.float32)
    if color is not None:
        pixels = _colored(pixels, color)
    return tf.cast(normalized(pixels, mean, std), dtype)


def normalized(pixels, mean: tuple, std: tuple):
    """Returns (pixel / 255 - mean) / std of each channel, float32, in one product and one sum."""
    mean, std = np.array(mean, np.float32), np.array(std, np.float32)
    return tf.cast(pixels, tf.float32) * (1 / (255 * std)) - mean / std


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
