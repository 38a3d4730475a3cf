"""What evaluation does to an image before the model sees it, as TensorFlow operations.

Takes what a loader reads; gives functions that go into a SavedModel and need nothing of ours there.

    preprocessing = Preprocessing.of(loader.data)
    inputs = preprocessing.inputs(preprocessing.pixels(image_bytes))
"""

import dataclasses

import tensorflow as tf

from tfaccel.config import AugmentConfig, ImageConfig
from tfaccel.data.images import ImageData
from tfaccel.data.loaders.pixels import normalized
from tfaccel.data.loaders.tf_image import windowed
from tfaccel.errors import UserError

# A stranger's image may claim any size. What Pillow takes without a warning: 256 MiB as RGB.
MAX_PIXELS = 89_478_485
PNG_SIGNATURE = b"\x89PNG\r\n\x1a\n"
_SIZE_IN_PNG = 16  # bytes before width and height, 4 bytes each, big-endian (W3C PNG, 11.2.1)


@dataclasses.dataclass(frozen=True)
class Preprocessing:
    """Which window of an image becomes the model's input, and how it is normalised.

    Attributes:
      images: size, channels, mean and std.
      augment: which window; nothing in it is random.
    """

    images: ImageConfig
    augment: AugmentConfig

    @classmethod
    def of(cls, data: ImageData) -> "Preprocessing":
        """Returns that of a loader's data.

        Raises:
          UserError: the loader varies its images at random, as one for training does.
        """
        if random := sorted(data.feed(0).draw_specs):
            raise UserError(
                f"the loader draws at random ({', '.join(random)}); give the export the loader "
                "that evaluates, e.g. with augment='none' or 'imagenet_eval'"
            )
        return cls(data.images, data.augment)

    def pixels(self, image_bytes: tf.Tensor) -> tf.Tensor:
        """Decodes and resizes as evaluation does.

        Args:
          image_bytes: [rows] string, each a JPEG or a PNG, of any size.

        Returns:
          [rows, height, width, channels] uint8.

        Raises:
          tf.errors.InvalidArgumentError: when it is run, of what is no such image, is damaged, or
            has more than MAX_PIXELS pixels.
        """
        shape = (*self.images.image_size, self.images.channels)

        def one(row):
            data = _checked(*row)
            window, _ = windowed(data, None, images=self.images, augment=self.augment)
            return window

        with tf.device("/cpu:0"):  # where these operations are, wherever the rest is served
            rows = tf.range(tf.size(image_bytes)), image_bytes
            return tf.map_fn(one, rows, fn_output_signature=tf.TensorSpec(shape, tf.uint8))

    def inputs(self, pixels: tf.Tensor) -> tf.Tensor:
        """Returns what the model takes: (pixel / 255 - mean) / std, float32.

        Args:
          pixels: [rows, height, width, channels] uint8 or float32, 0 to 255.
        """
        return normalized(pixels, self.images.mean, self.images.std)

    def as_dict(self) -> dict[str, object]:
        """Returns it for JSON."""
        return {
            "formats": ["JPEG", "PNG"],
            "max_pixels": MAX_PIXELS,
            "channels": "RGB" if self.images.channels == 3 else "grey",
            "exif_orientation": "ignored",
            "jpeg_dct": "integer, accurate",
            "window": self.augment.window,
            "center_fraction": self.augment.center_fraction,
            "resize": "bilinear, antialiased",
            "image_size": list(self.images.image_size),
            "mean": list(self.images.mean),
            "std": list(self.images.std),
            "normalisation": "(pixel / 255 - mean) / std",
        }


def _checked(index, data):
    """Returns an encoded image, once its first bytes say that it is one, and not too large."""
    head = tf.strings.substr(tf.strings.join([data, bytes(32)]), 0, 32)
    is_png = tf.strings.substr(head, 0, len(PNG_SIGNATURE)) == PNG_SIGNATURE
    is_jpeg = tf.io.is_jpeg(data)
    known = tf.debugging.Assert(is_png | is_jpeg, ["not a JPEG or PNG file: image", index])
    with tf.control_dependencies([known]):
        size = tf.cond(
            is_jpeg, lambda: tf.io.extract_jpeg_shape(data)[:2], lambda: _size_of_png(head)
        )
    sides = tf.cast(size, tf.int64)
    honest = tf.debugging.Assert(
        tf.reduce_all(sides > 0) & (tf.reduce_prod(sides) <= MAX_PIXELS),
        [f"more than {MAX_PIXELS} pixels, or none: image", index],
    )
    with tf.control_dependencies([honest]):
        return tf.identity(data)


def _size_of_png(head):
    """Returns the (width, height) that a PNG's first bytes say: [2] int32, below 0 from 2**31."""
    sides = tf.strings.substr(head, _SIZE_IN_PNG, 8)
    return tf.io.decode_raw(sides, tf.int32, little_endian=False)
