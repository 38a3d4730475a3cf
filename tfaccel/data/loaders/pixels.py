"""Makes batches from decoded images and their draws, with TensorFlow operations for any device.

The images are of one size, uint8, uint16 or float32, and the draws come from a Feed.

    image, label = examples(pixels, label, draws, images=images, augment=augment, dtype="float16")

XLA compiles the operations, on any device. On 2 CPU cores a random window of 256x256 pixels,
resized to 224x224 and mirrored, takes 400 us. tf.image.crop_and_resize takes 780 us, and mirroring
as one operation takes 1,100 us more (2026-11-21).
"""

import functools
import math

import numpy as np
import tensorflow as tf

from tfaccel.config import CROPS, PIXEL_SCALES, AugmentConfig, ImageConfig
from tfaccel.data.draws import ATTEMPTS, LEVEL_KINDS, for_target
from tfaccel.data.loaders import grey_levels
from tfaccel.data.loaders.apart import apart
from tfaccel.data.loaders.warp import warped
from tfaccel.data.loaders.windows import nearest_index
from tfaccel.data.source import ArraySource, ImageSource

# From RGB to lightness and two axes of colour, as in DALI's color_twist. The exact inverse is used
# for the way back.
RGB_TO_YIQ = np.array([[0.299, 0.587, 0.114], [0.596, -0.274, -0.321], [0.211, -0.523, 0.311]])
MIDDLE_GREY = 128.0  # the grey level that contrast does not change, as in DALI

_compiled = functools.partial(tf.function, jit_compile=True, autograph=False)


def batch_spec(
    source: ImageSource | ArraySource, images: ImageConfig, *, rows: int, dtype: str
) -> tuple[tf.TensorSpec, tf.TensorSpec]:
    """Returns the `tf.TensorSpec`s of one replica's batch.

    Args:
      source: labelled or paired images.
      images: size and channels of images, and the kind of targets.
      rows: number of rows in the batch.
      dtype: dtype of the images.
    """
    image = tf.TensorSpec((rows, *images.image_size, images.channels), dtype)
    if source.targets is None:
        labels = source.labels
        dtype = tf.int64 if labels.ndim == 1 else tf.as_dtype(labels.dtype)
        return image, tf.TensorSpec((rows, *labels.shape[1:]), dtype)
    is_mask = images.targets == "mask"
    return image, tf.TensorSpec((rows, *images.image_size, 1), tf.uint8) if is_mask else image


def examples(
    pixels,
    second,
    draws,
    *,
    images: ImageConfig,
    augment: AugmentConfig,
    dtype: str,
    on_gpu: bool = False,
):
    """Returns (image, label) or, for pairs, (image, target).

    Args:
      pixels: [rows, height, width, channels] of `images.pixel_dtype`.
      second: the labels, [rows] int64 or [rows, labels] float32; or the targets, like `pixels`.
      draws: the feed's draws by kind; see `draws.kinds`.
      images: size, channels, mean and std of images, and the kind of targets.
      augment: the window that is taken, and the operations on grey levels.
      dtype: dtype of the images.
      on_gpu: whether the device is a GPU: see `grey_levels.varied`.
    """
    settings = {"images": images, "augment": augment, "dtype": dtype, "on_gpu": on_gpu}
    image = augmented(pixels, draws, **settings)
    if second.shape.rank < 4:
        return image, second
    return image, augmented(second, for_target(draws), kind=images.targets, **settings)


def augmented(
    pixels,
    draws,
    *,
    images: ImageConfig,
    augment: AugmentConfig,
    dtype: str,
    on_gpu: bool = False,
    kind: str = "image",
):
    """Returns [rows, *image_size, channels]: the resized window with all augmentation.

    Args:
      pixels: [rows, height, width, channels] of `images.pixel_dtype`; for a mask uint8.
      draws: the feed's draws by kind.
      images: size, channels, dtype, mean and std.
      augment: the window that is taken, and the operations on grey levels.
      dtype: dtype of an image.
      on_gpu: whether the device is a GPU.
      kind: "image" for interpolated and normalised pixels, (pixel / 255 - mean) / std, or with
        another `images.pixel_scale` than 255; "mask" for
        the values of the nearest pixels, uint8.
    """
    is_mask = kind == "mask"
    pixels = _windows(pixels, draws, images.image_size, augment, nearest=is_mask)
    if "warp" in draws:
        fill = (images.ignore_class or 0) if is_mask else 0
        pixels = warped(pixels, draws["warp"], is_mask, fill)
    mean, std = (tuple(each) for each in (images.mean, images.std))
    dtype = "uint8" if is_mask else dtype
    mirror, color = draws.get("mirror"), draws.get("color")
    if not has_level_draws(draws):
        return _finished(pixels, mirror, color, mean, std, dtype, images.pixel_dtype)
    pixels = _whole_levels(pixels, mirror, color)
    settings = {"images": images, "augment": augment, "on_gpu": on_gpu, "kind": kind}
    return of_levels(pixels, draws, dtype=dtype, **settings)


def has_level_draws(draws) -> bool:
    """Returns whether there are draws of operations on whole grey levels."""
    return any(kind in draws for kind in (*LEVEL_KINDS, "moves"))


def of_levels(
    pixels,
    draws,
    *,
    images: ImageConfig,
    augment: AugmentConfig,
    dtype: str,
    on_gpu: bool,
    kind: str = "image",
):
    """Returns images or masks after the operations on whole grey levels, and normalises images.

    Args:
      pixels: [rows, *image_size, channels] uint8, after the other augmentation.
      draws: the feed's draws by kind, or for a target `draws.for_target` of them.
      images, augment, dtype, on_gpu, kind: as in `augmented`.
    """
    is_mask = kind == "mask"
    pixels = grey_levels.varied(
        pixels, draws, images=images, augment=augment, on_gpu=on_gpu, is_mask=is_mask
    )
    if is_mask:
        return pixels
    mean, std = tuple(images.mean), tuple(images.std)
    return _finished(pixels, None, None, mean, std, dtype, images.pixel_dtype)


# Windows. Places and sizes are pairs, vertical first, computed in float64, as in every loader. The
# formulas are those of windows.py, which explains why; test_windows.py compares the two files.


def window(source_size, image_size, augment: AugmentConfig, draws=None):
    """Returns a window's (top, left) and (height, width) in source pixels.

    Args:
      source_size: [2] (height, width) of the image.
      image_size: (height, width) of the batches.
      augment: the kind of window.
      draws: [..., n] draws of the kind "window", for random windows.

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
    """Returns the first size that fits, at a random place; else a central one near the image's."""
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
    # A draw just below 1 may be 1 in float32. The minimum keeps such a window inside the image.
    return tf.minimum(tf.floor(draws[..., -2:] * (source - size + 1)), source - size)


def _centred(source, size):
    return tf.floor((source - size) / 2)


def _round(value):
    return tf.floor(value + 0.5 + 1e-9)  # see windows.py


def resizes(source_size, image_size, augment: AugmentConfig) -> bool:
    """Returns whether windows are resized, and not only cut out."""
    if augment.window in CROPS:
        return False
    is_random = augment.window == "random_resized_crop"
    return is_random or fixed_window(source_size, image_size, augment)[2:] != list(image_size)


# Resizing, one axis after the other. Each new pixel is a weighted sum of a few old pixels. The
# parts are compiled separately: from both axes and the weights XLA would make one loop, and compute
# all of it for every pixel. No int32 passes between the parts: TensorFlow keeps int32 on the host.


def _windows(pixels, draws, image_size, augment, *, nearest):
    """Returns the windows at `image_size`: float32 if they are interpolated, else uint8."""
    source_size = tuple(pixels.shape[1:3])
    # float16 halves the bytes between the axes. Its rounding is below 0.07 of 255 levels. It does
    # not hold 16 bits.
    between = "float16" if pixels.dtype == tf.uint8 else "float32"
    if "window" in draws:
        corner, size = _random_windows(draws["window"], source_size, image_size, augment)
        shrink = [old / new for old, new in zip(source_size, image_size, strict=True)]
        shrink = shrink if min(shrink) >= 2 else [1, 1]  # see is_shrunk
        nearest = nearest or augment.window == "random_crop"  # it is not resized
    else:
        top, left, *size = fixed_window(source_size, image_size, augment)
        pixels = pixels[:, top : top + size[0], left : left + size[1]]
        if tuple(size) == tuple(image_size):
            return pixels
        shrink = [max(1, old / new) for old, new in zip(size, image_size, strict=True)]
        corner, size = tf.constant([[0.0, 0.0]]), tf.constant([size], tf.float32)
    for axis in (0, 1):  # rows first, because a row is contiguous in memory
        taps = _nearest_tap if nearest else functools.partial(_taps, shrink=shrink[axis])
        index, weight = taps(corner[:, axis], size[:, axis], image_size[axis])
        pixels = _weighted(pixels, index, weight, axis + 1, between if axis == 0 else "float32")
    return pixels


@_compiled
def _random_windows(draws, source_size, image_size, augment):
    pairs = window(source_size, image_size, augment, draws)
    return tuple(tf.cast(each, tf.float32) for each in pairs)


def fixed_window(source_size, image_size, augment: AugmentConfig) -> list[int]:
    """Returns (top, left, height, width) of a window that is not random, as Python numbers."""
    with tf.init_scope(), tf.device("/cpu:0"):  # computes at once, outside the graph
        corner, size = window(source_size, image_size, augment)
        return [*corner.numpy().tolist(), *size.numpy().tolist()]


def is_shrunk(size, image_size):
    """Returns whether a random window (height, width) is so large that shrinking must average.

    If a window shrinks by less than half, plain bilinear interpolation skips no pixel and costs a
    fraction. Windows that are not random are always averaged, so that all loaders give the same
    pixels for evaluation.
    """
    return tf.reduce_all(tf.cast(size, tf.float32) >= 2 * np.array(image_size, np.float32))


@_compiled
def _nearest_tap(start, length, new_length: int):
    """Returns the index of one pixel for each new pixel, and None instead of weights."""
    index = nearest_index(tf.cast(length, tf.int32)[:, None], new_length)
    return (start[:, None] + tf.cast(index, tf.float32))[..., None], None


@_compiled
def _taps(start, length, new_length: int, shrink: float):
    """Returns the old pixels of each new pixel, and their weights.

    Args:
      start: [rows] float32, start of the window, in pixels.
      length: [rows] float32, length of the window, in pixels.
      new_length: length after resizing, in pixels.
      shrink: the largest possible length / new_length; 1 for plain bilinear interpolation.

    Returns:
      Two tensors, [rows, new_length, taps] float32.
    """
    length = length[:, None]
    scale = length / new_length
    center = (tf.range(new_length, dtype=tf.float32) + 0.5) * scale
    reach = tf.maximum(scale, 1.0) if shrink > 1 else tf.ones_like(scale)
    # At most so many pixel centres are within reach of a place. Others get the weight 0.
    taps = tf.range(math.ceil(2 * shrink), dtype=tf.float32)
    place = tf.floor(center - reach + 0.5)[..., None] + taps
    weight = tf.maximum(0.0, 1 - tf.abs(place + 0.5 - center[..., None]) / reach[..., None])
    weight = tf.where((place >= 0) & (place < length[..., None]), weight, 0.0)
    weight /= tf.reduce_sum(weight, axis=-1, keepdims=True)
    return start[:, None, None] + tf.clip_by_value(place, 0, length[..., None] - 1), weight


@_compiled
def _weighted(pixels, index, weight, axis: int, dtype: str):
    """Returns weighted sums of pixels along an axis, or single pixels.

    Args:
      pixels: [rows, height, width, channels].
      index: [rows or 1, new length, taps] float32, whole numbers.
      weight: [rows or 1, new length, taps] float32; None for one tap without a weight.
      axis: 1 or 2.
      dtype: dtype of weighted sums.
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


# The steps after the window.


@_compiled
def _finished(pixels, mirror, color, mean: tuple, std: tuple, dtype: str, pixel_dtype: str):
    """Mirrors, colours and normalises. A mask, of the dtype uint8, is only mirrored."""
    if mirror is not None:
        pixels = _mirrored(pixels, mirror)
    if dtype == "uint8":
        return tf.cast(pixels, tf.uint8)
    pixels = tf.cast(pixels, tf.float32)
    if color is not None:
        pixels = _colored(pixels, color, pixel_dtype)
    return tf.cast(normalized(pixels, mean, std, PIXEL_SCALES[pixel_dtype]), dtype)


@apart
def _whole_levels(pixels, mirror, color):
    """Mirrors, colours and rounds to whole grey levels, uint8. A mask is only mirrored."""
    if mirror is not None:
        pixels = _mirrored(pixels, mirror)
    if color is not None:
        pixels = _colored(tf.cast(pixels, tf.float32), color)
    return pixels if pixels.dtype == tf.uint8 else tf.cast(pixels + 0.5, tf.uint8)


def normalized(pixels, mean: tuple, std: tuple, scale: float):
    """Returns (pixel / scale - mean) / std for each channel, float32, as one product and one sum.

    Args:
      pixels: [..., channels], of any dtype.
      mean, std: a number for each channel.
      scale: 255 for 8 bits; see `ImageConfig.pixel_scale`.
    """
    mean, std = np.array(mean, np.float32), np.array(std, np.float32)
    if scale == 1:  # floats of any range: their difference from the mean loses nothing
        return (tf.cast(pixels, tf.float32) - mean) / std
    return tf.cast(pixels, tf.float32) * (1 / (np.float32(scale) * std)) - mean / std


def _mirrored(pixels, flags):
    """Mirrors rows top to bottom and left to right, where their two flags are 1."""
    for axis in (1, 2):
        flag = flags[:, axis - 1, None, None, None] == 1
        pixels = tf.where(flag, tf.reverse(pixels, [axis]), pixels)
    return pixels


def _colored(pixels, draws, pixel_dtype: str = "uint8"):
    """Changes saturation and hue in YIQ, contrast, then brightness, as DALI; clips to 0..255.

    Pixels of 16 bits have another middle and are clipped to 0..65535. Floats have neither; only
    their brightness changes.
    """
    brightness, contrast, saturation, hue = (draws[:, i, None, None, None] for i in range(4))
    if pixels.shape[-1] == 3:
        matrix = _twist(saturation[..., 0], hue[..., 0] * (math.pi / 180))
        pixels = tf.reduce_sum(pixels[..., None, :] * matrix[:, None, None], axis=-1)
    if pixel_dtype == "float32":
        return pixels * brightness
    largest = PIXEL_SCALES[pixel_dtype]
    middle = MIDDLE_GREY / 255 * largest
    pixels = ((pixels - middle) * contrast + middle) * brightness
    return tf.clip_by_value(pixels, 0.0, largest)


def _twist(saturation, radians):
    """Returns matrices from RGB to RGB, [rows, 3, 3], from factors and angles, [rows, 1, 1]."""
    to_yiq = tf.constant(RGB_TO_YIQ, tf.float32)
    lightness, first, second = to_yiq[0:1], to_yiq[1:2], to_yiq[2:3]
    cosine, sine = saturation * tf.cos(radians), saturation * tf.sin(radians)
    turned = [
        tf.zeros_like(cosine) + lightness,
        cosine * first + sine * second,
        cosine * second - sine * first,
    ]
    from_yiq = tf.constant(np.linalg.inv(RGB_TO_YIQ), tf.float32)
    # The sum is explicit, because a GPU would round a matrix product to TensorFloat-32.
    return sum(from_yiq[:, each : each + 1] * turned[each] for each in range(3))
