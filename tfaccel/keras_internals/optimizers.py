"""What an optimizer of Keras keeps: its strategy, its updates, its learning rate, its averages."""

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
