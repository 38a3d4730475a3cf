"""The model, the recipe, one step of it, and its checkpoints."""

import dataclasses
import math
from collections.abc import Sequence

from tfaccel.common.checks import (
    check_choice,
    check_flag,
    check_int,
    check_number,
    check_only_with,
    check_optional_ints,
    check_text,
)
from tfaccel.common.errors import UserError
from tfaccel.config.documented import documented

DECAYS = ("constant", "step", "cosine", "linear")
WEIGHTS_ORDERS = ("rgb", "bgr")


@documented
@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """Which architecture."""

    name: str = "mnist_cnn"
    """Architecture, e.g. resnet50. "mnist_cnn", "cifar_resnet", "restoration_cnn", or any
    architecture of `keras.applications`, in any case ("resnet50")."""
    num_outputs: int | None = None
    """Classes or channels that the model gives; None for the number of classes, or the channels of
    the targets. Masks need it: how many values they have."""
    weights: str | None = None
    """File of weights to begin from. It is a file on this machine: ".keras", ".weights.h5" or
    ".weights.json" (of several pieces), or ".h5" as keras.applications has them. Names and shapes
    decide what is taken. Layers that differ, as for another number of classes, begin at random, and
    the log says so. None for random weights."""
    weights_order: str = "rgb"
    """Of the colours that these weights were trained on, "rgb" or "bgr". Of "bgr", as Keras's own
    files for ResNet50 and VGG16 are, the first convolution is turned round, so that the model takes
    red, green, blue and answers alike."""
    float32_layers: Sequence[str] | None = None
    """Names of layers that compute in float32 whatever the precision, as for one in which float16
    overflows; "*" stands for any letters. None for none."""

    def __post_init__(self):
        """Checks every field."""
        check_text("name", self.name, expected="an architecture's name, e.g. 'resnet50'")
        check_optional_ints(self, "num_outputs")
        if self.weights is not None:
            check_text("weights", self.weights, expected="a file's path, or None")
        check_choice("weights_order", self.weights_order, WEIGHTS_ORDERS)
        if self.weights is None and self.weights_order != "rgb":
            raise UserError(
                f"weights_order={self.weights_order!r} without weights; give them or leave it out"
            )
        object.__setattr__(self, "float32_layers", _layer_names(self.float32_layers))


@documented
@dataclasses.dataclass(frozen=True)
class TrainConfig:
    """The recipe."""

    epochs: int = 1
    """Passes over the training images."""
    optimizer: str = "adamw"
    """Keras optimizer, by name. In any case ("adamw", "sgd", "lamb")."""
    learning_rate: float = 1e-3
    """The largest learning rate. Warm-up leads to it and decay leads away from it."""
    base_batch_size: int | None = None
    """The global batch that learning_rate is of: it is multiplied by global_batch_size / this (256
    in Goyal et al. 2017, arXiv:1706.02677); None to take it as it is."""
    warmup_epochs: float = 0.0
    """Epochs in which the rate rises. It rises linearly, step by step, from the first step's to
    learning_rate."""
    decay: str = "constant"
    """constant, step, cosine or linear. How the rate falls after warm-up: "step" multiplies it by
    decay_factor at each of decay_epochs; "cosine" and "linear" lower it step by step, down to 0
    after the last."""
    decay_epochs: Sequence[float] = (30, 60, 80)  # He et al. 2016 and Goyal et al. 2017
    """For "step": after how many epochs, warm-up included."""
    decay_factor: float = 0.1
    """For "step": what the rate is multiplied by."""
    momentum: float | None = None
    """Of optimizers that have one, as "sgd" and "rmsprop"; None for Keras's default."""
    nesterov: bool = False
    """Whether "sgd" looks ahead."""
    weight_decay: float | None = None
    """None: the optimizer's own. Part of each weight that a step of learning rate 1 takes away, as
    Keras defines it, apart from the gradient: PyTorch's SGD adds it to the gradient instead, so
    that its 1e-4 with momentum 0.9 is 1e-3 here. Never of biases or of batch norm's scale and
    offset."""
    global_clipnorm: float | None = None
    """What the norm of all gradients together is cut to, e.g. 1.0, after they were summed over
    replicas and the loss scale was taken out; None not to cut."""
    ema_momentum: float | None = None
    """Of the exponential moving average of the weights, e.g. 0.999, which is then measured after
    each epoch and exported; None for the weights themselves."""
    monitor: str = "val_loss"
    """The metric that says what is best. By it, checkpoints are best and training stops early: a
    metric as the logs call it. Losses should fall, all others rise."""
    steps_per_execution: int | None = None
    """Steps between two looks at what they came to: callbacks, logs, signals, checkpoints come once
    for so many, and the GPU does not wait for them in between. On the GPUs of one process, with
    XLA, they are one launch if the images are in GPU memory (loader="memory") and not resized, or
    if DALI decodes them on the GPU (loader="dali_gpu"), where the batches wait for one another. If
    all would take more than 6% of the GPU's memory, they are several launches of one length, or one
    by one if nothing else divides them. Let it divide the steps of an epoch, or the step is
    compiled once more for what is left over. The first execution, which compiles, counts in no
    images_per_second. None for about 10 on GPUs, 1 on the CPU."""
    early_stopping_epochs: int | None = None
    """Stop after so many without progress. Training ends after so many epochs without a better
    monitor, and the best epoch's weights are exported (with ema_momentum, the last average); None
    to train all epochs."""

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
        check_optional_ints(self, "base_batch_size", "steps_per_execution", "early_stopping_epochs")


@documented
@dataclasses.dataclass(frozen=True)
class CheckpointConfig:
    """When the state of training is kept, and what becomes of it."""

    every_steps: int | None = None
    """Steps between checkpoints. They are counted over epochs, and come beside the checkpoints
    after epochs. None for those alone."""
    every_epochs: int = 1
    """Epochs between checkpoints; there is one after the last in any case."""
    keep_last: int = 3
    """How many of the newest are kept."""
    keep_best: int = 1
    """How many of those with the best `train.monitor` are kept beside them."""
    on_error: str = "stop"
    """When one cannot be written, as on a full disk: "stop" ends training, "continue" trains on
    with a warning and tries again at the next. Earlier ones stay in either case."""
    exit_code: int = 143  # 128 + SIGTERM, as shells say it
    """Of the command, once SIGTERM, SIGUSR1 or SIGINT has made it save and stop."""

    def __post_init__(self):
        """Checks every field."""
        check_optional_ints(self, "every_steps")
        check_int("every_epochs", self.every_epochs, at_least=1)
        check_int("keep_last", self.keep_last, at_least=1)
        check_int("keep_best", self.keep_best, at_least=0)
        check_choice("on_error", self.on_error, ("stop", "continue"))
        check_int("exit_code", self.exit_code, at_least=1, at_most=255)


@documented
@dataclasses.dataclass(frozen=True)
class StepConfig:
    """How a step is computed, beside what Keras's `compile` says."""

    sync_batchnorm: bool = False
    """Whether batch normalization takes its statistics over all replicas' rows (training then runs
    without XLA); otherwise each replica's own are used to normalize, and their mean is kept for
    testing."""
    accumulation_steps: int = 1
    """Parts of a step, to save memory. Each replica computes its rows of a step in this many parts,
    one after the other, and updates once: a larger batch in the same memory. Batch normalization
    then sees one part at a time."""
    float16_allreduce: bool = False
    """Whether gradients travel between replicas in float16, at half the bytes."""
    loss_scale: str | float = "dynamic"
    """For mixed_float16: "dynamic", or a number that stays (no step is then skipped)."""
    loss_scale_initial: float = 2.0**15
    """What a dynamic scale starts from."""
    loss_scale_growth_steps: int = 2000
    """Good steps after which a dynamic scale is doubled."""
    loss_scale_floor: float = 1e-4  # as fairseq's --min-loss-scale
    """Training stops with an error when a dynamic scale falls below this."""
    audit_steps: int = 1000
    """Steps between checks that all replicas hold the same variables; one more is made at the end.
    0 for none."""
    zero_weight_is_padding: bool = False
    """Whether rows whose sample weight is 0 (for every output) are padding: loss and metrics then
    count the other rows alone, as if they were not in the batch. Layers do not know: batch
    normalization in training, and what a layer adds to the loss by itself, still see them, so they
    need values that give finite losses."""
    label_smoothing: float = 0.0
    """Smooth labels, e.g. by 0.1. Part of each training label that is spread evenly over all
    classes (Szegedy et al. 2016, arXiv:1512.00567). With this, mixup or cutmix, whole-number labels
    become probabilities in the step, [rows, classes] float32: compile with CategoricalCrossentropy.
    """
    mixup_alpha: float = 0.0
    """Blend images, e.g. by 0.2. Training images and labels are blended with the next row's, by
    Beta(this, this) (Zhang et al. 2018, arXiv:1710.09412); 0 for none."""
    cutmix_alpha: float = 0.0
    """A rectangle of the next row's image is pasted, of an area by Beta(this, this), and the labels
    blended by it (Yun et al. 2019, arXiv:1905.04899); 0 for none. With mixup too, each step takes
    one of the two by chance."""
    cutout_pixels: int = 0
    """Side of a square, about a uniformly drawn pixel of each training image and cut at the
    borders, that is set to 0, the mean of normalised images (DeVries and Taylor 2017,
    arXiv:1708.04552); 0 for none. After mixup and cutmix. Labels, masks and target images stay
    whole: a restoration learns to fill the square in."""
    nonfinite: str = "stop"
    """What follows gradients, or changes of other variables, that are infinite or NaN. They are
    never applied. "stop" ends training, at the latest an execution later, and names step and layer;
    "skip" warns and goes on; "rollback" goes back to the last checkpoint and on with the data after
    that step. Where a dynamic loss scale overflows, that is no fault. Weights that are not finite
    always stop training, or roll it back."""
    max_rollbacks: int = 3
    """How often a run goes back; then it stops."""

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


def _layer_names(value) -> tuple[str, ...] | None:
    if value is None:
        return None
    # From the command line: --config.model.float32_layers=conv5_*,predictions
    names = [each.strip() for each in value.split(",")] if isinstance(value, str) else value
    if not isinstance(names, Sequence) or not all(each and isinstance(each, str) for each in names):
        raise UserError(f"float32_layers={value!r}; expected names of layers, e.g. conv5_*,logits")
    return tuple(names)


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


def _rising(name: str, value) -> tuple[float, ...]:
    if not isinstance(value, Sequence) or isinstance(value, str):
        raise UserError(f"{name}={value!r}; expected epochs in rising order, e.g. (30, 60, 80)")
    for each in value:
        check_number(name, each, above=0)
    if sorted(set(value)) != list(value):
        raise UserError(f"{name}={value!r}; expected epochs in rising order, each once")
    return tuple(value)
