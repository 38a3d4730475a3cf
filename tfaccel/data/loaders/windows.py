"""Computes the windows of a batch's images in NumPy, for loaders that cut while they decode.

    corners, sizes = windows(source_sizes, (224, 224), augment, draws.get("window"))
    rows = nearest_index(375, 224)    # of pixels that are not interpolated, as in a mask

`pixels.window` computes the same windows, to the pixel, in graphs and for images of one size. There
are two versions for speed. For 256 images, TensorFlow's 25 operations take 3.8 ms one by one and
0.7 ms as a tf.function, and NumPy takes 0.13 ms. A single version in tf.experimental.numpy makes
a graph 50% slower for each image (2 cores, 2026-11-22).
"""

import numpy as np

from tfaccel.config import AugmentConfig
from tfaccel.data.draws import ATTEMPTS

# Places and sizes are pairs, vertical first, computed in float64, as in every loader.


def windows(
    source_sizes: np.ndarray,
    image_size: tuple[int, int],
    augment: AugmentConfig,
    draws: np.ndarray | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """Returns the (top, left) and the (height, width) of each window: [rows, 2] int32 each.

    A crop that is larger than its image begins outside the image, at a negative place.

    Args:
      source_sizes: [rows, 2] int32, (height, width) of each image.
      image_size: (height, width) of the batches.
      augment: the kind of window.
      draws: [rows, n] float32, draws of the kind "window", for random windows.
    """
    source = source_sizes.astype(np.float64)
    size = np.tile(np.array(image_size, np.float64), (len(source), 1))
    if augment.window == "random_resized_crop":
        corner, size = _random_resized(source, augment, draws.astype(np.float64))
    elif augment.window == "random_crop":
        corner = _anywhere(source, size, draws.astype(np.float64))
    else:
        if augment.window == "stretch":
            size = source
        elif augment.window == "resized_center_crop":
            scale = (source / size).min(axis=1, keepdims=True) * augment.center_fraction
            size = np.maximum(_round(size * scale), 1)
        corner = _centred(source, size)
    return corner.astype(np.int32), size.astype(np.int32)


def _random_resized(source, augment, draws):
    """Returns the first size that fits, at a random place; else a central one near the image's."""
    height, width = source[:, :1], source[:, 1:]
    area, ratio = draws[:, :ATTEMPTS] * height * width, draws[:, ATTEMPTS:-2]
    sizes = _round(np.sqrt(np.stack([area / ratio, area * ratio], axis=-1)))
    fits = ((sizes >= 1) & (sizes <= source[:, None])).all(axis=-1)
    drawn = sizes[np.arange(len(sizes)), fits.argmax(axis=1)]
    least, largest = augment.crop_ratio
    nearest = np.clip(_round(np.hstack([width / least, height * largest])), 1, source)
    found = fits.any(axis=1, keepdims=True)
    size = np.where(found, drawn, nearest)
    return np.where(found, _anywhere(source, size, draws), _centred(source, size)), size


def _anywhere(source, size, draws):
    # A draw just below 1 may be 1 in float32. The minimum keeps such a window inside the image.
    return np.minimum(np.floor(draws[:, -2:] * (source - size + 1)), source - size)


def _centred(source, size):
    return np.floor((source - size) / 2)


def _round(value):
    # A tie goes up. The small number keeps this so when TensorFlow's optimizer computes in another
    # order: 33 of the shorter sides 200 to 1,099 give such a tie for a central window.
    return np.floor(value + 0.5 + 1e-9)


def nearest_index(length, new_length: int):
    """Returns the nearest of `length` pixels for each of `new_length` pixels: [..., new_length].

    The result is an array if `length` is a number, and a tensor if it is a tensor.
    """
    return (2 * np.arange(new_length, dtype=np.int32) + 1) * length // (2 * new_length)
