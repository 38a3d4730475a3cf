"""The evaluation's preprocessing of images, as TensorFlow operations.

`Preprocessing.of` takes a loader's data. Its functions become part of a SavedModel, which then does
not need tfaccel.

    preprocessing = Preprocessing.of(loader.data)
    inputs = preprocessing.inputs(preprocessing.pixels(image_bytes))
"""

import dataclasses
from collections.abc import Mapping

import tensorflow as tf

from tfaccel.common.errors import UserError
from tfaccel.config import AugmentConfig, ImageConfig
from tfaccel.data import draws
from tfaccel.data.images import ImageData
from tfaccel.data.loaders.pixels import normalized
from tfaccel.data.loaders.tf_image import COLOUR_TYPES, raster_png, window_of, windowed
from tfaccel.data.raster import PNG_SIGNATURE
from tfaccel.data.source import Blobs, ImageSource, spread

# An untrusted image may claim any size. Pillow accepts this many without a warning: 256 MiB as RGB.
MAX_PIXELS = 89_478_485
AT_ONCE = 4  # images of a request that are decoded in parallel: each may take these 256 MiB
NUM_SAMPLED = 64  # images of shards whose beginnings are read
_SIZE_IN_PNG = 16  # bytes before width and height, 4 bytes each, big-endian (W3C PNG, 11.2.1)


@dataclasses.dataclass(frozen=True)
class Preprocessing:
    """The window of an image that becomes the model's input, and the normalization.

    Attributes:
      images: size, channels, dtype, mean and std.
      augment: the window; it has no random settings.
      stored_size: the (height, width) that images are resized to before the window is taken, if the
        loader stores them in this size; None to take the window from the image itself.
      is_raster: whether files are read as they are stored: see `data/raster.py`.
      takes_files: whether TensorFlow's operations can decode the files. They decode JPEG and PNG,
        but not TIFF and .npy.
    """

    images: ImageConfig
    augment: AugmentConfig
    stored_size: tuple[int, int] | None = None
    is_raster: bool = False
    takes_files: bool = True

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
        stored_size = data.images.stored_size if decodes else None
        return cls(data.images, data.augment, stored_size, **how_read(data))

    def pixels(self, image_bytes: tf.Tensor) -> tf.Tensor:
        """Decodes and resizes images as the evaluation does.

        Args:
          image_bytes: [rows] string, each a JPEG or PNG file of any size; or each a PNG file with
            the bits and channels of `images`, if files are read as they are stored.

        Returns:
          [rows, height, width, channels] of `images.pixel_dtype`.

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
                fn_output_signature=tf.TensorSpec(shape, self.images.pixel_dtype),
                # Eagerly, TensorFlow cannot run them in parallel and would warn.
                parallel_iterations=None if tf.executing_eagerly() else AT_ONCE,
            )

    def _window(self, data: tf.Tensor) -> tf.Tensor:
        """Returns the pixels of one encoded image."""
        if self.is_raster:
            return self.window_of(raster_png(data, self.images))
        if self.stored_size is None:
            return windowed(data, None, images=self.images, augment=self.augment)[0]
        whole = dataclasses.replace(self.images, image_size=self.stored_size)
        stored, _ = windowed(data, None, images=whole, augment=AugmentConfig())
        return window_of(stored, images=self.images, augment=self.augment)

    def window_of(self, pixels: tf.Tensor) -> tf.Tensor:
        """Returns the window of an image that was read as it is stored, resized.

        Args:
          pixels: [height, width, channels] of `images.pixel_dtype`.
        """
        if self.stored_size is not None:
            whole = dataclasses.replace(self.images, image_size=self.stored_size)
            pixels = window_of(pixels, images=whole, augment=AugmentConfig())
        return window_of(pixels, images=self.images, augment=self.augment)

    def inputs(self, pixels: tf.Tensor) -> tf.Tensor:
        """Returns the model's inputs: (pixel / 255 - mean) / std, float32.

        Args:
          pixels: [rows, height, width, channels] uint8 or float32, 0 to 255; or pixels of another
            `images.pixel_dtype`, which is divided by its own `images.pixel_scale`.
        """
        return normalized(pixels, self.images.mean, self.images.std, self.images.pixel_scale)

    def as_dict(self) -> dict[str, object]:
        """Returns the settings for JSON."""
        scale, channels = self.images.pixel_scale, "RGB" if self.images.channels == 3 else "grey"
        formats = ["PNG"] if self.is_raster else ["JPEG", "PNG"]
        return {
            "formats": formats if self.takes_files else [],
            "max_pixels": MAX_PIXELS,
            "channels": self.images.channels if self.is_raster else channels,
            "pixel_dtype": self.images.pixel_dtype,
            "exif_orientation": "ignored",
            "jpeg_dct": "integer, accurate",
            "stored_size": self.stored_size and list(self.stored_size),
            "window": self.augment.window,
            "center_fraction": self.augment.center_fraction,
            "resize": "bilinear, antialiased",
            "image_size": list(self.images.image_size),
            "mean": list(self.images.mean),
            "std": list(self.images.std),
            "normalisation": f"(pixel / {scale:.0f} - mean) / std",
        }

    @classmethod
    def from_dict(cls, facts: Mapping[str, object]) -> "Preprocessing":
        """Returns the preprocessing that `as_dict` describes.

        Args:
          facts: what `as_dict` returned, maybe of an earlier tfaccel.
        """
        channels = {"RGB": 3, "grey": 1}.get(facts["channels"], facts["channels"])
        images = ImageConfig(
            image_size=facts["image_size"],
            channels=channels,
            pixel_dtype=facts.get("pixel_dtype", "uint8"),
            mean=facts["mean"],
            std=facts["std"],
        )
        window = {"window": facts["window"]}
        if facts["window"] == "resized_center_crop":
            window["center_fraction"] = facts["center_fraction"]
        stored_size = facts["stored_size"] and tuple(facts["stored_size"])
        return cls(
            images,
            AugmentConfig(**window),
            stored_size,
            is_raster=channels == facts["channels"],
            takes_files=bool(facts["formats"]),
        )


def how_read(data: ImageData) -> dict[str, bool]:
    """Returns `is_raster` and `takes_files` of the files of a loader's data."""
    if not isinstance(data.found, ImageSource):
        return {"is_raster": not data.images.are_usual, "takes_files": data.images.are_usual}
    if data.found.images.form is None:
        return {"is_raster": False, "takes_files": True}
    has_png = data.images.pixel_dtype != "float32" and data.images.channels in COLOUR_TYPES
    return {"is_raster": True, "takes_files": has_png and _are_all_png(data.found.images)}


def _are_all_png(blobs: Blobs) -> bool:
    """Returns whether all images are PNG files, by their names, or in shards by a sample."""
    if blobs.are_files:
        return blobs.files.suffixes() == {".png"}
    sample = spread(len(blobs), NUM_SAMPLED).tolist()
    return all(blobs.read(index).startswith(PNG_SIGNATURE) for index in sample)


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
