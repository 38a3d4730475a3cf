"""The settings of data: where the images are, how to augment them and how to make batches."""

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
from tfaccel.config.class_list import class_list
from tfaccel.config.documented import documented

WINDOWS = ("stretch", "resized_center_crop", "center_crop", "random_crop", "random_resized_crop")
CROPS = ("center_crop", "random_crop")  # the windows that are not resized
MOST_CHANNELS = 65535  # what a TIFF can say (TIFF 6.0, SamplesPerPixel)
POLICIES = ("none", "randaugment", "randaugment_timm", "trivialaugment")
POLICY_FILLS = ("black", "mean")
ERASE_FILLS = ("mean", "random", "black")
DEFAULT_BATCH = 256  # Goyal et al. 2017, arXiv:1706.02677
LAST_BATCHES = ("pad", "drop", "repeat")
LOADERS = ("auto", "dali_gpu", "dali_cpu", "tf_data", "memory", "cache")
SAMPLINGS = ("uniform", "balanced", "square_root")
SOURCES = (
    *("folders", "csv", "tfrecord", "webdataset", "array_record", "tfds", "arrow", "arrays"),
    "pairs",
)
TASKS = ("auto", "classes", "multilabel", "regression")  # of labels: see data/source.py
# The data types of stored pixels, and the value that becomes 1 before mean and std are used.
PIXEL_SCALES = {"uint8": 255.0, "uint16": 65535.0, "float32": 1.0}
# The fields that only one source uses, and those that only one window uses.
SOURCE_ARGUMENTS = {
    "tfrecord": ("image_key", "label_key", "first_label"),
    "webdataset": ("image_ext", "label_ext"),
    "array_record": ("image_key", "label_key", "first_label"),
    "tfds": ("image_column", "label_column"),
    "arrow": ("image_column", "label_column"),
}
WINDOW_ARGUMENTS = {
    "resized_center_crop": ("center_fraction",),
    "random_resized_crop": ("crop_area", "crop_ratio"),
}
# The largest policy_magnitude of the policies that have one.
POLICY_MAGNITUDES = {"randaugment": 30, "randaugment_timm": 10}
# The fields that have an effect only with another field, which is a probability.
PROBABILITY_ARGUMENTS = {
    "blur_probability": ("blur_sigma",),
    "posterize_probability": ("posterize_bits",),
    "solarize_probability": ("solarize_threshold",),
    "erase_probability": ("erase_area", "erase_ratio", "erase_fill"),
}


@documented
@dataclasses.dataclass(frozen=True)
class AugmentConfig:
    """Which part of an image becomes a training example, and how it is varied.

    The variations are applied in the order of the fields. Every random number depends only on the
    seed, the epoch and the image's place in the epoch. It is therefore the same for any number of
    replicas, in every loader and after a resume. Paired images and targets share all that moves
    pixels: windows, flips, rotations and shifts, and the shears, shifts and rotations of a policy.
    What changes colours, blurs or erases is done to the image and not to its target.

    The operations from `policy` on work on whole grey levels, as Pillow's do. The image is rounded
    to them first. They are the same TensorFlow operations in every loader.
    """

    window: str = "stretch"
    """The part of an image that is resized to image_size. "stretch" takes the whole image, whatever
    its shape. "resized_center_crop" takes `center_fraction` of the largest centred window that has
    the shape of image_size (torchvision's Resize(256), CenterCrop(224)). "center_crop" and
    "random_crop" cut out image_size pixels without resizing, from the centre or a random place.
    "random_resized_crop" takes a random window (torchvision's RandomResizedCrop)."""
    center_fraction: float = 0.875
    """For "resized_center_crop": the part of both sides to keep."""
    crop_area: Sequence[float] = (0.08, 1.0)
    """For "random_resized_crop": the smallest and largest part of the image's area."""
    crop_ratio: Sequence[float] = (3 / 4, 4 / 3)
    """For "random_resized_crop": the smallest and largest width / height of the window."""
    horizontal_flip: bool = False
    """Mirror half the images left to right. The probability for each image is 1/2."""
    vertical_flip: bool = False
    """Mirror half the images top to bottom. The probability for each image is 1/2."""
    rotation_degrees: float = 0.0
    """Rotate each image about its centre by a random angle, uniform in [-rotation_degrees,
    rotation_degrees]. Pixels from outside the image are black."""
    shift_pixels: int = 0
    """Move each image along both axes by a random whole number of pixels, uniform in
    [-shift_pixels, shift_pixels]. Pixels from outside the image are black."""
    brightness: float = 0.0
    """Multiply the pixels by a random factor, uniform in [1 - brightness, 1 + brightness]."""
    contrast: float = 0.0
    """Multiply each pixel's distance from middle grey by a random factor, uniform in [1 - contrast,
    1 + contrast]."""
    saturation: float = 0.0
    """Multiply each pixel's distance from grey of the same lightness by a random factor, uniform in
    [1 - saturation, 1 + saturation]."""
    hue_degrees: float = 0.0
    """Turn all hues by a random angle, uniform in [-hue_degrees, hue_degrees]."""
    policy: str = "none"
    """none, randaugment or another. A policy draws random operations for each image. "randaugment":
    Cubuk et al. 2020, arXiv:1909.13719, with the 14 operations and ranges of torchvision 0.20's
    RandAugment. "randaugment_timm": timm 1.0's increasing RandAugment ("rand-m9-mstd0.5-inc1"), 15
    operations, each done with probability 1/2. "trivialaugment": the wide TrivialAugment of Müller
    and Hutter 2021, arXiv:2103.10158, one operation of random magnitude, with the ranges of
    torchvision 0.20. Moved images are interpolated linearly."""
    policy_operations: int = 2
    """For "randaugment" and "randaugment_timm": operations for each image, one after the other.
    Each is drawn anew, so that one may be drawn twice."""
    policy_magnitude: float = 9.0
    """For "randaugment": the strength of operations from 0 to 30. At 30, images are sheared by 0.3,
    shifted by 150/331 of a side or rotated by 30 degrees, and brightness, contrast, saturation and
    sharpness are multiplied by 0.1 or 1.9. For "randaugment_timm": from 0 to 10, and images are
    shifted by at most 0.45 of a side."""
    policy_magnitude_std: float = 0.0
    """For "randaugment_timm": the standard deviation of the magnitude. Each operation's magnitude
    is drawn from a normal distribution about policy_magnitude, and clipped to 0..10."""
    policy_fill: str = "black"
    """For a policy: black or mean. What a moved image has where no pixel comes from. "mean" is the
    grey level next to the field `mean` in each channel, as in timm. Masks have `ignore_class`."""
    blur_probability: float = 0.0
    """Probability of a Gaussian blur, for each image. Pixels at the border are repeated outside."""
    blur_sigma: Sequence[float] = (0.1, 2.0)
    """For blur_probability: the smallest and largest standard deviation of the blur, in pixels, at
    most 16. It is uniform between them (torchvision's GaussianBlur; Chen et al. 2020,
    arXiv:2002.05709)."""
    posterize_probability: float = 0.0
    """Probability of posterizing, for each image: only the highest bits of each pixel are kept."""
    posterize_bits: int = 4
    """For posterize_probability: the number of bits that are kept, 1 to 7 of 8."""
    solarize_probability: float = 0.0
    """Probability of solarizing, for each image: bright pixels, v, become 255 - v."""
    solarize_threshold: int = 128
    """For solarize_probability: the least grey level, of 0 to 255, that is inverted. 0 inverts the
    whole image."""
    erase_probability: float = 0.0
    """Probability of random erasing, for each image: a random rectangle is painted over (Zhong et
    al. 2020, arXiv:1708.04896, who use 0.5). A target or mask keeps what is there."""
    erase_area: Sequence[float] = (0.02, 1 / 3)
    """For erase_probability: the smallest and largest part of the image's area (timm 1.0's range;
    Zhong et al.: 0.02 to 0.4)."""
    erase_ratio: Sequence[float] = (0.3, 1 / 0.3)
    """For erase_probability: the smallest and largest height / width of the rectangle."""
    erase_fill: str = "mean"
    """For erase_probability: mean, random or black. "mean": the grey level next to the field `mean`
    in each channel, which is 0 after normalising. "random": a random level for each pixel and
    channel, uniform in 0..255. "black": 0."""

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
        self._check_policy()
        self._check_probabilities()

    def __repr__(self):
        """Returns all fields up to hue_degrees, and those after it that are not at their defaults.

        Checkpoints hold this text. Without the later fields, those of earlier versions can still be
        resumed.
        """
        fields = dataclasses.fields(self)
        first = [each.name for each in fields].index("policy")
        shown = [
            f"{each.name}={getattr(self, each.name)!r}"
            for index, each in enumerate(fields)
            if index < first or getattr(self, each.name) != each.default
        ]
        return f"{type(self).__name__}({', '.join(shown)})"

    def _check_policy(self) -> None:
        check_choice("policy", self.policy, POLICIES)
        check_int("policy_operations", self.policy_operations, at_least=1, at_most=16)
        check_number("policy_magnitude_std", self.policy_magnitude_std, at_least=0)
        check_only_with(self, "policy", {"randaugment_timm": ("policy_magnitude_std",)})
        most = POLICY_MAGNITUDES.get(self.policy)
        check_number("policy_magnitude", self.policy_magnitude, at_least=0, at_most=most)
        check_choice("policy_fill", self.policy_fill, POLICY_FILLS)
        if self.policy == "none" and self.policy_fill != AugmentConfig.policy_fill:
            raise UserError(
                f"policy_fill={self.policy_fill!r} has no effect with policy='none'; set a policy, "
                "or remove it"
            )
        for name in ("policy_operations", "policy_magnitude") if most is None else ():
            if getattr(self, name) != getattr(AugmentConfig, name):
                raise UserError(
                    f"{name}={getattr(self, name)!r} has no effect with policy={self.policy!r}; "
                    f"remove it, or use policy='randaugment' or 'randaugment_timm'"
                )

    def _check_probabilities(self) -> None:
        for name in PROBABILITY_ARGUMENTS:
            check_number(name, getattr(self, name), at_least=0, at_most=1)
        object.__setattr__(self, "blur_sigma", _range("blur_sigma", self.blur_sigma, at_most=16))
        check_int("posterize_bits", self.posterize_bits, at_least=1, at_most=7)
        check_int("solarize_threshold", self.solarize_threshold, at_least=0, at_most=255)
        object.__setattr__(self, "erase_area", _range("erase_area", self.erase_area, at_most=1))
        object.__setattr__(self, "erase_ratio", _range("erase_ratio", self.erase_ratio))
        check_choice("erase_fill", self.erase_fill, ERASE_FILLS)
        for probability, names in PROBABILITY_ARGUMENTS.items():
            for name in names if getattr(self, probability) == 0 else ():
                if getattr(self, name) != getattr(AugmentConfig, name):
                    raise UserError(
                        f"{name}={getattr(self, name)!r} has no effect with {probability}=0; set "
                        f"{probability}, or remove {name}"
                    )

    @property
    def after_window(self) -> "AugmentConfig":
        """The same augmentation of images that are windows already."""
        names = ("window", *(name for each in WINDOW_ARGUMENTS.values() for name in each))
        return dataclasses.replace(self, **{name: getattr(AugmentConfig, name) for name in names})

    @property
    def has_level_operations(self) -> bool:
        """True if there is a policy, a blur or another operation on whole grey levels."""
        return self.policy != "none" or any(getattr(self, each) for each in PROBABILITY_ARGUMENTS)

    @property
    def has_random_window(self) -> bool:
        """True if each image gets a new random window in every epoch."""
        return self.window.startswith("random")


@documented
@dataclasses.dataclass(frozen=True)
class ImageConfig:
    """How images become batches."""

    image_size: Sequence[int] = (224, 224)
    """Height,width in pixels. All images of a batch have this size."""
    channels: int = 3
    """3 for RGB, 1 for grey. Any other number, such as 5, is for PNG, TIFF and .npy files that have
    exactly so many channels."""
    pixel_dtype: str = "uint8"
    """Data type of stored pixels: uint8, uint16 or float32. The last two are for PNG, TIFF and
    .npy files, which must all have this type. Pixels of 8 bits are divided by 255 and those of 16
    bits by 65535, before mean and std are used. float32 pixels are taken as they are."""
    mean: float | Sequence[float] | None = None
    """Number to subtract from pixels in 0..1: one for each channel, or one for all channels. None
    is 0. If std is None too, an experiment with `model.weights` takes the mean and std of the
    pixels that the weights were trained on, if they are known."""
    std: float | Sequence[float] | None = None
    """Number to divide pixels by after mean is subtracted: one for each channel, or one for all.
    Mean and std of 0.5 give pixels in -1..1. None is 1; see mean."""
    global_batch_size: int | None = None
    """Images per step over all GPUs. None uses batch_per_replica on each replica, or 256 in total
    if that is None too."""
    batch_per_replica: int | None = None
    """Images per step on each replica. None divides global_batch_size among the replicas."""
    last_batch: str = "pad"
    """What to do with an epoch's last batch if it is short. "pad" fills it up with other images of
    sample weight 0, so that every image counts once. "drop" removes it. "repeat" fills it up with
    the epoch's first images, which count again."""
    loader: str = "auto"
    """How to decode images; auto chooses. "auto" writes its choice and the reason to the log.
    "dali_gpu": DALI decodes and augments on the replica's GPU. "dali_cpu": DALI does so on the CPU.
    "tf_data": TensorFlow does so on the CPU. "memory": images are decoded once, kept in the
    device's memory and augmented there. "cache": images are decoded once into a memory-mapped file
    and augmented on the device. If "auto" chooses "memory" and decoding takes seconds, it also
    keeps the decoded images on disk for later starts."""
    stored_size: Sequence[int] | None = None
    """For "memory" and "cache": the (height, width) to which images are resized before they are
    stored. None stores them at their own size if all files have one size, else at image_size."""
    bad_files: str = "error"
    """If a file is bad: error or skip. "error" stops with a message that names the first bad file.
    "skip" checks all files first (as `tfaccel audit` does) and trains without the bad ones: files
    that cannot be decoded, pairs of different sizes, and images smaller than the crop. (A file name
    without an image extension is an error in both cases.)"""
    targets: str = "image"
    """What the targets of paired images are. "image" targets are interpolated and normalised like
    the inputs. "mask" targets take the nearest pixel and keep their values."""
    ignore_class: int | None = None
    """For masks: the value of pixels without a class, e.g. 255. Pascal VOC and Cityscapes have such
    pixels. Loss and metrics leave them out. Pixels from outside a rotated or shifted image get this
    value, too. None means that each value is a class."""

    def __post_init__(self):
        """Checks every field and stores it in its one normal form."""
        object.__setattr__(self, "image_size", _image_size("image_size", self.image_size))
        check_int("channels", self.channels, at_least=1, at_most=MOST_CHANNELS)
        check_choice("pixel_dtype", self.pixel_dtype, tuple(PIXEL_SCALES))
        for name, default in (("mean", 0.0), ("std", 1.0)):
            value = default if getattr(self, name) is None else getattr(self, name)
            object.__setattr__(self, name, _per_channel(name, value, self.channels))
        if max(self.mean) > 1 and self.pixel_dtype != "float32":
            raise UserError(
                f"mean={self.mean!r}; expected numbers of at most 1, because pixels are in 0..1; "
                f"divide mean and std by {self.pixel_scale:.0f}"
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
                    f"stored_size with loader={self.loader!r}, which stores no images; remove "
                    "stored_size, or use loader 'memory' or 'cache'"
                )
        check_choice("bad_files", self.bad_files, ("error", "skip"))
        check_choice("targets", self.targets, ("image", "mask"))
        check_only_with(self, "targets", {"mask": ("ignore_class",)})
        if self.ignore_class is not None:
            check_int("ignore_class", self.ignore_class, at_least=0, at_most=255)

    @property
    def pixel_scale(self) -> float:
        """The number that stored pixels are divided by, before mean and std are used."""
        return PIXEL_SCALES[self.pixel_dtype]

    @property
    def are_usual(self) -> bool:
        """True for 8 bits and 1 or 3 channels, which every decoder of images gives."""
        return self.pixel_dtype == "uint8" and self.channels in (1, 3)

    def whole_batch(self, num_replicas: int) -> int:
        """Returns the images per step over all replicas."""
        if self.batch_per_replica is not None:
            return self.batch_per_replica * num_replicas
        return DEFAULT_BATCH if self.global_batch_size is None else self.global_batch_size


@documented
@dataclasses.dataclass(frozen=True)
class DataConfig(ImageConfig):
    """The settings of ImageConfig, and where the images are."""

    root: str | None = None
    """Folder of the images. The fields train and test are paths in it. None, the default, uses the
    handwritten digits that tfaccel contains. It may be a URL, such as s3://bucket/photos, for
    folders, csv, tfrecord and webdataset."""
    source: str = "folders"
    """Data format: folders, csv or others. "folders": one folder of images per class. "csv": a file
    of paths and labels, or lines of JSON. "tfrecord": TFRecord shards. "webdataset": tar shards.
    "array_record": ArrayRecord files. "tfds": a dataset as TensorFlow Datasets has written it.
    "arrow": Arrow or Parquet files, or a folder that Hugging Face's datasets saved.
    "arrays": a folder with images.npy and labels.npy. "pairs": input and target images in matching
    sub-folders."""
    train: str = "training"
    """Training images: a path below root. It is a folder, a file or a pattern of shards."""
    test: str = "testing"
    """Test images: a path below root. It is a folder, a file or a pattern of shards."""
    store_cache_gib: float = 50.0
    """With a URL as root: the most that fetched files may take on this host, in GiB. The files of
    all stores share it, and lie in tfaccel/stores in XDG_CACHE_HOME or ~/.cache."""
    validation_split: float | None = None
    """Part of the training images to test on, e.g. 0.2. `test` is then not used. The part has the
    same share of each class. It depends on `split_seed` and on the paths below the deepest folder
    that holds all images, so it is the same in each run and on each machine. None tests on
    `test`."""
    num_folds: int | None = None
    """Number of folds of the training images, e.g. 5. `fold` is tested on, and the others are
    trained on, so that five runs test on each image once. `test` is then not used."""
    fold: int = 0
    """The fold to test on, from 0 on."""
    split_seed: int = 0
    """Another number makes another validation part, or other folds."""
    classes: str | Sequence[str] | None = None
    """Names of the classes to use, in the order of their numbers, e.g. dog,cat; or a .txt file with
    one name on each line, which is read at the start. Images of other classes are left out of
    training and test. None uses all classes, in the order of their names. For masks, the names of
    their values 0, 1, 2 and so on, which reports show."""
    sampling: str = "uniform"
    """How often training images come: uniform, balanced or square_root. "uniform": each image once
    an epoch. "balanced": an epoch has equally many images of each class. "square_root": in
    proportion to the square root of the number of images (Mahajan et al. 2018, arXiv:1805.00932).
    The number of steps stays. An image of a class comes again only after all others of its class
    have come, and the next epoch goes on from there. Test images are not sampled."""
    images: str = ""
    """For "csv": the folder below root in which the paths of the lists start. "" is the folder of
    each list."""
    path_column: str | None = None
    """For "csv": the column that has the paths. None: path, filename, image, file or similar."""
    label_column: str | None = None
    """For "csv", "arrow" and "tfds": the column that has the labels. None: label, class or
    similar."""
    image_column: str | None = None
    """For "arrow" and "tfds": the column that has the encoded images. None: the only one."""
    label_columns: Sequence[str] | None = None
    """For "csv": several columns, e.g. x,y. They have 0 and 1 for each class, or numbers. "*" in a
    name stands for any letters, and "*" alone for all columns but the path and the group. "-"
    before a name leaves a column out, e.g. *,-date. None: one column."""
    label_separator: str | None = None
    """For "csv" with several classes in one column: what is between two names, e.g. ";". "json" is
    a list, as JSON or as Python writes it. None finds out."""
    task: str = "auto"
    """Task: auto, classes, multilabel or regression. What the labels of an image are: "classes" is
    one class, "multilabel" any number of classes, and "regression" numbers. "auto" decides by the
    labels of "csv" and writes the reason to the log. With "multilabel", several lines of "csv" may
    name classes of one image. Other sources have classes, and "tfrecord", "webdataset",
    "array_record" and "arrow" have lists of labels if you set another task."""
    group_column: str | None = None
    """For "csv" with validation_split or num_folds: a column, e.g. patient. Images with an equal
    value stay together, in training or in validation."""
    group_pattern: str | None = None
    """With validation_split or num_folds: what finds an image's group in its path. It is a regular
    expression for the path below the deepest folder of all images. The first parenthesis is the
    group, or all that is found. "^[^/]+/([^_]+)_" finds p7 in cat/p7_0001.jpg. Images of one group
    stay together. None uses group_column, or no groups."""
    train_targets: str | None = None
    """For "pairs": the folder of the training targets, below root."""
    test_targets: str | None = None
    """For "pairs": the folder of the test targets, below root."""
    image_key: str = "image/encoded"
    """For "tfrecord" and "array_record": the feature that holds the encoded image."""
    label_key: str = "image/class/label"
    """For "tfrecord" and "array_record": the feature that holds the number or the name of the
    class."""
    first_label: int = 0
    """For "tfrecord" and "array_record": the number of the first class, 1 in classic ImageNet
    shards."""
    image_ext: str = "jpg;jpeg;png;webp"
    """For "webdataset": the extensions of images, separated by semicolons."""
    label_ext: str = "cls"
    """For "webdataset": the extension of labels; a label file has digits, or is "json"."""

    def __post_init__(self):
        """Checks every field."""
        super().__post_init__()
        check_choice("source", self.source, SOURCES)
        check_choice("task", self.task, TASKS)
        names = _column_names("label_columns", self.label_columns)
        object.__setattr__(self, "label_columns", names)
        check_int("first_label", self.first_label, at_least=0)
        check_number("store_cache_gib", self.store_cache_gib, above=0)
        for name in ("train", "test"):
            check_text(name, getattr(self, name), expected="a path below root, or '.' for root")
        for name in ("image_key", "label_key", "image_ext", "label_ext"):
            check_text(name, getattr(self, name), expected="a name that the shards use")
        of_lists = ("images", "path_column", "label_column", "group_column")
        of_lists += ("label_columns", "label_separator")
        if self.group_column is not None and self.source != "csv":
            raise UserError(
                f"group_column={self.group_column!r} is a column of a list, but source="
                f"{self.source!r} has none; find the groups in the paths of the images: remove "
                "group_column, and set data.group_pattern, for example to 'patient[0-9]+'"
            )
        own = SOURCE_ARGUMENTS | {"pairs": ("targets",), "csv": of_lists}
        check_only_with(self, "source", own)
        self._check_task()
        self._check_split()
        self._check_classes()
        for name in ("train_targets", "test_targets"):
            if (getattr(self, name) is None) == (self.source == "pairs"):
                expected = "the targets' folder" if self.source == "pairs" else "None"
                raise UserError(
                    f"{name}={getattr(self, name)!r} with source={self.source!r}; expected "
                    f"{expected}"
                )

    def _check_classes(self) -> None:
        check_choice("sampling", self.sampling, SAMPLINGS)
        if self.classes is not None:
            object.__setattr__(self, "classes", class_list(self.classes))
        others = {"multilabel": "several classes each", "regression": "numbers for labels"}
        have = "target images" if self.source == "pairs" else others.get(self.task)
        masks = self.source == "pairs" and self.targets == "mask"  # `classes` names their values
        for name in () if not have else ("sampling",) if masks else ("classes", "sampling"):
            if getattr(self, name) != getattr(DataConfig, name):
                raise UserError(
                    f"{name}={getattr(self, name)!r} needs images with one class each, but with "
                    f"source={self.source!r} and task={self.task!r} they have {have}; remove {name}"
                )

    @property
    def splits(self) -> bool:
        """True if the test images are a part of the training images."""
        return self.validation_split is not None or self.num_folds is not None

    def _check_task(self) -> None:
        several = self.task in ("multilabel", "regression")
        lists = ("csv", "tfrecord", "webdataset", "array_record", "arrow")
        if several and self.source not in lists:
            raise UserError(
                f"task={self.task!r} with source={self.source!r}; expected source='csv', a list of "
                f"the images and their labels, or {', '.join(map(repr, lists[1:]))}"
            )
        if self.label_column is not None and self.label_columns is not None:
            raise UserError("label_column and label_columns are both set; give one of them")
        if self.label_separator is not None:
            check_text("label_separator", self.label_separator, expected="a text, e.g. ';'")
            if self.label_columns is not None or self.task not in ("auto", "multilabel"):
                raise UserError(
                    f"label_separator={self.label_separator!r} is for several classes in one "
                    "column; remove it, or remove label_columns and task"
                )

    def _check_split(self) -> None:
        if self.validation_split is not None:
            check_number("validation_split", self.validation_split, above=0, below=1)
        if self.num_folds is not None:
            check_int("num_folds", self.num_folds, at_least=2)
            check_int("fold", self.fold, at_least=0, at_most=self.num_folds - 1)
        if self.validation_split is not None and self.num_folds is not None:
            raise UserError(
                f"validation_split={self.validation_split} and num_folds={self.num_folds}; give "
                "one of them"
            )
        check_int("split_seed", self.split_seed, at_least=0)
        unused = () if self.splits else ("split_seed", "group_column", "group_pattern")
        unused += () if self.num_folds is not None else ("fold",)
        for name in unused:
            if getattr(self, name) != getattr(DataConfig, name):
                needed = "num_folds" if name == "fold" else "validation_split or num_folds"
                raise UserError(
                    f"{name}={getattr(self, name)!r} has no effect without {needed}; set one, or "
                    f"remove {name}"
                )
        for name in ("path_column", "label_column", "group_column", "group_pattern"):
            if getattr(self, name) is not None:
                check_text(name, getattr(self, name), expected="a text, or None")
        if self.group_column is not None and self.group_pattern is not None:
            raise UserError("group_column and group_pattern are both set; give one of them")


@documented
@dataclasses.dataclass(frozen=True)
class DaliConfig:
    """Settings for tuning DALI. None means DALI's own default."""

    threads: int | None = None
    """CPU threads of each replica's loader. None divides the cores by the replicas of this
    machine."""
    prefetch_batches: int = 2  # DALI's default
    """Batches that DALI prepares ahead of the step."""
    hw_decoder_load: float = 0.65  # DALI's default
    """Part of the JPEGs that the GPU's hardware decoder decodes, from 0 to 1."""
    # DALI's defaults are 16 MiB, 8 MiB and no size. They are too small: 1 of 1,000 ImageNet files
    # has 3.8 million pixels, and every GPU waits for the slowest one (four H100s, 2026-11-26).
    device_memory_padding: int | None = 32 * 2**20
    """Bytes of GPU memory that the decoder allocates at the start, per thread. It needs about 6
    bytes per pixel, and steps wait when a larger JPEG makes it allocate more. (NVIDIA's ResNet-50
    uses 211,025,920 for ImageNet's images of up to 5980 x 6430.)"""
    host_memory_padding: int | None = 32 * 2**20
    """Bytes of pinned host memory that the decoder allocates at the start, per thread. It allocates
    this twice, and needs about 4 bytes per pixel."""
    preallocate_width_hint: int | None = 2400
    """Width in pixels of the largest image for which the hardware decoder allocates at the
    start."""
    preallocate_height_hint: int | None = 1632
    """Height in pixels of the largest image for which the hardware decoder allocates at the
    start."""
    bytes_per_sample_hint: int | None = None
    """Bytes of a decoded image, for the buffers between DALI's operators."""

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


def _column_names(name: str, value) -> tuple[str, ...] | None:
    if value is None:
        return None
    names = [each.strip() for each in value.split(",")] if isinstance(value, str) else value
    is_list = isinstance(names, Sequence) and len(names) > 0
    if not is_list or not all(each and isinstance(each, str) for each in names):
        raise UserError(f"{name}={value!r}; expected names of columns, e.g. even,loop")
    return tuple(names)


def _range(name: str, value, *, at_most: float | None = None) -> tuple[float, float]:
    if not isinstance(value, Sequence) or len(value) != 2:
        raise UserError(f"{name}={value!r}; expected (smallest, largest), e.g. (0.5, 1.0)")
    for each in value:
        check_number(name, each, above=0, at_most=at_most)
    if value[0] > value[1]:
        raise UserError(f"{name}={value!r}; expected the smaller number first")
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
        raise UserError(f"{name}={value!r}; expected 1 number, or {channels}: one per channel")
    return values * channels if len(values) == 1 else values
