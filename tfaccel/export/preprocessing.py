"""The evaluation's preprocessing of images, as TensorFlow operations.

`Preprocessing.of` takes a loader's data. Its functions become part of a SavedModel, which then does
not need tfaccel.

    preprocessing = Preprocessing.of(loader.data)
    inputs = preprocessing.inputs(preprocessing.pixels(image_bytes))
"""

import dataclasses

import tensorflow as tf

from tfaccel.common.errors import UserError
from tfaccel.config import AugmentConfig, ImageConfig
from tfaccel.data import draws
from tfaccel.data.images import ImageData
from tfaccel.data.loaders.pixels import normalized
from tfaccel.data.loaders.tf_image import window_of, windowed
from tfaccel.data.source import ImageSource

# An untrusted image may claim any size. Pillow accepts this many without a warning: 256 MiB as RGB.
MAX_PIXELS = 89_478_485
AT_ONCE = 4  # images of a request that are decoded in parallel: each may take these 256 MiB
PNG_SIGNATURE = b"\x89PNG\r\n\x1a\n"
_SIZE_IN_PNG = 16  # bytes before width and height, 4 bytes each, big-endian (W3C PNG, 11.2.1)


@dataclasses.dataclass(frozen=True)
class Preprocessing:
    """The window of an image that becomes the model's input, and the normalization.

    Attributes:
      images: size, channels, mean and std.
      augment: the window; it has no random settings.
      stored_size: the (height, width) that images are resized to before the window is taken, if the
        loader stores them in this size; None to take the window from the image itself.
    """

    images: ImageConfig
    augment: AugmentConfig
    stored_size: tuple[int, int] | None = None

    @classmethod
    def of(cls, data: ImageData) -> "Preprocessing":
        """Returns the preprocessing of a loader's data.

        Raises:
          UserError: the loader changes images at random, as a loader for training does.
        """
        if random := sorted(draws.kinds(data.augment)):
            raise UserError(
                f"the loader changes images at random ({', '.join(random)}); give the export a "
                "loader for evaluation, for example with augment='none' or 'imagenet_eval'"
            )
        decodes = isinstance(data.found, ImageSource)
        return cls(data.images, data.augment, data.images.stored_size if decodes else None)

    def pixels(self, image_bytes: tf.Tensor) -> tf.Tensor:
        """Decodes and resizes images as the evaluation does.

        Args:
          image_bytes: [rows] string, each a JPEG or PNG file of any size.

        Returns:
          [rows, height, width, channels] uint8.

        Raises:
          tf.errors.InvalidArgumentError: at run time, if an image is neither JPEG nor PNG, is
            damaged, or has more than MAX_PIXELS pixels.
        """
        shape = (*self.images.image_size, self.images.channels)

        with tf.device(
            "/cpu:0"
        ):  # these operations exist only there, even if a GPU serves the rest
            return tf.map_fn(
                # Called eagerly, map_fn would convert these functions with AutoGraph for a second.
                tf.autograph.experimental.do_not_convert(lambda row: self._window(_checked(*row))),
                (tf.range(tf.size(image_bytes)), image_bytes),
                fn_output_signature=tf.TensorSpec(shape, tf.uint8),
                # Eagerly, TensorFlow cannot run them in parallel and would warn.
                parallel_iterations=None if tf.executing_eagerly() else AT_ONCE,
            )

    def _window(self, data: tf.Tensor) -> tf.Tensor:
        """Returns the pixels of one encoded image."""
        if self.stored_size is None:
            return windowed(data, None, images=self.images, augment=self.augment)[0]
        whole = dataclasses.replace(self.images, image_size=self.stored_size)
        stored, _ = windowed(data, None, images=whole, augment=AugmentConfig())
        return window_of(stored, images=self.images, augment=self.augment)

    def inputs(self, pixels: tf.Tensor) -> tf.Tensor:
        """Returns the model's inputs: (pixel / 255 - mean) / std, float32.

        Args:
          pixels: [rows, height, width, channels] uint8 or float32, 0 to 255.
        """
        return normalized(pixels, self.images.mean, self.images.std)

    def as_dict(self) -> dict[str, object]:
        """Returns the settings for JSON."""
        return {
            "formats": ["JPEG", "PNG"],
            "max_pixels": MAX_PIXELS,
            "channels": "RGB" if self.images.channels == 3 else "grey",
            "exif_orientation": "ignored",
            "jpeg_dct": "integer, accurate",
            "stored_size": self.stored_size and list(self.stored_size),
            "window": self.augment.window,
            "center_fraction": self.augment.center_fraction,
            "resize": "bilinear, antialiased",
            "image_size": list(self.images.image_size),
            "mean": list(self.images.mean),
            "std": list(self.images.std),
            "normalisation": "(pixel / 255 - mean) / std",
        }


def _checked(index, data):
    """Returns an encoded image after a check of its type and size, from its first bytes."""
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
    """Returns (width, height) from a PNG's header: [2] int32, negative from 2**31 on."""
    sides = tf.strings.substr(head, _SIZE_IN_PNG, 8)
    return tf.io.decode_raw(sides, tf.int32, little_endian=False)
