"""Weights of rows, [rows], that weigh all values of a row."""

import functools
from collections.abc import Callable

import tensorflow as tf


def weighing_by_row(reduce_weighted_values: Callable) -> Callable:
    """Returns Keras's reduction of a loss, in which a weight per row weighs all of a row's values.

    Keras lines up weights [rows] with the last axis of values [rows, height, width]: an error, or a
    wrong loss where there are as many rows as columns.
    """

    @functools.wraps(reduce_weighted_values)
    def reduce(values, sample_weight=None, *args, **settings):
        return reduce_weighted_values(values, by_row(sample_weight, values), *args, **settings)

    return reduce


def by_row(sample_weight, values):
    """Returns weights of a loss's values: [rows] with as many axes as they have."""
    is_per_row = sample_weight is not None and len(sample_weight.shape) == 1
    return with_rank(sample_weight, values) if is_per_row else sample_weight


def with_rank(rows: tf.Tensor, like) -> tf.Tensor:
    """Returns [rows] as [rows, 1, ...], with as many axes as another tensor has."""
    return tf.reshape(rows, [-1] + [1] * (len(like.shape) - 1))
