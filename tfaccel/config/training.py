"""The settings of training: the model, the recipe, the step and the checkpoints."""

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
from tfaccel.common.errors import UserError, nearest
from tfaccel.config.documented import documented

DECAYS = ("constant", "step", "cosine", "linear")
WEIGHTS_ORDERS = ("rgb", "bgr")
LOSSES_OF_CLASSES = (
    "cross_entropy",
    "binary_cross_entropy",
    "focal",
    "dice",
    "cross_entropy_dice",
    "focal_dice",
)
LOSSES_OF_NUMBERS = ("squared_error", "absolute_error", "huber")
LOSSES = ("auto", *LOSSES_OF_CLASSES, *LOSSES_OF_NUMBERS)
LOSSES_IN_WORDS = (
    "expected auto; for images with one class, cross_entropy, binary_cross_entropy or focal; with "
    "several classes, cross_entropy or focal; for numbers, squared_error, absolute_error or huber; "
    "for masks, cross_entropy, focal, dice, cross_entropy_dice or focal_dice"
)


@documented
@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """The architecture and its initial weights."""

    name: str = "mnist_cnn"
    """Architecture, e.g. resnet50. It is "mnist_cnn", "cifar_resnet", "restoration_cnn", a Vision
    Transformer ("vit_tiny", "vit_small", "vit_base", "vit_large"; its settings are in config.vit),
    torchvision's ResNet ("resnet50_v1_5", "resnet101_v1_5", "resnet152_v1_5"), or any architecture
    of `keras.applications`. For masks, "unet_" or "deeplab_" comes before one of these, such as
    unet_mobilenetv2. Upper and lower case make no difference."""
    num_outputs: int | None = None
    """Number of classes or channels of the model's output. None takes the number of classes in the
    data, or the channels of the targets. Masks need it: it is the number of values in a mask."""
    weights: str | None = None
    """File of weights to begin from. It is a local file: ".keras", ".weights.h5" (also of a
    KerasHub preset), ".weights.json" (an index of several files), ".h5" in the format of
    keras.applications, or ".safetensors" of torchvision or timm for resnet50_v1_5, VGG, DenseNet,
    ConvNeXt or ViT. A run's workdir or the folder of an export stands for its newest model.keras.
    Weights are matched by name and shape. Layers that do not match, such as a head for another
    number of classes, start with random weights, and the log lists them. A run that resumes takes
    its checkpoint instead. None starts all layers with random weights."""
    weights_order: str | None = None
    """Order of the colour channels on which `weights` were trained: "rgb" or "bgr". Keras's own
    files for ResNet50 and VGG16 are "bgr". For "bgr", the channels of the first convolution are
    reversed, so that the model takes RGB and its outputs stay the same. None is "rgb", or what is
    known of the file if `data.mean` and `data.std` are None, too."""
    new_layers: Sequence[str] | None = None
    """Names of layers that start with random weights although the file of `weights` has them. "*"
    stands for any letters, and "head" for the last layer with weights. Use "head" if your classes
    are as many as those of the file, but are others. None takes all that match."""
    freeze: Sequence[str] | None = None
    """Names of layers that are not trained. "*" stands for any letters. "backbone" stands for all
    layers but the head, so that only a new head is trained on `weights`. The head is the last layer
    with weights; in a network for masks, also the decoder. A frozen batch normalization keeps its
    statistics. None trains all layers."""
    thaw_epochs: Sequence[str] | None = None
    """Epochs after which layers of `freeze` are trained, too. "2" trains all layers after 2 epochs.
    "2:conv5_*,4" trains the layers from the first conv5_* on after 2 epochs, and all layers after
    4. The optimizer then begins anew, and the learning rate goes on by its schedule. A thawed batch
    normalization changes its statistics. None keeps layers frozen."""
    float32_layers: Sequence[str] | None = None
    """Names of layers that compute in float32 whatever the precision, such as a layer that
    overflows in float16. "*" stands for any letters. None means no layers."""

    def __post_init__(self):
        """Checks every field."""
        check_text("name", self.name, expected="an architecture's name, e.g. 'resnet50'")
        check_optional_ints(self, "num_outputs")
        if self.weights is not None:
            check_text("weights", self.weights, expected="a file's path, or None")
        if self.weights_order is None:
            object.__setattr__(self, "weights_order", "rgb")
        check_choice("weights_order", self.weights_order, WEIGHTS_ORDERS)
        if self.weights is None and self.weights_order != "rgb":
            raise UserError(
                f"weights_order={self.weights_order!r} without weights; set weights or remove it"
            )
        if self.weights is None and self.new_layers is not None:
            raise UserError(
                f"new_layers={self.new_layers!r} without weights; set weights or remove it"
            )
        if type(self.thaw_epochs) is int:
            object.__setattr__(self, "thaw_epochs", str(self.thaw_epochs))
        for name in ("new_layers", "freeze", "thaw_epochs", "float32_layers"):
            object.__setattr__(self, name, _layer_names(name, getattr(self, name)))
        _check_thaws(self)

    @property
    def thaws(self) -> list[tuple[int, str | None]]:
        """From which epoch which layers on are trained, (epoch, layer); no layer means all."""
        parts = [each.partition(":") for each in self.thaw_epochs or ()]
        return [(int(epoch), layer or None) for epoch, _, layer in parts]


@documented
@dataclasses.dataclass(frozen=True)
class TrainConfig:
    """The recipe: epochs, optimizer, learning rate and what decides which epoch is best."""

    epochs: int = 1
    """Passes over the training images."""
    optimizer: str = "adamw"
    """Keras optimizer, by name. Examples: "adamw", "sgd", "lamb"; case makes no difference."""
    learning_rate: float = 1e-3
    """The largest learning rate. It is reached after warm-up and falls during decay."""
    backbone_factor: float = 1.0
    """Factor of the backbone's rate. With 0.1, all layers but the head (see model.freeze) learn
    with a tenth of the rate, so that a network from `model.weights` changes less than its new head.
    The weight decay is multiplied, too."""
    base_batch_size: int | None = None
    """The global batch size for which learning_rate was chosen (256 in Goyal et al. 2017,
    arXiv:1706.02677). The learning rate is multiplied by global_batch_size / base_batch_size. None
    uses learning_rate unchanged."""
    warmup_epochs: float = 0.0
    """Epochs in which the rate rises. It rises linearly, step by step, to learning_rate."""
    decay: str = "constant"
    """constant, step, cosine or linear. How the learning rate falls after warm-up: "step"
    multiplies it by decay_factor at each of decay_epochs; "cosine" and "linear" lower it at every
    step and reach 0 after the last step."""
    decay_epochs: Sequence[float] = (30, 60, 80)  # He et al. 2016 and Goyal et al. 2017
    """For "step": the epochs after which the rate falls, counted with the warm-up epochs."""
    decay_factor: float = 0.1
    """For "step": the factor by which the rate is multiplied."""
    momentum: float | None = None
    """Momentum of optimizers that have one, such as "sgd" and "rmsprop". None means Keras's
    default."""
    nesterov: bool = False
    """Use Nesterov momentum in "sgd"."""
    weight_decay: float | None = None
    """Weight decay; None: optimizer's own. It is the part of each weight that a step of learning
    rate 1 subtracts. As in Keras, it is separate from the gradient. PyTorch's SGD adds it to the
    gradient instead, so its 1e-4 with momentum 0.9 is 1e-3 here. Biases, the
    learned positions of Vision Transformers, and the scale and offset of normalization have no
    weight decay."""
    global_clipnorm: float | None = None
    """Largest norm of all gradients together, e.g. 1.0. Larger gradients are scaled down, after
    they are summed over replicas and the loss scale is removed. None means no limit."""
    loss: str = "auto"
    """Loss: auto, cross_entropy, focal or others. "auto" follows the task: "cross_entropy" for
    classes and masks (binary for several classes an image), "squared_error" for numbers, and the
    mean absolute error for target images. "focal" is cross entropy that counts easy rows or pixels
    less: (1 - p)^focal_gamma times as much, where p is the probability of the right class (Lin et
    al. 2017, arXiv:1708.02002). For labels, "binary_cross_entropy" judges each class by itself, so
    that an image mixed of two classes may have both (Wightman et al. 2021, arXiv:2110.00476). For
    masks, "dice" is 1 minus the soft Dice coefficient of each image, and "cross_entropy_dice" and
    "focal_dice" are sums. For numbers, there are also "absolute_error" and "huber". Target images
    need "auto"."""
    bce_target_threshold: float | None = None
    """For "binary_cross_entropy": a class is present in an image, with target 1, if its part of the
    mixed label is above this number, e.g. 0.2 (timm's option of the same name). The others have the
    target 0. None takes the parts themselves."""
    focal_gamma: float = 2.0
    """For "focal" and "focal_dice": the exponent. 0 is cross entropy."""
    huber_delta: float = 1.0
    """For "huber": errors up to this size count squared, and larger ones in proportion."""
    class_weights: str = "none"
    """none or balanced. "balanced": the cross entropy or focal loss of a class is multiplied by the
    mean frequency of classes, divided by its own frequency. So rare classes count as much as
    frequent ones. Frequencies are those of the training labels or, for masks, of the pixels of 64
    masks."""
    ema_momentum: float | None = None
    """Momentum of the moving average of the weights, e.g. 0.999. With it, the average weights are
    tested after each epoch and exported. None keeps no average."""
    monitor: str = "val_loss"
    """Metric that selects the best epoch. It decides which checkpoints are the best, and early
    stopping. Use its name in the logs. A loss or error should fall, every other metric rise."""
    steps_per_execution: int | None = None
    """Number of steps in one execution. Callbacks, logs, signals and checkpoints run once per
    execution, and the GPU does not wait for them in between. With XLA on the GPUs of one process,
    an execution is one launch if the images are in GPU memory (loader="memory") and not resized, or
    if DALI decodes them on the GPU (loader="dali_gpu"). With DALI, the batches of an execution are
    collected first. If they would take more than 6% of the GPU's memory, the execution is divided
    into several launches of equal length, down to single steps if no other length divides it.
    Choose a number that divides the steps of an epoch; otherwise the step is compiled once more for
    the steps that are left over. The first execution, which compiles, is not counted in
    images_per_second. None means about 10 on GPUs and 1 on the CPU."""
    early_stopping_epochs: int | None = None
    """Epochs to wait for a better monitor. If it does not improve for this many epochs, training
    ends and the best epoch's weights are exported (with ema_momentum, the last average). None
    trains all epochs."""
    export: bool = True
    """Whether the end of training exports the model. `tfaccel search` exports only its best trial.
    `tfaccel export` exports a run later."""

    def __post_init__(self):
        """Checks every field."""
        check_int("epochs", self.epochs, at_least=1)
        check_text("optimizer", self.optimizer, expected="an optimizer's name, e.g. 'adamw'")
        check_number("learning_rate", self.learning_rate, above=0)
        check_number("backbone_factor", self.backbone_factor, above=0)
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
        if self.loss not in LOSSES:
            near = nearest(str(self.loss), LOSSES)
            hint = "" if near is None else f" did you mean '{near}'?"
            raise UserError(f"loss={self.loss!r};{hint} {LOSSES_IN_WORDS}")
        check_number("focal_gamma", self.focal_gamma, at_least=0)
        if "focal" not in self.loss and self.focal_gamma != TrainConfig.focal_gamma:
            raise UserError(
                f"focal_gamma={self.focal_gamma} needs loss='focal' or 'focal_dice', but "
                f"loss={self.loss!r}; remove focal_gamma, or change the loss"
            )
        check_only_with(self, "loss", {"binary_cross_entropy": ("bce_target_threshold",)})
        if self.bce_target_threshold is not None:
            check_number("bce_target_threshold", self.bce_target_threshold, above=0, below=1)
        check_number("huber_delta", self.huber_delta, above=0)
        check_only_with(self, "loss", {"huber": ("huber_delta",)})
        check_choice("class_weights", self.class_weights, ("none", "balanced"))
        if self.loss == "binary_cross_entropy" and self.class_weights != "none":
            raise UserError(
                "class_weights='balanced' with loss='binary_cross_entropy', which has no weights "
                "of classes; remove class_weights, or use loss='cross_entropy' or 'focal'"
            )
        if self.loss == "dice" and self.class_weights != "none":
            raise UserError(
                "class_weights='balanced' with loss='dice', which counts all classes alike; remove "
                "class_weights, or use loss='cross_entropy_dice'"
            )
        check_text("monitor", self.monitor, expected="a metric's name, e.g. 'val_loss'")
        check_optional_ints(self, "base_batch_size", "steps_per_execution", "early_stopping_epochs")
        check_flag("export", self.export)


@documented
@dataclasses.dataclass(frozen=True)
class CheckpointConfig:
    """When to save checkpoints, which ones to keep, and the exit code of a saved run."""

    every_steps: int | None = None
    """Steps between checkpoints. They are counted across epochs, and these checkpoints are saved in
    addition to those after epochs. None saves only after epochs."""
    every_epochs: int = 1
    """Epochs between checkpoints. The last epoch always has a checkpoint."""
    keep_last: int = 3
    """Number of newest checkpoints to keep."""
    keep_best: int = 1
    """Number of checkpoints with the best `train.monitor` to keep in addition."""
    on_error: str = "stop"
    """What to do if a checkpoint cannot be written, for example on a full disk. "stop" ends
    training. "continue" trains on with a warning and tries again at the next checkpoint. Earlier
    checkpoints are kept in both cases."""
    exit_code: int = 143  # 128 + SIGTERM, as in a shell
    """Exit code of the command after SIGTERM, SIGUSR1 or SIGINT made it save and stop."""

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
    """How a step is computed, in addition to the settings of Keras's `compile`."""

    sync_batchnorm: bool = False
    """Compute the statistics of batch normalization over the rows of all replicas. XLA can do that
    if the replicas are the GPUs of one process; else training runs without XLA. If this is off,
    each replica normalizes with its own statistics, and their mean is kept for testing."""
    accumulation_steps: int = 1
    """Parts of a step, to save memory. Each replica computes its rows of a step in this many parts,
    one after the other, and updates the weights once. The same memory is thus enough for a larger
    batch. Batch normalization sees one part at a time."""
    remat: str | int | tuple[str, ...] | None = None
    """What the backward pass computes again, to save memory (activation checkpointing). "blocks":
    all parts of the forward pass but the last, divided where little memory passes from one to the
    next. Names of layers, e.g. "block2_*,block3_*": these layers. A number: as little as keeps the
    activations below so many MiB for each replica, e.g. 4096. None: nothing. The results are
    equal. Each image takes up to a third more time, but the same memory holds a larger batch."""
    state_dtype: str = "float32"
    """How the optimizer keeps its moments (states), to save memory. "float32": as Keras keeps them.
    "bfloat16": half the bytes, rounded at random so that small updates are not lost. "8bit": a
    quarter of the bytes, quantized in blocks of 256 values (Dettmers et al. 2022,
    arXiv:2110.02861). Updates are computed in float32. The states of weights with fewer than 4,096
    values stay in float32; with "8bit" those of embeddings, too. For Adam, AdamW, Nadam, LAMB,
    RMSprop, Lion and SGD with momentum."""
    shard_states: bool = False
    """Keep the states of optimizers, such as Adam's momenta, in slices: each replica keeps and
    updates its own one, and the new weights are gathered after each update (ZeRO stage 1). With N
    replicas each needs 1/N of the memory for these states, and another 1/N of that of the weights.
    The results are equal. For optimizers that compute each value by itself: SGD, Adam, AdamW,
    RMSprop, Adagrad, Adadelta, Adamax, Nadam, Ftrl and Lion."""
    reductions: str = "all_replicas"
    """What a sum, mean or other reduction over rows covers in your own losses, layers and steps.
    "all_replicas": the rows of all replicas, as one device computes it. "own_replica": the rows of
    each replica; the replicas' gradients are then averaged. A step that calls all_reduce reduces
    over the replicas by itself, so this setting does not apply to it."""
    allreduce_dtype: str = "own"
    """The dtype in which gradients are summed over the replicas. "own": that of the gradients,
    which is float32 under the mixed policies. "float16" and "bfloat16" halve the bytes, for slow
    networks. float16 keeps three digits but needs a loss scale for small gradients, and bfloat16
    keeps two. `tfaccel underflow` shows the error of both on a batch."""
    loss_scale: str | float = "dynamic"
    """For mixed_float16: "dynamic", or a constant number (then no step is skipped)."""
    loss_scale_initial: float = 2.0**15
    """The first value of a dynamic loss scale."""
    loss_scale_growth_steps: int = 2000
    """Number of finite steps after which a dynamic loss scale is doubled."""
    loss_scale_floor: float = 1e-4  # fairseq's default of --min-loss-scale
    """Training stops with an error when a dynamic loss scale falls below this number."""
    audit_steps: int = 1000
    """Steps between checks that all replicas have the same variables. There is one more check at
    the end. 0 turns the checks off."""
    zero_weight_is_padding: bool = False
    """Treat rows with sample weight 0 (for every output) as padding: loss and metrics ignore them,
    as if they were not in the batch. Layers do not ignore them: batch normalization in training,
    and losses that a layer adds, still see padding rows. Padding rows therefore need values that
    give finite losses."""
    label_smoothing: float = 0.0
    """Smooth labels, e.g. by 0.1. This part of each training label is spread evenly over all
    classes (Szegedy et al. 2016, arXiv:1512.00567). If an image has several classes, each of its
    labels moves towards one half. With label smoothing, mixup or cutmix, the step turns
    whole-number labels into probabilities, [rows, classes] float32. Compile the model with
    CategoricalCrossentropy for them."""
    mixup_alpha: float = 0.0
    """Blend images (mixup), e.g. 0.2. Each training image and its label are blended with the next
    row's, with a weight from Beta(mixup_alpha, mixup_alpha) (Zhang et al. 2018, arXiv:1710.09412).
    0 turns this off."""
    cutmix_alpha: float = 0.0
    """Paste a rectangle of the next row's image into each training image and blend the labels
    accordingly. The rectangle's area is drawn from Beta(cutmix_alpha, cutmix_alpha) (Yun et al.
    2019, arXiv:1905.04899). 0 turns this off. With mixup too, each step chooses one of the two at
    random."""
    cutout_pixels: int = 0
    """Side in pixels of a square in each training image that is set to 0, the mean of normalised
    images (DeVries and Taylor 2017, arXiv:1708.04552). Its centre is a random pixel, and the image
    border cuts it. 0 turns this off. It is applied after mixup and cutmix. Labels, masks and target
    images do not change: a restoration model learns to fill the square."""
    nonfinite: str = "stop"
    """What to do when gradients, or updates of other variables, are infinite or NaN. They are never
    applied. "stop" ends training, at most one execution later, and names the step and the layer.
    "skip" warns and continues. "rollback" restores the last checkpoint and continues with the data
    after the bad step. An overflow of a dynamic loss scale is normal and is not counted. Weights
    that are infinite or NaN always stop training or, with "rollback", restore the checkpoint."""
    max_rollbacks: int = 3
    """Number of rollbacks after which a run stops."""

    def __post_init__(self):
        """Checks every field."""
        check_flag("sync_batchnorm", self.sync_batchnorm)
        check_int("accumulation_steps", self.accumulation_steps, at_least=1)
        object.__setattr__(self, "remat", _remat(self.remat))
        check_choice("state_dtype", self.state_dtype, ("float32", "bfloat16", "8bit"))
        check_flag("shard_states", self.shard_states)
        check_choice("reductions", self.reductions, ("all_replicas", "own_replica"))
        check_choice("allreduce_dtype", self.allreduce_dtype, ("own", "float16", "bfloat16"))
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
        dynamic_only = [each for each in vars(self) if each.startswith("loss_scale_")]
        check_only_with(self, "loss_scale", {"dynamic": dynamic_only})

    @property
    def gradients_as(self) -> str | None:
        """The dtype in which gradients are summed; None for their own."""
        return None if self.allreduce_dtype == "own" else self.allreduce_dtype

    @property
    def mixes_labels(self) -> bool:
        """True if training labels become probabilities over the classes."""
        return any((self.label_smoothing, self.mixup_alpha, self.cutmix_alpha))


def _layer_names(name: str, value) -> tuple[str, ...] | None:
    if value is None:
        return None
    # From the command line: --config.model.float32_layers=conv5_*,predictions
    names = [each.strip() for each in value.split(",")] if isinstance(value, str) else value
    if not isinstance(names, Sequence) or not all(each and isinstance(each, str) for each in names):
        raise UserError(f"{name}={value!r}; expected names of layers, e.g. conv5_*,logits")
    return tuple(names)


def _check_thaws(model: ModelConfig) -> None:
    if model.thaw_epochs is None:
        return
    given = f"thaw_epochs={','.join(model.thaw_epochs)}"
    if model.freeze is None:
        raise UserError(f"{given} without freeze, so that nothing thaws; set freeze or remove it")
    if not all(each.partition(":")[0].isdecimal() for each in model.thaw_epochs):
        raise UserError(f"{given}; expected epochs, with a layer or without, e.g. 2:conv5_*,4")
    epochs = [0, *(epoch for epoch, _ in model.thaws)]
    if sorted(set(epochs)) != epochs:
        raise UserError(f"{given}; expected increasing epochs from 1 on, each only once")


def _remat(value) -> str | int | tuple[str, ...] | None:
    if isinstance(value, str) and value.strip().isdecimal():
        value = int(value)  # from the command line
    if value is None or value == "blocks":
        return value
    if isinstance(value, str) and value.lower() in ("", "none"):
        return None
    if isinstance(value, int) and not isinstance(value, bool) and value > 0:
        return value
    expected = 'expected "blocks", names of layers such as block2_*, or MiB such as 4096'
    is_of_names = isinstance(value, str | Sequence) and len(value) > 0
    if not is_of_names or not all(isinstance(each, str) for each in value):
        raise UserError(f"remat={value!r}; {expected}")
    return _layer_names("remat", value)


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
        raise UserError(f"{name}={value!r}; expected increasing epochs, e.g. (30, 60, 80)")
    for each in value:
        check_number(name, each, above=0)
    if sorted(set(value)) != list(value):
        raise UserError(f"{name}={value!r}; expected increasing epochs, each only once")
    return tuple(value)
