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

DECAYS = ("constant", "step", "cosine", "linear")
WEIGHTS_ORDERS = ("rgb", "bgr")


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
        check_optional_ints(self, "num_outputs")
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
        check_optional_ints(self, "base_batch_size", "steps_per_execution", "early_stopping_epochs")


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
        check_optional_ints(self, "every_steps")
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
