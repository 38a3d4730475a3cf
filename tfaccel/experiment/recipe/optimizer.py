"""Makes an optimizer by name with the recipe's settings, or raises if it lacks one of them.

optimizer = make_optimizer(config.train, schedule)
"""

import inspect

import keras

from tfaccel.common.errors import UserError
from tfaccel.config import TrainConfig
from tfaccel.config.names import NO_OPTIMIZERS, check_among
from tfaccel.experiment.recipe.schedule import LearningRate

# Keras searches for this pattern in the name of each replica's tf.Variable, for example
# "resnet/bias_conv/kernel/replica_1:0". Only the last part is the variable's own name. "scale" is
# that of RMSNormalization.
NOT_DECAYED = r"(^|/)(bias|gamma|beta|scale)(/replica_\d+)?(:\d+)?$"


def make_optimizer(train: TrainConfig, schedule: LearningRate) -> keras.optimizers.Optimizer:
    """Returns the optimizer. Weight decay applies only to kernels and embeddings.

    Args:
      train: the recipe.
      schedule: the schedule of the learning rate. A constant one becomes a plain number, which
        ReduceLROnPlateau and `optimizer.learning_rate = ...` can change.

    Raises:
      UserError: Keras has no optimizer of that name, or the optimizer lacks a setting.
    """
    kind = find(train.optimizer)
    takes = inspect.signature(kind.__init__).parameters
    settings = _settings(train)
    for name, value in settings.items():
        if name not in takes:
            raise UserError(
                f"{name}={value!r}, but {train.optimizer} has no {name}; remove it, or use an "
                f"optimizer that has it: {_that_take(name)}"
            )
    if "weight_decay" in settings and "adam_weight_decay" in takes:
        settings["adam_weight_decay"] = train.weight_decay  # Muon's, for all that is not a matrix
    rate = schedule.peak if schedule.is_constant else schedule
    optimizer = kind(learning_rate=rate, **settings)
    if train.nesterov and not optimizer.momentum:  # Keras would ignore nesterov
        raise UserError(
            f"nesterov=True with momentum={train.momentum}; set momentum, for example to 0.9"
        )
    optimizer.exclude_from_weight_decay(var_names=[NOT_DECAYED])
    return optimizer


def _settings(train: TrainConfig) -> dict:
    """Returns the settings that the recipe gives; for the others Keras's defaults apply."""
    settings = {}
    if train.momentum is not None:
        settings["momentum"] = float(train.momentum)  # Keras refuses an integer
    if train.nesterov:
        settings["nesterov"] = True
    if train.weight_decay is not None:
        settings["weight_decay"] = train.weight_decay
    if train.global_clipnorm is not None:
        settings["global_clipnorm"] = train.global_clipnorm
    if train.ema_momentum is not None:
        settings |= {"use_ema": True, "ema_momentum": train.ema_momentum}
    return settings


def find(name: str) -> type:
    """Returns Keras's optimizer of that name, in upper or lower case.

    Raises:
      UserError: there is none.
    """
    known = _known()
    check_among("optimizer", name, known)
    return known[name.lower()]


def _known() -> dict[str, type]:
    return {
        name.lower(): value
        for name, value in vars(keras.optimizers).items()
        if isinstance(value, type) and name not in NO_OPTIMIZERS
    }


def _that_take(setting: str) -> str:
    kinds = _known().items()
    return ", ".join(
        name for name, kind in kinds if setting in inspect.signature(kind.__init__).parameters
    )
