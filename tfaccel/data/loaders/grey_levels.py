"""Varies images in whole grey levels: RandAugment, blur, posterizing, solarizing and erasing.

Every loader ends with these operations, so they are the same in all of them. They take uint8 pixels
of one size on any device and give uint8 again, as Pillow's ImageOps and ImageEnhance do. The draws
come from a Feed.

    pixels = varied(pixels, draws, images=images, augment=augment, on_gpu=False)

Each row of a policy's operation has a code and an argument (`policies.CODES`). All rows take the
same way, since a GPU is fast only if they do: a move by an affine map, then a table of the 256
grey levels, then saturation and sharpness. Rows without such an operation come out unchanged. On
2 CPU cores that had other work too, an operation takes 0.8 ms for an image of 224x224 pixels, half
of it for the move, and a blur 0.2 ms (2026-11-30).
"""

import math

import numpy as np
import tensorflow as tf

from tfaccel.config import AugmentConfig, ImageConfig
from tfaccel.data.loaders.apart import apart
from tfaccel.data.loaders.warp import warped
from tfaccel.data.policies import CODES

LEVELS = 256
# Pillow's weights of RGB in a grey level, in 1/65536 (ITU-R 601).
GREY = (19595, 38470, 7471)
SMOOTH = 13  # the sum of Pillow's ImageFilter.SMOOTH: 1 for each neighbour, 5 for the pixel itself
COUNTING = np.float32([CODES.index(name) for name in ("autocontrast", "equalize")])
REACH = 3  # standard deviations of a blur, of the largest sigma, beyond which weights are 0


def varied(
    pixels,
    draws,
    *,
    images: ImageConfig,
    augment: AugmentConfig,
    on_gpu: bool,
    is_mask: bool = False,
):
    """Returns the pixels after the operations that are drawn: [rows, height, width, channels].

    Args:
      pixels: [rows, height, width, channels] uint8.
      draws: tensors by kind, as in `draws.kinds`, or for a target as in `draws.for_target`.
      images: the mean, which may fill and erase, and the class outside of a mask.
      augment: the largest blur, and what fills and erases.
      on_gpu: whether the device is a GPU. It counts grey levels in another way than a CPU, with the
        same result.
      is_mask: whether pixels are classes, so that a move takes the nearest pixel.
    """
    mean = tuple(round(255 * each) for each in images.mean)
    fill = mean if augment.policy_fill == "mean" else (0,) * len(mean)
    if "moves" in draws:
        fill = (images.ignore_class or 0,) if is_mask else fill
        for index in range(draws["moves"].shape[1]):
            pixels = _moved(pixels, draws["moves"][:, index], is_mask, fill)
    if "policy" in draws:
        for index in range(draws["policy"].shape[1]):
            pixels = _operated(pixels, draws["policy"][:, index], fill, on_gpu)
    if "blur" in draws:
        radius = math.ceil(REACH * augment.blur_sigma[1])
        pixels = _blurred(pixels, draws["blur"], radius)
    if "levels" in draws:
        pixels = _posterized_and_solarized(pixels, draws["levels"])
    if "erase" in draws:
        pixels = _erased(pixels, draws["erase"], augment.erase_fill, mean)
    return pixels


# One operation of a policy. Its parts are compiled apart. No int32 passes between the parts:
# TensorFlow keeps int32 on the host.


def _operated(pixels, row, fill: tuple, on_gpu: bool):
    pixels = _moved(pixels, row[:, :6], False, fill)
    counts = _counts_on_gpu(pixels) if on_gpu else _counts_on_cpu(pixels, row[:, 6])
    tables = _tables(pixels, counts, row[:, 6:])
    return _mapped(pixels, _smoothed(pixels), tables, row[:, 6:])


@apart
def _moved(pixels, matrix, nearest: bool, fill: tuple):
    """Moves by affine maps, [rows, 6]. The map 1, 0, 0, 0, 1, 0 changes nothing.

    Places outside the image give `fill`, which has a number for each channel.
    """
    matrix = tf.reshape(matrix, (-1, 2, 3))
    if nearest:
        return warped(pixels, matrix, True, fill[0])
    if not any(fill):
        return tf.cast(warped(pixels, matrix, False, 0) + 0.5, tf.uint8)
    levels = tf.constant(fill, tf.float32)
    found = warped(tf.cast(pixels, tf.float32) - levels, matrix, False, 0) + levels
    return tf.cast(tf.clip_by_value(found + 0.5, 0.0, 255.0), tf.uint8)


def _counts_on_cpu(pixels, code):
    """Returns how many pixels of each channel have each level: [rows, channels, 256] float32.

    Rows whose operation needs no counts have zeros. XLA has nothing as fast for a CPU.
    """
    rows, height, width, channels = pixels.shape
    counting = tf.where(tf.reduce_any(code[:, None] == COUNTING, axis=1))
    # The levels of channel 0 are 0 to 255, those of channel 1 are 256 to 511, and so on.
    apart = tf.cast(tf.gather_nd(pixels, counting), tf.int32)
    apart += LEVELS * np.arange(channels, dtype=np.int32)
    counts = tf.raw_ops.DenseBincount(
        input=tf.reshape(apart, (-1, height * width * channels)),
        size=channels * LEVELS,
        weights=tf.zeros([0], tf.float32),
    )
    every = tf.scatter_nd(counting, counts, tf.constant((rows, channels * LEVELS), tf.int64))
    return tf.reshape(every, (rows, channels, LEVELS))


@apart
def _counts_on_gpu(pixels):
    """Returns the same of all rows by comparisons, which a GPU adds up in a fixed order."""
    levels = tf.range(LEVELS, dtype=tf.int32)
    same = tf.cast(pixels, tf.int32)[..., None] == levels
    counts = tf.reduce_sum(tf.cast(same, tf.int32), axis=(1, 2))
    return tf.cast(counts, tf.float32)


@apart
def _tables(pixels, counts, row):
    """Returns the new level of each level: [rows, channels, 256] float32, whole numbers.

    Args:
      pixels: [rows, height, width, channels] uint8.
      counts: [rows, channels, 256] float32.
      row: [rows, 2] float32, the index in CODES and the argument.
    """
    code, argument = row[:, :1, None], row[:, 1:, None]
    level = tf.range(LEVELS, dtype=tf.float32)[None, None]
    mean = _mean_grey(pixels)[:, None, None]
    new = {
        "brightness": _blended(tf.zeros_like(level), level, argument),
        "contrast": _blended(mean, level, argument),
        "posterize": tf.floor(level / argument) * argument,
        "solarize": tf.where(level < argument, level, 255 - level),
        "solarize_add": tf.where(level < 128, tf.minimum(level + argument, 255.0), level),
        "invert": 255 - level,
        "autocontrast": _contrasted(counts),
        "equalize": _equalized(counts),
    }
    found = tf.zeros_like(counts) + level
    for name, each in new.items():
        found = tf.where(code == CODES.index(name), each, found)
    return found


def _blended(first, second, factor):
    """Returns first + factor * (second - first), cut to 0..255 and down to whole levels.

    Pillow's Image.blend does so, too.
    """
    return tf.floor(tf.clip_by_value(first + factor * (second - first), 0.0, 255.0))


def _grey(pixels):
    """Returns the grey level of each pixel as Pillow rounds it: [..., 1] int32."""
    pixels = tf.cast(pixels, tf.int32)
    if pixels.shape[-1] == 1:
        return pixels
    weighted = tf.reduce_sum(pixels * tf.constant(GREY), axis=-1, keepdims=True)
    return (weighted + 2**15) // 2**16


def _mean_grey(pixels):
    """Returns the mean grey level of each image, rounded: [rows] float32."""
    number = pixels.shape[1] * pixels.shape[2]
    # An int32 holds the sum of 8 million pixels.
    sums = tf.reduce_sum(_grey(pixels), axis=(1, 2, 3))
    return tf.cast((2 * tf.cast(sums, tf.int64) + number) // (2 * number), tf.float32)


def _contrasted(counts):
    """Returns the table of ImageOps.autocontrast: the least level becomes 0, the largest 255."""
    present = tf.cast(counts > 0, tf.int32)
    least = tf.argmax(present, axis=-1, output_type=tf.int32)[..., None]
    largest = 255 - tf.argmax(tf.reverse(present, [-1]), axis=-1, output_type=tf.int32)[..., None]
    level = tf.range(LEVELS, dtype=tf.int32)
    spread = tf.maximum(largest - least, 1)
    new = tf.clip_by_value(255 * (level - least) // spread, 0, 255)
    return tf.cast(tf.where(largest > least, new, level), tf.float32)


def _equalized(counts):
    """Returns the table of ImageOps.equalize, which makes all levels about equally frequent."""
    counts = tf.cast(counts, tf.int32)
    present = tf.cast(counts > 0, tf.int32)
    largest = 255 - tf.argmax(tf.reverse(present, [-1]), axis=-1, output_type=tf.int32)
    last = tf.gather(counts, largest, axis=-1, batch_dims=2)[..., None]
    step = (tf.reduce_sum(counts, axis=-1, keepdims=True) - last) // 255
    below = tf.cumsum(counts, axis=-1, exclusive=True)
    new = tf.minimum((below + step // 2) // tf.maximum(step, 1), 255)
    level = tf.range(LEVELS, dtype=tf.int32)
    return tf.cast(tf.where(step > 0, new, level), tf.float32)


@apart
def _mapped(pixels, smoothed, tables, row):
    """Looks each level up in its row's table, or changes saturation or sharpness: uint8."""
    rows, _, _, channels = pixels.shape
    code, factor = row[:, 0, None, None, None], row[:, 1, None, None, None]
    table = tf.range(rows)[:, None, None, None] * channels + tf.range(channels)
    found = tf.gather(tf.reshape(tables, (-1,)), table * LEVELS + tf.cast(pixels, tf.int32))
    levels = tf.cast(pixels, tf.float32)
    if channels == 3:
        grey = tf.cast(_grey(pixels), tf.float32)
        saturated = _blended(grey, levels, factor)
        found = tf.where(code == CODES.index("saturation"), saturated, found)
    sharpened = _blended(tf.cast(smoothed, tf.float32), levels, factor)
    return tf.cast(tf.where(code == CODES.index("sharpness"), sharpened, found), tf.uint8)


# Filters. Width and channels are one axis, and the image is padded in a program of its own. So
# XLA adds long rows: on a CPU it takes a seventh of the time (80 us instead of 530 us for an image
# of 224x224 pixels, 2 busy cores, 2026-11-30).


def _smoothed(pixels):
    """Returns what Pillow's ImageFilter.SMOOTH gives, uint8; it leaves the border as it is."""
    return tf.reshape(_of_nine(_padded(pixels, 1), pixels.shape[-1]), pixels.shape)


@apart
def _padded(pixels, radius: int):
    """Returns [rows, height + 2 radius, (width + 2 radius) * channels], with zeros outside."""
    rows, height, width, channels = pixels.shape
    flat = tf.reshape(pixels, (rows, height, width * channels))
    return tf.pad(flat, [(0, 0), (radius, radius), (radius * channels, radius * channels)])


@apart
def _of_nine(padded, channels: int):
    levels = tf.cast(padded, tf.float32)
    _, height, width = (levels[:, 1:-1, channels:-channels]).shape
    of_three = levels[:, :-2] + levels[:, 1:-1] + levels[:, 2:]
    sums = of_three[..., :width] + of_three[..., channels:-channels] + of_three[..., -width:]
    own = levels[:, 1:-1, channels:-channels]
    smooth = tf.floor((sums + 4 * own) / SMOOTH + 0.5)
    y, x = tf.range(height)[:, None], tf.range(width)
    is_inner = (y > 0) & (y < height - 1) & (x >= channels) & (x < width - channels)
    return tf.cast(tf.where(is_inner, smooth, own), tf.uint8)


def _blurred(pixels, sigma, radius: int):
    """Returns the blurred pixels; where sigma, [rows, 1], is 0, the pixels themselves."""
    rows, height, width, channels = pixels.shape
    blurred = tf.reshape(pixels, (rows, height, width * channels))
    for axis, channels_in_a_row in ((1, 1), (2, channels)):
        padded = _repeated(blurred, axis, radius, channels_in_a_row)
        blurred = _weighted(padded, sigma, axis, radius, channels_in_a_row)
    return tf.reshape(_rounded(blurred), pixels.shape)


@apart
def _repeated(flat, axis: int, radius: int, channels: int):
    """Repeats the pixels at both ends of an axis, `radius` times."""
    length = flat.shape[axis] // channels
    place = np.arange(-radius, length + radius).clip(0, length - 1)[:, None] * channels
    return tf.gather(flat, (place + np.arange(channels)).ravel(), axis=axis)


@apart
def _weighted(padded, sigma, axis: int, radius: int, channels: int):
    place = tf.range(-radius, radius + 1, dtype=tf.float32)
    weight = tf.exp(-((place / tf.maximum(sigma, 0.01)) ** 2) / 2)
    weight /= tf.reduce_sum(weight, axis=1, keepdims=True)
    length = padded.shape[axis] - 2 * radius * channels
    total = 0.0
    for tap in range(2 * radius + 1):
        part = slice(tap * channels, tap * channels + length)
        part = padded[:, part] if axis == 1 else padded[:, :, part]
        total += tf.cast(part, tf.float32) * weight[:, tap, None, None]
    return total


@apart
def _rounded(pixels):
    return tf.cast(tf.minimum(pixels + 0.5, 255.0), tf.uint8)


# What each image may have beside a policy.


@apart
def _posterized_and_solarized(pixels, draws):
    """Rounds down to multiples of draws[:, 0], then inverts levels from draws[:, 1] on."""
    multiple, threshold = draws[:, 0, None, None, None], draws[:, 1, None, None, None]
    levels = tf.floor(tf.cast(pixels, tf.float32) / multiple) * multiple
    return tf.cast(tf.where(levels < threshold, levels, 255 - levels), tf.uint8)


@apart
def _erased(pixels, draws, fill: str, mean: tuple):
    """Paints over a rectangle: see "erase" in `draws.kinds`."""
    _, height, width, channels = pixels.shape
    top, left, tall, wide, seed = (draws[:, index, None, None, None] for index in range(5))
    y = tf.range(height, dtype=tf.float32)[None, :, None, None]
    x = tf.range(width, dtype=tf.float32)[None, None, :, None]
    inside = (y >= top) & (y < top + tall) & (x >= left) & (x < left + wide)
    if fill == "random":
        place = np.arange(height * width * channels, dtype=np.uint32)
        new = noise(tf.cast(seed, tf.uint32), place.reshape(1, height, width, channels))
    else:
        new = tf.constant(mean if fill == "mean" else (0,) * channels, tf.uint8)
    return tf.where(inside, new, pixels)


def noise(seed, place):
    """Returns levels 0..255, uint8, that depend on seed and place alone, on every device.

    The bits are mixed by the last steps of MurmurHash3 (Appleby 2011).

    Args:
      seed: uint32 tensor.
      place: uint32 array, whose shape broadcasts with that of `seed`.
    """
    mixed = seed * np.uint32(0x9E3779B1) + tf.constant(place)
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        mixed = tf.bitwise.bitwise_xor(mixed, tf.bitwise.right_shift(mixed, np.uint32(shift)))
        mixed *= np.uint32(factor)
    mixed = tf.bitwise.bitwise_xor(mixed, tf.bitwise.right_shift(mixed, np.uint32(16)))
    return tf.cast(tf.bitwise.bitwise_and(mixed, np.uint32(255)), tf.uint8)
