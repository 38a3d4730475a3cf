"""Makes a window of one encoded image, with TensorFlow operations and without DALI.

The image is a JPEG, PNG, BMP, GIF or WebP. Its content decides on the format, not the file's name.
The window is uint8, with the size of the batch's images.

    window, size = windowed(data, None, images=images, augment=augment)

PNG files that are read as they are stored (raster.py) have windows of their own dtype:

    window, size = raster_windowed(raster_png(data, images), None, images=images, augment=augment)
"""

import functools

import tensorflow as tf

from tfaccel.config import CROPS, AugmentConfig, ImageConfig
from tfaccel.data.loaders import pixels
from tfaccel.data.loaders.windows import nearest_index
from tfaccel.data.raster import PNG_CHANNELS

JPEG_SCALES = (1, 2, 4, 8)  # the scales at which libjpeg decodes
MARGIN = 16  # pixels: the largest block that libjpeg decodes together
# ITU-R 601 in 1/65536, as in Pillow and in JPEG itself; libpng's own conversion is different.
GREY = (19595, 38470, 7471)
PNG_DEPTH = 24  # offset of the number of bits per sample in a PNG (W3C PNG, 11.2.1)
COLOUR_TYPES = {channels: colour for colour, channels in PNG_CHANNELS.items()}  # behind the bits


def windowed(
    data, draws, *, images: ImageConfig, augment: AugmentConfig, kind: str = "image", fast=False
):
    """Returns the resized window of an encoded image, and the image's own size.

    Args:
      data: the encoded image.
      draws: draws of the window; None if it is not random.
      images: size and channels.
      augment: the kind of window.
      kind: "image" or "mask".
      fast: whether decoding and resizing may be less exact.
    """
    channels = 1 if kind == "mask" else images.channels
    find = None  # the whole image
    if augment.window != "stretch":
        find = functools.partial(
            pixels.window, image_size=images.image_size, augment=augment, draws=draws
        )
    is_crop = augment.window in CROPS
    to_size = _fast if fast else _nearest if kind == "mask" else _averaged

    def from_jpeg():
        size = tf.io.extract_jpeg_shape(data)[:2]
        if fast:
            take = functools.partial(_fast_jpeg, data, *find(size), images.image_size)
            return (take(3) if channels == 3 else _grey_of(data, take)), size
        image = _exact_jpeg(data, size, find, channels)
        return (image if is_crop else to_size(image, images.image_size)), size

    def from_other():
        image = _decoded(data, channels)
        size = tf.shape(image)[:2]
        image = _cut(image, *find(size), channels) if find else image
        return (image if is_crop else to_size(image, images.image_size)), size

    image, size = tf.cond(tf.io.is_jpeg(data), from_jpeg, from_other)
    return tf.ensure_shape(image, [*images.image_size, channels]), size


def raster_windowed(
    image, draws, *, images: ImageConfig, augment: AugmentConfig, fast: bool = False
):
    """Returns the resized window of an image that was read as it is stored, and its own size.

    The window has the image's dtype. Whole numbers are rounded after resizing.

    Args:
      image: [height, width, channels] of `images.pixel_dtype`.
      draws, images, augment, fast: as in `windowed`.
    """
    size = tf.shape(image)[:2]
    if augment.window != "stretch":
        place = pixels.window(size, images.image_size, augment, draws)
        image = _cut(image, *place, images.channels)
    if augment.window not in CROPS:
        image = (_fast if fast else _averaged)(image, images.image_size)
    return tf.ensure_shape(image, [*images.image_size, images.channels]), size


def raster_png(data, images: ImageConfig):
    """Returns the pixels of a PNG as they are stored: [height, width, channels].

    Raises:
      tf.errors.InvalidArgumentError: at run time, if it has other bits or channels than `images`.
    """
    bits, colour = (8 * tf.as_dtype(images.pixel_dtype).size, COLOUR_TYPES[images.channels])
    head = tf.strings.substr(tf.strings.join([data, bytes(PNG_DEPTH + 2)]), PNG_DEPTH, 2)
    fits = tf.debugging.Assert(
        tf.equal(head, bytes([bits, colour])),
        [f"not a PNG of {bits} bits with {images.channels} channels and no palette"],
    )
    channels = 0 if images.channels == 2 else images.channels  # TensorFlow does not take 2
    with tf.control_dependencies([fits]):
        image = tf.io.decode_png(data, channels=channels, dtype=images.pixel_dtype)
    return tf.ensure_shape(image, [None, None, images.channels])


def window_of(image, *, images: ImageConfig, augment: AugmentConfig):
    """Returns the resized window of a decoded image: [*image_size, channels] of its dtype.

    Args:
      image: [height, width, channels] uint8, or of `images.pixel_dtype`.
      images: size and channels.
      augment: the kind of window, which must not be random.
    """
    if augment.window != "stretch":
        place = pixels.window(tf.shape(image)[:2], images.image_size, augment)
        image = _cut(image, *place, images.channels)
    image = image if augment.window in CROPS else _averaged(image, images.image_size)
    return tf.ensure_shape(image, [*images.image_size, images.channels])


def _exact_jpeg(data, size, find, channels: int):
    """Returns the window that `find` gives, or the whole image if `find` is None.

    For a grey window, a colour JPEG is decoded in colour and converted. The decoder's own grey is
    the lightness before colours are clipped to 0..255, up to 43 levels off (Pillow's test images).
    """
    if channels == 3:
        return _exact_as_stored(data, size, find, 3)
    return _grey_of(data, lambda stored: _exact_as_stored(data, size, find, stored))


def _grey_of(data, decode):
    """Returns the grey image of a JPEG. `decode` receives 1 channel for a grey file, else 3."""
    is_grey = tf.equal(tf.io.extract_jpeg_shape(data)[2], 1)
    return tf.cond(is_grey, lambda: decode(1), lambda: _to_grey(decode(3)))


def _exact_as_stored(data, size, find, channels: int):
    if find is None:
        return tf.io.decode_jpeg(data, channels=channels, dct_method="INTEGER_ACCURATE")
    corner, extent = find(size)
    # Colours are interpolated from their neighbours, so those are decoded, too, and then cut off.
    start, stop = tf.maximum(corner - MARGIN, 0), tf.minimum(corner + extent + MARGIN, size)
    image = tf.io.decode_and_crop_jpeg(
        data,
        tf.concat([start, stop - start], 0),
        channels=channels,
        dct_method="INTEGER_ACCURATE",
    )
    return _cut(image, corner - start, extent, channels)


def _fast_jpeg(data, corner, extent, new_size, channels: int):
    """Returns a window, decoded at the smallest sufficient scale and resized."""

    def branch(scale, to_size):
        # Whole pixels of the smaller image move the window by at most half of one.
        start, stop = ((each + scale // 2) // scale for each in (corner, corner + extent))
        image = tf.io.decode_and_crop_jpeg(
            data,
            tf.concat([start, stop - start], 0),
            channels=channels,
            ratio=scale,
            dct_method="INTEGER_FAST",
            fancy_upscaling=False,
        )
        return _rounded(to_size(image, new_size))

    # One switch serves both choices, because branches that are not taken cost time, too.
    branches = [functools.partial(branch, scale, tf.image.resize) for scale in JPEG_SCALES]
    averaged = functools.partial(tf.image.resize, antialias=True)
    branches.append(functools.partial(branch, JPEG_SCALES[-1], averaged))
    room = tf.reduce_min(extent // new_size)
    limits = [*JPEG_SCALES[1:], 2 * JPEG_SCALES[-1]]  # for the last limit, see pixels.is_shrunk
    return tf.switch_case(tf.raw_ops.Bucketize(input=room, boundaries=limits), branches)


def _decoded(data, channels: int):
    """Returns the whole image if it is not a JPEG and has at most 8 bits a sample."""
    head = tf.strings.substr(tf.strings.join([data, bytes(PNG_DEPTH + 1)]), 0, PNG_DEPTH + 1)
    is_png = tf.strings.substr(head, 0, 4) == b"\x89PNG"
    is_deep = is_png & (tf.strings.substr(head, PNG_DEPTH, 1) == b"\x10")
    with tf.control_dependencies([tf.debugging.Assert(~is_deep, ["a PNG with 16-bit samples"])]):
        image = tf.io.decode_image(data, expand_animations=False)
    grey = tf.shape(image)[-1] < 3  # maybe with opacity, which is dropped in every loader
    if channels == 1:
        image = tf.cond(grey, lambda: image[..., :1], lambda: _to_grey(image[..., :3]))
    else:
        image = tf.cond(grey, lambda: tf.repeat(image[..., :1], 3, axis=-1), lambda: image[..., :3])
    return tf.ensure_shape(image, [None, None, channels])


def _to_grey(image):
    weighted = tf.reduce_sum(tf.cast(image, tf.int32) * GREY, axis=-1, keepdims=True)
    return tf.cast((weighted + 2**15) // 2**16, tf.uint8)


def _cut(image, corner, extent, channels: int):
    return tf.slice(image, tf.concat([corner, [0]], 0), tf.concat([extent, [channels]], 0))


def _nearest(image, new_size):
    """Returns the image resized to the nearest pixels."""
    size = tf.shape(image)
    for axis in (0, 1):
        image = tf.gather(image, nearest_index(size[axis], new_size[axis]), axis=axis)
    return image


def _averaged(image, new_size):
    """Returns the image resized with antialiasing.

    Antialiasing is slow: 1,100 us for 320x290 to 224x224 pixels, compared with 230 us for plain
    interpolation. It takes 170 us for 28x28 pixels of unchanged size, which is therefore a special
    case (2 CPU cores, 2026-11-21).
    """

    def resized():
        return _rounded(tf.image.resize(image, new_size, antialias=True), image.dtype)

    return tf.cond(tf.reduce_all(tf.shape(image)[:2] == new_size), lambda: image, resized)


def _fast(image, new_size):
    """Returns the image resized, with antialiasing only if it is needed."""
    resize = functools.partial(tf.image.resize, image, new_size)
    averaged = functools.partial(resize, antialias=True)
    shrunk = pixels.is_shrunk(tf.shape(image)[:2], new_size)
    return _rounded(tf.cond(shrunk, averaged, resize), image.dtype)


def _rounded(image, dtype=tf.uint8):
    """Returns pixels of a dtype from float32; whole numbers are rounded."""
    return image if dtype.is_floating else tf.cast(image + 0.5, dtype)
