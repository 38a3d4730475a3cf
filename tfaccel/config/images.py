"""Where the images are, how they are augmented, and how they become batches."""

import dataclasses
from collections.abc import Sequence

from tfaccel.common.checks import (
    check_batch,
    check_choice,
    check_flag,
    check_int,
    check_number,
    check_only_with,
    check_optional_ints,
    check_text,
    is_int,
)
from tfaccel.common.errors import UserError
from tfaccel.config.documented import documented

WINDOWS = ("stretch", "resized_center_crop", "center_crop", "random_crop", "random_resized_crop")
CROPS = ("center_crop", "random_crop")  # of these, what is not resized
DEFAULT_BATCH = 256  # of Goyal et al. 2017, arXiv:1706.02677
LAST_BATCHES = ("pad", "drop", "repeat")
LOADERS = ("auto", "dali_gpu", "dali_cpu", "tf_data", "memory", "cache")
SOURCES = ("folders", "csv", "tfrecord", "webdataset", "arrays", "pairs")
# What a config says to one source alone, and to one window.
SOURCE_ARGUMENTS = {
    "tfrecord": ("image_key", "label_key", "first_label"),
    "webdataset": ("image_ext", "label_ext"),
}
WINDOW_ARGUMENTS = {
    "resized_center_crop": ("center_fraction",),
    "random_resized_crop": ("crop_area", "crop_ratio"),
}


@documented
@dataclasses.dataclass(frozen=True)
class AugmentConfig:
    """Which part of an image becomes a training example, and how it is varied, in this order.

    Every random number is a function of the seed, the epoch and the image's place in it: the same
    on any number of replicas, in every loader, and after a resume. Targets of paired images share
    all of them but colour.
    """

    window: str = "stretch"
    """Which part of an image is resized to image_size. "stretch": all of it, whatever its shape;
    "resized_center_crop": `center_fraction` of the largest centred window of image_size's shape
    (torchvision's Resize(256), CenterCrop(224)); "center_crop" and "random_crop": image_size pixels
    as they are, centred or anywhere; "random_resized_crop": a random window (torchvision's
    RandomResizedCrop)."""
    center_fraction: float = 0.875
    """For "resized_center_crop", of both sides."""
    crop_area: Sequence[float] = (0.08, 1.0)
    """For "random_resized_crop": least and largest part of the image's area."""
    crop_ratio: Sequence[float] = (3 / 4, 4 / 3)
    """For "random_resized_crop": least and largest width / height of the window."""
    horizontal_flip: bool = False
    """Mirror half the images left to right. Each image is mirrored with probability 1/2."""
    vertical_flip: bool = False
    """Whether an image is mirrored top to bottom, with probability 1/2."""
    rotation_degrees: float = 0.0
    """An image turns about its centre by a uniform angle in [-this, this]; what comes from outside
    is black."""
    shift_pixels: int = 0
    """An image moves by a uniform whole number of pixels in [-this, this], along both axes; what
    comes from outside is black."""
    brightness: float = 0.0
    """Pixels are multiplied by a uniform factor in [1 - this, 1 + this]."""
    contrast: float = 0.0
    """The pixels' distance from middle grey is multiplied by a uniform factor in [1 - this, 1 +
    this]."""
    saturation: float = 0.0
    """Their distance from grey of the same lightness is multiplied by a uniform factor in [1 -
    this, 1 + this]."""
    hue_degrees: float = 0.0
    """Hues turn by a uniform angle in [-this, this]."""

    def __post_init__(self):
        """Checks every field and stores it in its one normal form."""
        check_choice("window", self.window, WINDOWS)
        check_number("center_fraction", self.center_fraction, above=0, at_most=1)
        object.__setattr__(self, "crop_area", _range("crop_area", self.crop_area, at_most=1))
        object.__setattr__(self, "crop_ratio", _range("crop_ratio", self.crop_ratio))
        check_only_with(self, "window", WINDOW_ARGUMENTS)
        check_flag("horizontal_flip", self.horizontal_flip)
        check_flag("vertical_flip", self.vertical_flip)
        check_number("rotation_degrees", self.rotation_degrees, at_least=0, at_most=180)
        check_int("shift_pixels", self.shift_pixels, at_least=0)
        for name in ("brightness", "contrast", "saturation"):
            check_number(name, getattr(self, name), at_least=0, at_most=1)
        check_number("hue_degrees", self.hue_degrees, at_least=0, at_most=180)

    @property
    def has_random_window(self) -> bool:
        """Whether each image's window is drawn anew in every epoch."""
        return self.window.startswith("random")


@documented
@dataclasses.dataclass(frozen=True)
class ImageConfig:
    """How images become batches."""

    image_size: Sequence[int] = (224, 224)
    """Height,width in pixels. All images of a batch have this size."""
    channels: int = 3
    """3 for RGB, 1 for grey."""
    mean: float | Sequence[float] = 0.0
    """Of each channel (or one number for all), of pixels in 0..1; it is subtracted."""
    std: float | Sequence[float] = 1.0
    """Of each channel, as mean. The difference is divided by it. Mean and std of 0.5 give pixels in
    -1..1."""
    global_batch_size: int | None = None
    """Images a step, over all GPUs. None for batch_per_replica on each, or 256 where neither is
    given."""
    batch_per_replica: int | None = None
    """Images per step on each replica; None for global_batch_size over all."""
    last_batch: str = "pad"
    """Of an epoch that the batch size does not divide. "pad": filled up with other images, whose
    sample weight is 0, so that every image counts once; "drop": left out; "repeat": filled up with
    the epoch's first images, which count again."""
    loader: str = "auto"
    """Who decodes; auto chooses. "auto" chooses and says in the log why. The others: "dali_gpu"
    (DALI decodes and augments on the replica's GPU), "dali_cpu" (on the CPU), "tf_data"
    (TensorFlow, on the CPU), "memory" (decoded once, kept in the device's memory, augmented there),
    "cache" (decoded once into a file that is mapped, augmented on the device). What "auto" decodes
    into memory, and takes seconds to decode, it keeps on disk for later starts."""
    stored_size: Sequence[int] | None = None
    """For "memory" and "cache": (height, width) that images are resized to before they are stored;
    None for image_size, or as they are where all files have one size."""
    bad_files: str = "error"
    """If a file is bad: error or skip. "error" raises a sentence that names a file that cannot be
    used. "skip" looks through all files first (as `tfaccel audit` does) and trains without the bad
    ones: those that cannot be decoded, pairs of two sizes, and images smaller than the crop. (A
    file whose name is no image's is an error either way.)"""
    targets: str = "image"
    """Of paired images: "image" (interpolated and normalised like the inputs) or "mask" (nearest
    pixel, values as they are)."""

    def __post_init__(self):
        """Checks every field and stores it in its one normal form."""
        object.__setattr__(self, "image_size", _image_size("image_size", self.image_size))
        check_int("channels", self.channels, at_least=1)
        if self.channels not in (1, 3):
            raise UserError(f"channels={self.channels}; expected 1 (grey) or 3 (RGB)")
        object.__setattr__(self, "mean", _per_channel("mean", self.mean, self.channels))
        object.__setattr__(self, "std", _per_channel("std", self.std, self.channels))
        if max(self.mean) > 1:
            raise UserError(
                f"mean={self.mean!r}; expected parts of 1, as pixels are in 0..1: divide mean and "
                "std by 255"
            )
        if min(self.std) <= 0:
            raise UserError(f"std={self.std!r}; expected numbers above 0")
        if self.global_batch_size is not None or self.batch_per_replica is not None:
            check_batch(self.global_batch_size, self.batch_per_replica)
        check_choice("last_batch", self.last_batch, LAST_BATCHES)
        check_choice("loader", self.loader, LOADERS)
        if self.stored_size is not None:
            object.__setattr__(self, "stored_size", _image_size("stored_size", self.stored_size))
            if self.loader not in ("auto", "memory", "cache"):
                raise UserError(
                    f"stored_size with loader={self.loader!r}, which stores nothing; leave it out, "
                    "or use 'memory' or 'cache'"
                )
        check_choice("bad_files", self.bad_files, ("error", "skip"))
        check_choice("targets", self.targets, ("image", "mask"))

    def whole_batch(self, num_replicas: int) -> int:
        """Returns the images per step over all replicas."""
        if self.batch_per_replica is not None:
            return self.batch_per_replica * num_replicas
        return DEFAULT_BATCH if self.global_batch_size is None else self.global_batch_size


@documented
@dataclasses.dataclass(frozen=True)
class DataConfig(ImageConfig):
    """Where the images are, and how they become batches."""

    root: str | None = None
    """Folder of the images. It holds what `train` and `test` name; None, the default, for the
    embedded handwritten digits."""
    source: str = "folders"
    """folders, csv, tfrecord and others. "folders" (one folder of images per class), "csv" (a file
    of paths and labels), "tfrecord", "webdataset" (tar shards), "arrays" (a folder with images.npy
    and labels.npy) or "pairs" (input and target images in matching sub-folders)."""
    train: str = "training"
    """What to train on, below root. A folder, a file, or a pattern of shards."""
    test: str = "testing"
    """What to test on, below root. It measures the result."""
    train_targets: str | None = None
    """For "pairs": the targets' folder, below root."""
    test_targets: str | None = None
    """For "pairs": the same for testing."""
    image_key: str = "image/encoded"
    """For "tfrecord": the feature that holds the encoded image."""
    label_key: str = "image/class/label"
    """For "tfrecord": the feature that holds the number or the name of the class."""
    first_label: int = 0
    """For "tfrecord": the number of the first class, 1 in classic ImageNet shards."""
    image_ext: str = "jpg;jpeg;png;webp"
    """For "webdataset": extensions of the image, apart by semicolons."""
    label_ext: str = "cls"
    """For "webdataset": extensions of the label: a file of digits, or "json"."""

    def __post_init__(self):
        """Checks every field."""
        super().__post_init__()
        check_choice("source", self.source, SOURCES)
        check_int("first_label", self.first_label, at_least=0)
        for name in ("train", "test"):
            check_text(name, getattr(self, name), expected="what is below root; '.' for itself")
        for name in ("image_key", "label_key", "image_ext", "label_ext"):
            check_text(name, getattr(self, name), expected="a name, as the shards have it")
        check_only_with(self, "source", SOURCE_ARGUMENTS | {"pairs": ("targets",)})
        for name in ("train_targets", "test_targets"):
            if (getattr(self, name) is None) == (self.source == "pairs"):
                expected = "the targets' folder" if self.source == "pairs" else "None"
                raise UserError(
                    f"{name}={getattr(self, name)!r} with source={self.source!r}; expected "
                    f"{expected}"
                )


@documented
@dataclasses.dataclass(frozen=True)
class DaliConfig:
    """DALI's settings, for those who tune it. None leaves DALI's own default."""

    threads: int | None = None
    """CPU threads of each replica's loader; None for the cores divided by this machine's replicas.
    """
    prefetch_batches: int = 2  # DALI's own
    """Batches made ahead of the step."""
    hw_decoder_load: float = 0.65  # DALI's own
    """Part of the JPEGs that the GPU's hardware decoder takes, 0 to 1."""
    # Not DALI's own, 16 and 8 MiB and no size: of 1,000 ImageNet files one has 3.8 million pixels,
    # and a step takes as long as on the GPU that waits for it (four H100s, 2026-11-26).
    device_memory_padding: int | None = 32 * 2**20
    """Bytes of GPU memory that the decoder has at the start for each thread. A JPEG that needs more
    makes it take more, for which steps wait: some 6 bytes a pixel (NVIDIA's ResNet-50 has
    211,025,920 for ImageNet's up to 5980 x 6430)."""
    host_memory_padding: int | None = 32 * 2**20
    """Bytes of pinned host memory that the decoder has at the start for each thread, counted twice:
    some 4 a pixel."""
    preallocate_width_hint: int | None = 2400
    """Of the largest image that the hardware decoder has memory for at the start, in pixels."""
    preallocate_height_hint: int | None = 1632
    """Of the same image, in pixels."""
    bytes_per_sample_hint: int | None = None
    """Bytes of a decoded image, for the buffers between operators."""

    def __post_init__(self):
        """Checks every field."""
        check_int("prefetch_batches", self.prefetch_batches, at_least=1)
        check_number("hw_decoder_load", self.hw_decoder_load, at_least=0, at_most=1)
        optional = [each.name for each in dataclasses.fields(self) if each.type == int | None]
        check_optional_ints(self, *optional)


def _image_size(name: str, value) -> tuple[int, int]:
    if isinstance(value, str):  # from the command line, where the default is None
        value = [int(each) if each.strip().isdigit() else each for each in value.split(",")]
    pair = isinstance(value, Sequence) and len(value) == 2
    if not pair or not all(is_int(each, at_least=1) for each in value):
        raise UserError(f"{name}={value!r}; expected (height, width) in pixels, e.g. (28, 28)")
    return tuple(value)


def _range(name: str, value, *, at_most: float | None = None) -> tuple[float, float]:
    if not isinstance(value, Sequence) or len(value) != 2:
        raise UserError(f"{name}={value!r}; expected (least, largest), e.g. (0.5, 1.0)")
    for each in value:
        check_number(name, each, above=0, at_most=at_most)
    if value[0] > value[1]:
        raise UserError(f"{name}={value!r}; expected the least first")
    return tuple(value)


def _per_channel(name: str, value, channels: int) -> tuple[float, ...]:
    if isinstance(value, str):  # from the command line
        try:
            value = [float(each) for each in value.split(",")]
        except ValueError:
            raise UserError(f"{name}={value!r}; expected numbers, e.g. 0.485,0.456,0.406") from None
    values = tuple(value) if isinstance(value, Sequence) else (value,)
    for each in values:
        check_number(name, each)
    if len(values) not in (1, channels):
        raise UserError(f"{name}={value!r}; expected one number, or one for each of {channels}")
    return values * channels if len(values) == 1 else values
