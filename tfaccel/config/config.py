"""An experiment as plain values: what a config file may say, and every check of what it says.

Takes the `ml_collections.ConfigDict` that a file in `configs/` returns, after the command line
changed it; gives a frozen `Config`. Needs no TensorFlow, so a mistake is answered at once.

    config = default_config()          # in a config file: every field, at its default
    config.data.root = "/data/mnist_png"
    config = parse(config)             # in main.py: checked, frozen
"""

import dataclasses
import math
import types
from collections.abc import Sequence

import ml_collections
from ml_collections import config_dict

from tfaccel.common import meant
from tfaccel.common.checks import (
    check_batch,
    check_choice,
    check_flag,
    check_int,
    check_number,
    check_only_with,
    check_text,
    is_int,
)
from tfaccel.common.errors import UserError

# Apex's levels, which people know by name, as Keras dtype policies. O1 (patch each op) and O2
# (half model, float32 batch norm and master weights) are one policy in Keras: variables float32,
# computation float16, per layer.
OPT_LEVELS = {"O0": "float32", "O1": "mixed_float16", "O2": "mixed_float16", "O3": "float16"}
PRECISIONS = ("float32", "mixed_float16", "mixed_bfloat16", "float16")
WINDOWS = ("stretch", "resized_center_crop", "center_crop", "random_crop", "random_resized_crop")
CROPS = ("center_crop", "random_crop")  # of these, what is not resized
DEFAULT_BATCH = 256  # of Goyal et al. 2017, arXiv:1706.02677
LAST_BATCHES = ("pad", "drop", "repeat")
LOADERS = ("auto", "dali_gpu", "dali_cpu", "tf_data", "memory", "cache")
DECAYS = ("constant", "step", "cosine", "linear")
SOURCES = ("folders", "csv", "tfrecord", "webdataset", "arrays", "pairs")
PIXEL_DTYPES = ("float32", "uint8")
COMPUTES_IN = ("policy", "float32")
WEIGHTS = ("trained", "average")
WEIGHTS_ORDERS = ("rgb", "bgr")
CHECKPOINTS = ("newest", "best")
# What a config says to one source alone, and to one window.
SOURCE_ARGUMENTS = {
    "tfrecord": ("image_key", "label_key", "first_label"),
    "webdataset": ("image_ext", "label_ext"),
}
WINDOW_ARGUMENTS = {
    "resized_center_crop": ("center_fraction",),
    "random_resized_crop": ("crop_area", "crop_ratio"),
}


@dataclasses.dataclass(frozen=True)
class RuntimeConfig:
    """How the process uses the machine.

    Attributes:
      gpu_ids: indices among the GPUs that CUDA_VISIBLE_DEVICES leaves, one replica on each; empty
        for the CPU; None, the default, for all of them, or the CPU where there is none.
      precision: a Keras dtype policy ("float32", "mixed_float16", "mixed_bfloat16", "float16") or
        an Apex level ("O0" to "O3").
      memory: "growth" to take GPU memory as it is needed, or a limit per GPU in MiB.
      tf32: whether float32 matrix products and convolutions may use TensorFloat-32 (10 bits of
        mantissa) on GPUs that have it.
      xla: whether the training, test and predict steps are compiled with XLA; None, the default,
        for on with GPUs and off on the CPU, where it makes most steps slower.
      compile_cache: whether what XLA compiles for a GPU is kept for the next process, in
        tfaccel/xla of the cache folder (XDG_CACHE_HOME, or ~/.cache), at most 4 GiB.
      seed: the one seed; weights, dropout, data order and augmentation all derive from it.
      deterministic: whether two runs alike give the same bits, by TensorFlow's deterministic
        kernels, which may be slower.
      peer_timeout_s: with several workers, how long one may be silent (dead, frozen or cut off;
        being busy is not silence) until the others stop with an error that names it.
      allow_public_network: whether workers may have public addresses. TensorFlow's ports have no
        password, and who reaches one can run code there: say so only where a firewall closes them.
    """

    gpu_ids: Sequence[int] | None = None
    precision: str = "float32"
    memory: str | int = "growth"
    tf32: bool = True
    xla: bool | None = None
    compile_cache: bool = True
    seed: int = 0
    deterministic: bool = False
    peer_timeout_s: int = 60
    allow_public_network: bool = False

    def __post_init__(self):
        """Checks every field and stores it in its one normal form."""
        object.__setattr__(self, "gpu_ids", _gpu_ids(self.gpu_ids))
        object.__setattr__(self, "precision", _precision(self.precision))
        object.__setattr__(self, "memory", _memory(self.memory))
        check_flag("tf32", self.tf32)
        object.__setattr__(self, "xla", _xla(self.xla))
        check_flag("compile_cache", self.compile_cache)
        check_int("seed", self.seed, at_least=0, at_most=2**32 - 1)  # what NumPy takes
        check_flag("deterministic", self.deterministic)
        check_int("peer_timeout_s", self.peer_timeout_s, at_least=1)
        check_flag("allow_public_network", self.allow_public_network)


@dataclasses.dataclass(frozen=True)
class AugmentConfig:
    """Which part of an image becomes a training example, and how it is varied, in this order.

    Every random number is a function of the seed, the epoch and the image's place in it: the same
    on any number of replicas, in every loader, and after a resume. Targets of paired images share
    all of them but colour.

    Attributes:
      window: which part of an image is resized to image_size. "stretch": all of it, whatever its
        shape; "resized_center_crop": `center_fraction` of the largest centred window of
        image_size's shape (torchvision's Resize(256), CenterCrop(224)); "center_crop" and
        "random_crop": image_size pixels as they are, centred or anywhere; "random_resized_crop": a
        random window (torchvision's RandomResizedCrop).
      center_fraction: for "resized_center_crop", of both sides.
      crop_area: for "random_resized_crop": least and largest part of the image's area.
      crop_ratio: for "random_resized_crop": least and largest width / height of the window.
      horizontal_flip: whether an image is mirrored left to right, with probability 1/2.
      vertical_flip: whether an image is mirrored top to bottom, with probability 1/2.
      rotation_degrees: an image turns about its centre by a uniform angle in [-this, this]; what
        comes from outside is black.
      shift_pixels: an image moves by a uniform whole number of pixels in [-this, this], along both
        axes; what comes from outside is black.
      brightness: pixels are multiplied by a uniform factor in [1 - this, 1 + this].
      contrast: their distance from middle grey is, likewise.
      saturation: their distance from grey of the same lightness is, likewise.
      hue_degrees: hues turn by a uniform angle in [-this, this].
    """

    window: str = "stretch"
    center_fraction: float = 0.875
    crop_area: Sequence[float] = (0.08, 1.0)
    crop_ratio: Sequence[float] = (3 / 4, 4 / 3)
    horizontal_flip: bool = False
    vertical_flip: bool = False
    rotation_degrees: float = 0.0
    shift_pixels: int = 0
    brightness: float = 0.0
    contrast: float = 0.0
    saturation: float = 0.0
    hue_degrees: float = 0.0

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


@dataclasses.dataclass(frozen=True)
class ImageConfig:
    """How images become batches.

    Attributes:
      image_size: (height, width) of the batches, in pixels.
      channels: 1 for grey, 3 for RGB.
      mean: of each channel (or one number for all), of pixels in 0..1; it is subtracted.
      std: likewise; the difference is divided by it. Mean and std of 0.5 give pixels in -1..1.
      global_batch_size: images per step over all replicas; None for batch_per_replica on each, or
        256 where neither is given.
      batch_per_replica: images per step on each replica; None for global_batch_size over all.
      last_batch: of an epoch that the batch size does not divide. "pad": filled up with other
        images, whose sample weight is 0, so that every image counts once; "drop": left out;
        "repeat": filled up with the epoch's first images, which count again.
      loader: "dali_gpu" (DALI decodes and augments on the replica's GPU), "dali_cpu" (on the CPU),
        "tf_data" (TensorFlow, on the CPU), "memory" (decoded once, kept in the device's memory,
        augmented there), "cache" (decoded once into a file that is mapped, augmented on the
        device), or "auto", which chooses and logs why; what it decodes into memory, and takes
        seconds to decode, it keeps on disk for later starts.
      stored_size: for "memory" and "cache": (height, width) that images are resized to before they
        are stored; None for image_size, or as they are where all files have one size.
      bad_files: "error" for a sentence that names a file that cannot be used; "skip" to look
        through all files first (as `tfaccel audit` does) and to train without the bad ones: those
        that cannot be decoded, pairs of two sizes, and images smaller than the crop. (A file whose
        name is no image's is an error either way.)
      targets: of paired images: "image" (interpolated and normalised like the inputs) or "mask"
        (nearest pixel, values as they are).
    """

    image_size: Sequence[int] = (224, 224)
    channels: int = 3
    mean: float | Sequence[float] = 0.0
    std: float | Sequence[float] = 1.0
    global_batch_size: int | None = None
    batch_per_replica: int | None = None
    last_batch: str = "pad"
    loader: str = "auto"
    stored_size: Sequence[int] | None = None
    bad_files: str = "error"
    targets: str = "image"

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


@dataclasses.dataclass(frozen=True)
class DataConfig(ImageConfig):
    """Where the images are, and how they become batches.

    Attributes:
      root: a folder that holds what `train` and `test` name; None, the default, for the embedded
        handwritten digits.
      source: "folders" (one folder of images per class), "csv" (a file of paths and labels),
        "tfrecord", "webdataset" (tar shards), "arrays" (a folder with images.npy and labels.npy) or
        "pairs" (input and target images in matching sub-folders).
      train: what to train on, below root: a folder, a file, or a pattern of shards.
      test: what measures the result, below root.
      train_targets: for "pairs": the targets' folder, below root.
      test_targets: likewise.
      image_key: for "tfrecord": the feature that holds the encoded image.
      label_key: for "tfrecord": the feature that holds the number or the name of the class.
      first_label: for "tfrecord": the number of the first class, 1 in classic ImageNet shards.
      image_ext: for "webdataset": extensions of the image, apart by semicolons.
      label_ext: for "webdataset": extensions of the label: a file of digits, or "json".
    """

    root: str | None = None
    source: str = "folders"
    train: str = "training"
    test: str = "testing"
    train_targets: str | None = None
    test_targets: str | None = None
    image_key: str = "image/encoded"
    label_key: str = "image/class/label"
    first_label: int = 0
    image_ext: str = "jpg;jpeg;png;webp"
    label_ext: str = "cls"

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


@dataclasses.dataclass(frozen=True)
class DaliConfig:
    """DALI's settings, for those who tune it. None leaves DALI's own default.

    Attributes:
      threads: CPU threads of each replica's loader; None for the cores divided by this machine's
        replicas.
      prefetch_batches: batches made ahead of the step.
      hw_decoder_load: part of the JPEGs that the GPU's hardware decoder takes, 0 to 1.
      device_memory_padding: bytes of GPU memory that the decoder has at the start for each thread.
        A JPEG that needs more makes it take more, for which steps wait: some 6 bytes a pixel
        (NVIDIA's ResNet-50 has 211,025,920 for ImageNet's up to 5980 x 6430).
      host_memory_padding: twice so many bytes of pinned host memory, likewise: some 4 a pixel.
      preallocate_width_hint: of the largest image that the hardware decoder has memory for at the
        start, in pixels.
      preallocate_height_hint: of the same image, in pixels.
      bytes_per_sample_hint: bytes of a decoded image, for the buffers between operators.
    """

    threads: int | None = None
    prefetch_batches: int = 2  # DALI's own
    hw_decoder_load: float = 0.65  # DALI's own
    # Not DALI's own, 16 and 8 MiB and no size: of 1,000 ImageNet files one has 3.8 million pixels,
    # and a step takes as long as on the GPU that waits for it (four H100s, 2026-11-26).
    device_memory_padding: int | None = 32 * 2**20
    host_memory_padding: int | None = 32 * 2**20
    preallocate_width_hint: int | None = 2400
    preallocate_height_hint: int | None = 1632
    bytes_per_sample_hint: int | None = None

    def __post_init__(self):
        """Checks every field."""
        check_int("prefetch_batches", self.prefetch_batches, at_least=1)
        check_number("hw_decoder_load", self.hw_decoder_load, at_least=0, at_most=1)
        optional = [each.name for each in dataclasses.fields(self) if each.type == int | None]
        _check_optional_ints(self, *optional)


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """Which architecture.

    Attributes:
      name: "mnist_cnn", "cifar_resnet", "restoration_cnn", or any architecture of
        `keras.applications`, in any case ("resnet50").
      num_outputs: classes or channels that the model gives; None for the number of classes, or the
        channels of the targets. Masks need it: how many values they have.
      weights: a file on this machine with weights to begin from: ".keras", ".weights.h5" or
        ".weights.json" (of several pieces), or ".h5" as keras.applications has them. Names and
        shapes decide what is taken; of layers that differ, as of another number of classes, it is
        said that they begin at random. None for random ones.
      weights_order: of the colours that these weights were trained on, "rgb" or "bgr". Of "bgr", as
        Keras's own files for ResNet50 and VGG16 are, the first convolution is turned round, so that
        the model takes red, green, blue and answers alike.
      float32_layers: names of layers that compute in float32 whatever the precision, as for one in
        which float16 overflows; "*" stands for any letters. None for none.
    """

    name: str = "mnist_cnn"
    num_outputs: int | None = None
    weights: str | None = None
    weights_order: str = "rgb"
    float32_layers: Sequence[str] | None = None

    def __post_init__(self):
        """Checks every field."""
        check_text("name", self.name, expected="an architecture's name, e.g. 'resnet50'")
        _check_optional_ints(self, "num_outputs")
        if self.weights is not None:
            check_text("weights", self.weights, expected="a file's path, or None")
        check_choice("weights_order", self.weights_order, WEIGHTS_ORDERS)
        if self.weights is None and self.weights_order != "rgb":
            raise UserError(
                f"weights_order={self.weights_order!r} without weights; give them or leave it out"
            )
        object.__setattr__(self, "float32_layers", _layer_names(self.float32_layers))


@dataclasses.dataclass(frozen=True)
class TrainConfig:
    """The recipe.

    Attributes:
      epochs: passes over the training images.
      optimizer: a Keras optimizer by name, in any case ("adamw", "sgd", "lamb").
      learning_rate: the largest, which warm-up leads to and decay leads away from.
      base_batch_size: the global batch that learning_rate is of: it is multiplied by
        global_batch_size / this (256 in Goyal et al. 2017, arXiv:1706.02677); None to take it as it
        is.
      warmup_epochs: in which the rate rises linearly, step by step, from the first step's to
        learning_rate.
      decay: of the rate after warm-up: "constant", "step" (times decay_factor at each of
        decay_epochs), "cosine" or "linear" (step by step, down to 0 after the last).
      decay_epochs: for "step": after how many epochs, warm-up included.
      decay_factor: for "step".
      momentum: of optimizers that have one, as "sgd" and "rmsprop"; None for Keras's default.
      nesterov: whether "sgd" looks ahead.
      weight_decay: part of each weight that a step of learning rate 1 takes away, as Keras defines
        it, apart from the gradient: PyTorch's SGD adds it to the gradient instead, so that its 1e-4
        with momentum 0.9 is 1e-3 here. None for the optimizer's default. Never of biases or of
        batch norm's scale and offset.
      global_clipnorm: what the norm of all gradients together is cut to, e.g. 1.0, after they were
        summed over replicas and the loss scale was taken out; None not to cut.
      ema_momentum: of the exponential moving average of the weights, e.g. 0.999, which is then
        measured after each epoch and exported; None for the weights themselves.
      monitor: by which checkpoints are best and training stops early: a metric as the logs call it;
        losses should fall, all others rise.
      steps_per_execution: steps between two looks at what they came to: callbacks, logs, signals,
        checkpoints come once for so many, and the GPU does not wait for them in between. On the
        GPUs of one process, with XLA, they are one launch if the images are in GPU memory
        (loader="memory") and not resized, or if DALI decodes them on the GPU (loader="dali_gpu"),
        where the batches wait for one another. If all would take more than 6% of the GPU's memory,
        they are several launches of one length, or one by one if nothing else divides them. Let
        it divide the steps of an epoch, or the step is compiled once more for what is left over.
        The first execution, which compiles, counts in no images_per_second. None for about 10 on
        GPUs, 1 on the CPU.
      early_stopping_epochs: training ends after so many epochs without a better monitor, and the
        best epoch's weights are exported (with ema_momentum, the last average); None to train all
        epochs.
    """

    epochs: int = 1
    optimizer: str = "adamw"
    learning_rate: float = 1e-3
    base_batch_size: int | None = None
    warmup_epochs: float = 0.0
    decay: str = "constant"
    decay_epochs: Sequence[float] = (30, 60, 80)  # He et al. 2016 and Goyal et al. 2017
    decay_factor: float = 0.1
    momentum: float | None = None
    nesterov: bool = False
    weight_decay: float | None = None
    global_clipnorm: float | None = None
    ema_momentum: float | None = None
    monitor: str = "val_loss"
    steps_per_execution: int | None = None
    early_stopping_epochs: int | None = None

    def __post_init__(self):
        """Checks every field."""
        check_int("epochs", self.epochs, at_least=1)
        check_text("optimizer", self.optimizer, expected="an optimizer's name, e.g. 'adamw'")
        check_number("learning_rate", self.learning_rate, above=0)
        check_number("warmup_epochs", self.warmup_epochs, at_least=0, at_most=self.epochs)
        check_choice("decay", self.decay, DECAYS)
        object.__setattr__(self, "decay_epochs", _rising("decay_epochs", self.decay_epochs))
        check_number("decay_factor", self.decay_factor, above=0, at_most=1)
        for name, most in (("momentum", 1), ("weight_decay", None), ("ema_momentum", 1)):
            if getattr(self, name) is not None:
                check_number(name, getattr(self, name), at_least=0, at_most=most)
        if self.global_clipnorm is not None:
            check_number("global_clipnorm", self.global_clipnorm, above=0)
        check_flag("nesterov", self.nesterov)
        check_text("monitor", self.monitor, expected="a metric's name, e.g. 'val_loss'")
        _check_optional_ints(
            self, "base_batch_size", "steps_per_execution", "early_stopping_epochs"
        )


@dataclasses.dataclass(frozen=True)
class CheckpointConfig:
    """When the state of training is kept, and what becomes of it.

    Attributes:
      every_steps: steps between checkpoints, counted over epochs, beside those after epochs; None
        for those alone.
      every_epochs: epochs between checkpoints; there is one after the last in any case.
      keep_last: how many of the newest are kept.
      keep_best: how many of those with the best `train.monitor` are kept beside them.
      on_error: when one cannot be written, as on a full disk: "stop" ends training, "continue"
        trains on with a warning and tries again at the next. Earlier ones stay in either case.
      exit_code: of the command, once SIGTERM, SIGUSR1 or SIGINT has made it save and stop.
    """

    every_steps: int | None = None
    every_epochs: int = 1
    keep_last: int = 3
    keep_best: int = 1
    on_error: str = "stop"
    exit_code: int = 143  # 128 + SIGTERM, as shells say it

    def __post_init__(self):
        """Checks every field."""
        _check_optional_ints(self, "every_steps")
        check_int("every_epochs", self.every_epochs, at_least=1)
        check_int("keep_last", self.keep_last, at_least=1)
        check_int("keep_best", self.keep_best, at_least=0)
        check_choice("on_error", self.on_error, ("stop", "continue"))
        check_int("exit_code", self.exit_code, at_least=1, at_most=255)


@dataclasses.dataclass(frozen=True)
class StepConfig:
    """How a step is computed, beside what Keras's `compile` says.

    Attributes:
      sync_batchnorm: whether batch normalization takes its statistics over all replicas' rows
        (training then runs without XLA); otherwise each replica's own are used to normalize, and
        their mean is kept for testing.
      accumulation_steps: each replica computes its rows of a step in this many parts, one after the
        other, and updates once: a larger batch in the same memory. Batch normalization then sees
        one part at a time.
      float16_allreduce: whether gradients travel between replicas in float16, at half the bytes.
      loss_scale: for mixed_float16: "dynamic", or a number that stays (no step is then skipped).
      loss_scale_initial: what a dynamic scale starts from.
      loss_scale_growth_steps: good steps after which a dynamic scale is doubled.
      loss_scale_floor: training stops with an error when a dynamic scale falls below this.
      audit_steps: steps between checks that all replicas hold the same variables; one more is made
        at the end. 0 for none.
      zero_weight_is_padding: whether rows whose sample weight is 0 (for every output) are padding:
        loss and metrics then count the other rows alone, as if they were not in the batch. Layers
        do not know: batch normalization in training, and what a layer adds to the loss by itself,
        still see them, so they need values that give finite losses.
      label_smoothing: part of each training label that is spread evenly over all classes (Szegedy
        et al. 2016, arXiv:1512.00567). With this, mixup or cutmix, whole-number labels become
        probabilities in the step, [rows, classes] float32: compile with CategoricalCrossentropy.
      mixup_alpha: training images and labels are blended with the next row's, by Beta(this, this)
        (Zhang et al. 2018, arXiv:1710.09412); 0 for none.
      cutmix_alpha: a rectangle of the next row's image is pasted, of an area by Beta(this, this),
        and the labels blended by it (Yun et al. 2019, arXiv:1905.04899); 0 for none. With mixup
        too, each step takes one of the two by chance.
      cutout_pixels: side of a square, about a uniformly drawn pixel of each training image and cut
        at the borders, that is set to 0, the mean of normalised images (DeVries and Taylor 2017,
        arXiv:1708.04552); 0 for none. After mixup and cutmix. Labels, masks and target images stay
        whole: a restoration learns to fill the square in.
      nonfinite: what follows gradients, or changes of other variables, that are infinite or NaN.
        They are never applied. "stop" ends training, at the latest an execution later, and names
        step and layer; "skip" warns and goes on; "rollback" goes back to the last checkpoint and on
        with the data after that step. Where a dynamic loss scale overflows, that is no fault.
        Weights that are not finite always stop training, or roll it back.
      max_rollbacks: how often in a run; then it stops.
    """

    sync_batchnorm: bool = False
    accumulation_steps: int = 1
    float16_allreduce: bool = False
    loss_scale: str | float = "dynamic"
    loss_scale_initial: float = 2.0**15
    loss_scale_growth_steps: int = 2000
    loss_scale_floor: float = 1e-4  # as fairseq's --min-loss-scale
    audit_steps: int = 1000
    zero_weight_is_padding: bool = False
    label_smoothing: float = 0.0
    mixup_alpha: float = 0.0
    cutmix_alpha: float = 0.0
    cutout_pixels: int = 0
    nonfinite: str = "stop"
    max_rollbacks: int = 3

    def __post_init__(self):
        """Checks every field."""
        check_flag("sync_batchnorm", self.sync_batchnorm)
        check_int("accumulation_steps", self.accumulation_steps, at_least=1)
        check_flag("float16_allreduce", self.float16_allreduce)
        object.__setattr__(self, "loss_scale", _loss_scale(self.loss_scale))
        check_number("loss_scale_initial", self.loss_scale_initial, above=0)
        check_int("loss_scale_growth_steps", self.loss_scale_growth_steps, at_least=1)
        check_number("loss_scale_floor", self.loss_scale_floor, above=0)
        check_int("audit_steps", self.audit_steps, at_least=0)
        check_flag("zero_weight_is_padding", self.zero_weight_is_padding)
        check_number("label_smoothing", self.label_smoothing, at_least=0, at_most=1)
        check_number("mixup_alpha", self.mixup_alpha, at_least=0)
        check_number("cutmix_alpha", self.cutmix_alpha, at_least=0)
        check_int("cutout_pixels", self.cutout_pixels, at_least=0)
        check_choice("nonfinite", self.nonfinite, ("stop", "skip", "rollback"))
        check_int("max_rollbacks", self.max_rollbacks, at_least=1)
        check_only_with(self, "nonfinite", {"rollback": ("max_rollbacks",)})
        of_dynamic = [each for each in vars(self) if each.startswith("loss_scale_")]
        check_only_with(self, "loss_scale", {"dynamic": of_dynamic})

    @property
    def mixes_labels(self) -> bool:
        """Whether training labels become probabilities over the classes."""
        return any((self.label_smoothing, self.mixup_alpha, self.cutmix_alpha))


@dataclasses.dataclass(frozen=True)
class ExportConfig:
    """How a trained model is exported. (Training exports with these defaults.)

    Attributes:
      samples: evaluation images that it is compared on, spread over all of them.
      pixel_dtype: of the pixels, 0 to 255, that `serving_default` takes: "float32" or "uint8".
      computes_in: "policy" for the precision that it was trained in, or "float32", which CPUs
        compute much faster than float16. Answers are float32 in both.
      weights: "trained", or "average" for their moving average, where the optimizer keeps one.
      xla: whether it is compiled with XLA where it is served: anew for each number of rows.
      onnx: whether there is a `model.onnx`, too, in float32, from pixels to answers.
    """

    samples: int = 256
    pixel_dtype: str = "float32"
    computes_in: str = "policy"
    weights: str = "trained"
    xla: bool = False
    onnx: bool = False

    def __post_init__(self):
        """Checks every field."""
        check_int("samples", self.samples, at_least=1)
        check_choice("pixel_dtype", self.pixel_dtype, PIXEL_DTYPES)
        check_choice("computes_in", self.computes_in, COMPUTES_IN)
        check_choice("weights", self.weights, WEIGHTS)
        check_flag("xla", self.xla)
        check_flag("onnx", self.onnx)


@dataclasses.dataclass(frozen=True)
class Config:
    """One experiment."""

    runtime: RuntimeConfig = dataclasses.field(default_factory=RuntimeConfig)
    data: DataConfig = dataclasses.field(default_factory=DataConfig)
    train_images: AugmentConfig = dataclasses.field(default_factory=AugmentConfig)
    test_images: AugmentConfig = dataclasses.field(default_factory=AugmentConfig)
    dali: DaliConfig = dataclasses.field(default_factory=DaliConfig)
    model: ModelConfig = dataclasses.field(default_factory=ModelConfig)
    train: TrainConfig = dataclasses.field(default_factory=TrainConfig)
    step: StepConfig = dataclasses.field(default_factory=StepConfig)
    checkpoint: CheckpointConfig = dataclasses.field(default_factory=CheckpointConfig)


def default_config() -> ml_collections.ConfigDict:
    """Returns every field at its default, for a config file to start from."""
    config = ml_collections.ConfigDict(dataclasses.asdict(Config()))
    # A field takes the type of its default, but for those that may be of several, which `object`
    # lets be text and numbers: `int` would not take None back.
    for section in dataclasses.fields(Config):
        for field in dataclasses.fields(section.default_factory):
            if isinstance(field.type, types.UnionType):
                kind = str if field.type == str | None else object
                reference = config_dict.FieldReference(field.default, field_type=kind)
                config[section.name][field.name] = reference
    return config


def deciding(config: Config) -> dict[str, object]:
    """Returns the settings that a resumed run must share with the one it goes on with, by name.

    What the data are is compared as it was found, and on how many replicas, or how fast, they are
    trained on is free. So is the number of epochs, where no learning rate goes by it, and which
    layers compute in float32 by name, which may be the cure for what stopped a run.
    """
    free = {
        "runtime": {
            "gpu_ids",
            "memory",
            "compile_cache",
            "peer_timeout_s",
            "allow_public_network",
        },
        "model": {"weights", "weights_order"},
        "step": {"audit_steps", "nonfinite", "max_rollbacks"},
        "train": {"steps_per_execution"},
    }
    if config.train.decay in ("constant", "step"):
        free["train"].add("epochs")
    if config.runtime.precision != "float16":  # there it decides what the weights are
        free["model"].add("float32_layers")
    return {
        f"{section}.{name}": list(value) if isinstance(value, tuple) else value
        for section in ("runtime", "model", "train", "step")
        for name, value in dataclasses.asdict(getattr(config, section)).items()
        if name not in free.get(section, ())
    }


def is_smoke(size: str) -> bool:
    """Returns whether a config file's argument, after the colon, asks for its smallest size.

    Raises:
      UserError: it is neither empty nor "smoke".
    """
    if size not in ("", "smoke"):
        raise UserError(f"there is no size '{size}'; did you mean ':smoke'?")
    return size == "smoke"


def check_is_config(returned: object) -> None:
    """Raises UserError unless `returned` is what a config file's get_config() should return."""
    if not isinstance(returned, ml_collections.ConfigDict):
        raise UserError(f"get_config() returned {returned!r}; expected default_config(), changed")


def parse(config: ml_collections.ConfigDict) -> Config:
    """Returns the checked, frozen experiment.

    Raises:
      UserError: a section or field does not exist, or a value is not what it may be.
    """
    check_is_config(config)
    sections = {field.name: field.default_factory for field in dataclasses.fields(Config)}
    for each in config:
        if each not in sections:
            raise UserError(f"config has no field '{each}'{meant.field(each)}")
    return Config(**{name: _section(name, kind, config) for name, kind in sections.items()})


def _section(name: str, kind: type, config: ml_collections.ConfigDict):
    values = config.get(name, {})
    if not isinstance(values, ml_collections.ConfigDict | dict):
        raise UserError(f"config.{name}={values!r}; expected a group of fields")
    fields = [field.name for field in dataclasses.fields(kind)]
    for each in values:
        if each not in fields:
            cure = meant.field(each, fields, section=name)
            raise UserError(f"config.{name} has no field '{each}'{cure}")
    return kind(**dict(values))


def _check_optional_ints(config, *names: str) -> None:
    """Raises UserError for a field of these that is neither None nor a whole number above 0."""
    for name in names:
        if getattr(config, name) is not None:
            check_int(name, getattr(config, name), at_least=1)


def _gpu_ids(value) -> tuple[int, ...] | None:
    if value is None:
        return None
    ids = (value,) if isinstance(value, int) else value
    if isinstance(ids, str):
        # From the command line: --config.runtime.gpu_ids=0,1
        ids = [int(each) if each.strip().isdigit() else each for each in ids.split(",") if each]
    if not isinstance(ids, Sequence) or not all(is_int(each, at_least=0) for each in ids):
        raise UserError(f"gpu_ids={value!r}; expected GPU indices, e.g. 0,1; empty for the CPU")
    if len(set(ids)) != len(ids):
        raise UserError(f"gpu_ids={value!r} names a GPU twice; name each once")
    # TensorFlow numbers the GPUs that it may use in this order, whatever order they are given in.
    return tuple(sorted(ids))


def _xla(value) -> bool | None:
    if isinstance(value, str):  # from the command line, where the default is None
        value = {"true": True, "1": True, "false": False, "0": False}.get(value.lower(), value)
    if isinstance(value, int) and value in (0, 1):
        value = bool(value)
    if value is not None and not isinstance(value, bool):
        raise UserError(
            f"xla={value!r}; expected True or False, or None for on with GPUs and off on the CPU"
        )
    return value


def _layer_names(value) -> tuple[str, ...] | None:
    if value is None:
        return None
    # From the command line: --config.model.float32_layers=conv5_*,predictions
    names = [each.strip() for each in value.split(",")] if isinstance(value, str) else value
    if not isinstance(names, Sequence) or not all(each and isinstance(each, str) for each in names):
        raise UserError(f"float32_layers={value!r}; expected names of layers, e.g. conv5_*,logits")
    return tuple(names)


def _precision(value) -> str:
    policy = OPT_LEVELS.get(str(value).upper(), value)
    if policy not in PRECISIONS:
        # No nearest name here: "fp16" is near float16, but means mixed_float16.
        raise UserError(
            f"precision={value!r}; expected one of {', '.join((*PRECISIONS, *OPT_LEVELS))}"
        )
    return policy


def _memory(value) -> str | int:
    if isinstance(value, str) and value.isdigit():
        value = int(value)
    if value != "growth" and not is_int(value, at_least=1):
        raise UserError(f"memory={value!r}; expected 'growth' or a limit per GPU in MiB, e.g. 8192")
    return value


def _loss_scale(value) -> str | float:
    if value == "dynamic":
        return value
    try:
        scale = float(value)
    except (TypeError, ValueError):
        scale = math.nan
    if not (math.isfinite(scale) and scale > 0):
        raise UserError(f"loss_scale={value!r}; expected 'dynamic' or a number above 0, e.g. 128")
    return scale


def _image_size(name: str, value) -> tuple[int, int]:
    if isinstance(value, str):  # from the command line, where the default is None
        value = [int(each) if each.strip().isdigit() else each for each in value.split(",")]
    pair = isinstance(value, Sequence) and len(value) == 2
    if not pair or not all(is_int(each, at_least=1) for each in value):
        raise UserError(f"{name}={value!r}; expected (height, width) in pixels, e.g. (28, 28)")
    return tuple(value)


def _rising(name: str, value) -> tuple[float, ...]:
    if not isinstance(value, Sequence) or isinstance(value, str):
        raise UserError(f"{name}={value!r}; expected epochs in rising order, e.g. (30, 60, 80)")
    for each in value:
        check_number(name, each, above=0)
    if sorted(set(value)) != list(value):
        raise UserError(f"{name}={value!r}; expected epochs in rising order, each once")
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
