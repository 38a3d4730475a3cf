"""An experiment as plain values: what a config file may say, and every check of what it says.

Takes the `ml_collections.ConfigDict` that a file in `configs/` returns, after the command line
changed it; gives a frozen `Config`. Needs no TensorFlow, so a mistake is answered at once.

    config = default_config()          # in a config file: every field, at its default
    config.data.root = "/data/mnist_png"
    config = parse(config)             # in train.py: checked, frozen
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import ml_collections
from ml_collections import config_dict

from tfaccel.errors import UserError, did_you_mean

# Apex's levels, which people know by name, as Keras dtype policies. O1 (patch each op) and O2
# (half model, float32 batch norm and master weights) are one policy in Keras: variables float32,
# computation float16, per layer.
OPT_LEVELS = {"O0": "float32", "O1": "mixed_float16", "O2": "mixed_float16", "O3": "float16"}
PRECISIONS = ("float32", "mixed_float16", "mixed_bfloat16", "float16")


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
      xla: whether the training, test and predict steps are compiled with XLA.
      seed: the one seed; weights, dropout, data order and augmentation all derive from it.
      peer_timeout_s: with several workers, how long one may be silent (dead, frozen or cut off;
        being busy is not silence) until the others stop with an error that names it.
    """

    gpu_ids: Sequence[int] | None = None
    precision: str = "float32"
    memory: str | int = "growth"
    tf32: bool = True
    xla: bool = True
    seed: int = 0
    peer_timeout_s: int = 60

    def __post_init__(self):
        """Checks every field and stores it in its one normal form."""
        object.__setattr__(self, "gpu_ids", _gpu_ids(self.gpu_ids))
        object.__setattr__(self, "precision", _precision(self.precision))
        object.__setattr__(self, "memory", _memory(self.memory))
        check_flag("tf32", self.tf32)
        check_flag("xla", self.xla)
        check_int("seed", self.seed, at_least=0, at_most=2**32 - 1)  # what NumPy takes
        check_int("peer_timeout_s", self.peer_timeout_s, at_least=1)


@dataclasses.dataclass(frozen=True)
class ImageConfig:
    """How image files become batches.

    Attributes:
      image_size: (height, width) in pixels; every image is resized to it.
      channels: 1 for grey, 3 for RGB.
      global_batch_size: images per step over all replicas.
      rotation_degrees: each training image turns by a uniform angle in [-this, this].
      horizontal_flip: whether each training image is mirrored with probability 1/2.
    """

    image_size: Sequence[int] = (224, 224)
    channels: int = 3
    global_batch_size: int = 256
    rotation_degrees: float = 0.0
    horizontal_flip: bool = False

    def __post_init__(self):
        """Checks every field and stores it in its one normal form."""
        object.__setattr__(self, "image_size", _image_size(self.image_size))
        check_int("channels", self.channels, at_least=1)
        if self.channels not in (1, 3):
            raise UserError(f"channels={self.channels}; expected 1 (grey) or 3 (RGB)")
        check_int("global_batch_size", self.global_batch_size, at_least=1)
        check_number("rotation_degrees", self.rotation_degrees, at_least=0, at_most=180)
        check_flag("horizontal_flip", self.horizontal_flip)


@dataclasses.dataclass(frozen=True)
class DataConfig(ImageConfig):
    """Where the images are, and how they become batches.

    Attributes:
      root: a folder that holds `train_folder` and `test_folder`, each with one folder per class;
        None, the default, for the embedded handwritten digits.
      train_folder: the training images, below root.
      test_folder: the images that measure the result, below root.
    """

    root: str | None = None
    train_folder: str = "training"
    test_folder: str = "testing"


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """Which architecture.

    Attributes:
      name: "mnist_cnn", or any architecture of `keras.applications`, in any case ("resnet50").
    """

    name: str = "mnist_cnn"


@dataclasses.dataclass(frozen=True)
class TrainConfig:
    """The recipe.

    Attributes:
      epochs: passes over the training images.
      optimizer: a Keras optimizer by name, in any case ("adamw", "sgd").
      learning_rate: of every step.
    """

    epochs: int = 1
    optimizer: str = "adamw"
    learning_rate: float = 1e-3

    def __post_init__(self):
        """Checks every field."""
        check_int("epochs", self.epochs, at_least=1)
        check_number("learning_rate", self.learning_rate, above=0)


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


@dataclasses.dataclass(frozen=True)
class Config:
    """One experiment."""

    runtime: RuntimeConfig = dataclasses.field(default_factory=RuntimeConfig)
    data: DataConfig = dataclasses.field(default_factory=DataConfig)
    model: ModelConfig = dataclasses.field(default_factory=ModelConfig)
    train: TrainConfig = dataclasses.field(default_factory=TrainConfig)
    step: StepConfig = dataclasses.field(default_factory=StepConfig)


def default_config() -> ml_collections.ConfigDict:
    """Returns every field at its default, for a config file to start from."""
    config = ml_collections.ConfigDict(dataclasses.asdict(Config()))
    # A field whose default is None takes its type from here; `object` takes text and numbers.
    config.data.root = config_dict.placeholder(str)
    config.runtime.gpu_ids = config_dict.placeholder(object)
    config.runtime.memory = config_dict.FieldReference("growth", field_type=object)
    config.step.loss_scale = config_dict.FieldReference("dynamic", field_type=object)
    return config


def is_smoke(size: str) -> bool:
    """Returns whether a config file's argument, after the colon, asks for its smallest size.

    Raises:
      UserError: it is neither empty nor "smoke".
    """
    if size not in ("", "smoke"):
        raise UserError(f"there is no size '{size}'; did you mean ':smoke'?")
    return size == "smoke"


def parse(config: ml_collections.ConfigDict) -> Config:
    """Returns the checked, frozen experiment.

    Raises:
      UserError: a section or field does not exist, or a value is not what it may be.
    """
    if not isinstance(config, ml_collections.ConfigDict):
        raise UserError(f"get_config() returned {config!r}; expected default_config(), changed")
    sections = {field.name: field.default_factory for field in dataclasses.fields(Config)}
    _check_names("config", config, sections)
    return Config(**{name: _section(name, kind, config) for name, kind in sections.items()})


def _section(name: str, kind: type, config: ml_collections.ConfigDict):
    values = config.get(name, {})
    if not isinstance(values, ml_collections.ConfigDict | dict):
        raise UserError(f"config.{name}={values!r}; expected a group of fields")
    _check_names(f"config.{name}", values, [field.name for field in dataclasses.fields(kind)])
    return kind(**dict(values))


def _check_names(prefix: str, received, valid) -> None:
    for name in received:
        if name not in valid:
            raise UserError(f"{prefix} has no field '{name}'{did_you_mean(name, valid)}")


def check_int(name: str, value: Any, *, at_least: int, at_most: int | None = None) -> None:
    """Raises UserError unless `value` is a whole number within the bounds."""
    if not _is_int(value, at_least=at_least) or (at_most is not None and value > at_most):
        bound = f" and at most {at_most}" if at_most is not None else ""
        raise UserError(f"{name}={value!r}; expected a whole number of at least {at_least}{bound}")


def check_number(
    name: str,
    value: Any,
    *,
    at_least: float | None = None,
    above: float | None = None,
    at_most: float | None = None,
) -> None:
    """Raises UserError unless `value` is a finite number within the bounds given."""
    ok = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    ok = ok and (at_least is None or value >= at_least) and (above is None or value > above)
    if not (ok and (at_most is None or value <= at_most)):
        bounds = (("at least", at_least), ("above", above), ("at most", at_most))
        expected = " and ".join(f"{word} {bound}" for word, bound in bounds if bound is not None)
        raise UserError(f"{name}={value!r}; expected a number {expected}")


def check_flag(name: str, value: Any) -> None:
    """Raises UserError unless `value` is True or False."""
    if not isinstance(value, bool):
        raise UserError(f"{name}={value!r}; expected True or False")


def _is_int(value: Any, *, at_least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= at_least


def _gpu_ids(value) -> tuple[int, ...] | None:
    if value is None:
        return None
    ids = (value,) if isinstance(value, int) else value
    if isinstance(ids, str):
        # From the command line: --config.runtime.gpu_ids=0,1
        ids = [int(each) if each.strip().isdigit() else each for each in ids.split(",") if each]
    if not isinstance(ids, Sequence) or not all(_is_int(each, at_least=0) for each in ids):
        raise UserError(f"gpu_ids={value!r}; expected GPU indices, e.g. 0,1; empty for the CPU")
    if len(set(ids)) != len(ids):
        raise UserError(f"gpu_ids={value!r} names a GPU twice; name each once")
    # TensorFlow numbers the GPUs that it may use in this order, whatever order they are given in.
    return tuple(sorted(ids))


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
    if value != "growth" and not _is_int(value, at_least=1):
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


def _image_size(value) -> tuple[int, int]:
    pair = isinstance(value, Sequence) and len(value) == 2
    if not pair or not all(_is_int(each, at_least=1) for each in value):
        raise UserError(f"image_size={value!r}; expected (height, width) in pixels, e.g. (28, 28)")
    return tuple(value)
