"""What an optimizer of Keras keeps: its strategy, its updates, its learning rate, its averages."""

from collections.abc import Sequence

import keras
import tensorflow as tf


def belongs_to(optimizer: keras.optimizers.Optimizer, strategy: tf.distribute.Strategy) -> bool:
    """Returns whether the updates of an optimizer go through this strategy."""
    return optimizer._distribution_strategy is strategy


def give_to(optimizer: keras.optimizers.Optimizer, strategy: tf.distribute.Strategy) -> None:
    """Lets the updates of an optimizer go through this strategy."""
    optimizer._distribution_strategy = strategy


def weights_of(optimizer: keras.optimizers.Optimizer) -> list:
    """Returns the weights that an optimizer was built for; none before."""
    inner = getattr(optimizer, "inner_optimizer", optimizer)  # of a LossScaleOptimizer
    return list(inner._trainable_variables) if inner.built else []


def num_updates(optimizer: keras.optimizers.Optimizer) -> tf.Tensor:
    """Returns the number of updates made, int64. A step that the loss scale skips is not counted.

    Call it while a step is traced.
    """
    inner = getattr(optimizer, "inner_optimizer", optimizer)  # of a LossScaleOptimizer
    return tf.cast(inner._iterations._value, tf.int64)


def schedule_of(optimizer: keras.optimizers.Optimizer):
    """Returns the learning rate that an optimizer was given: a schedule, or a variable."""
    return optimizer._learning_rate


def averaged_weights(optimizer: keras.optimizers.Optimizer) -> list[tuple]:
    """Returns (weight, moving average) of each weight that an optimizer averages, in Keras."""
    pairs = zip(
        optimizer._trainable_variables, optimizer._model_variables_moving_average, strict=True
    )
    return [(weight, average) for weight, average in pairs if average is not None]


def scale_rate(
    optimizer: keras.optimizers.Optimizer, weights: Sequence[keras.Variable], factor: float
) -> None:
    """Lets some weights learn with `factor` times the learning rate, also in their weight decay.

    Keras has no rate for each weight. A scaled gradient would not do: Adam divides by its size. So
    the rate that each update gets is scaled. Clipping by the norm of all gradients, moments and
    averages stay as they are.

    Args:
      optimizer: not in use yet, and not a LossScaleOptimizer, which can be put around it.
      weights: of the model that it will train.
      factor: above 0.
    """
    update, decay = optimizer.update_step, optimizer._apply_weight_decay
    chosen = {id(each) for each in weights}

    def is_chosen(variable) -> bool:
        place = optimizer._get_variable_index(variable)  # also of a replica's tf.Variable
        return id(optimizer._trainable_variables[place]) in chosen

    def update_step(gradient, variable, learning_rate):
        rate = learning_rate * factor if is_chosen(variable) else learning_rate
        return update(gradient, variable, rate)

    def apply_weight_decay(variables):
        decay([each for each in variables if not is_chosen(each)])
        before = {name: getattr(optimizer, name, None) for name in _DECAYS}
        try:
            for name, value in before.items():
                if value is not None:  # it is multiplied by the optimizer's one rate
                    setattr(optimizer, name, value * factor)
            decay([each for each in variables if is_chosen(each)])
        finally:
            for name, value in before.items():
                if value is not None:
                    setattr(optimizer, name, value)

    optimizer.update_step, optimizer._apply_weight_decay = update_step, apply_weight_decay


_DECAYS = ("weight_decay", "adam_weight_decay")  # the second is Muon's
