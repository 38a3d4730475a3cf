"""A training program as people write it: a model, its data, and what it is compiled with.

Each program is small and runs in three ways: on stock Keras on one device, which is the reference,
and here on one or more replicas. Its random numbers are part of its data, or are drawn by row, so
that the number of replicas does not change them.
"""

import dataclasses
from collections.abc import Callable, Mapping

import keras
import numpy as np
import tensorflow as tf
from keras import layers

from tfaccel import collectives


@dataclasses.dataclass(frozen=True)
class Program:
    """One program.

    Attributes:
      name: for the table, such as "GAN".
      source: which of keras.io's examples, or which paper, has this shape.
      make: returns the model, built (every variable exists), not compiled. It is called once for
        each run, behind `keras.utils.set_random_seed`.
      data: returns what `fit` takes as `x`: arrays, or a tuple (x, y) or (x, y, weight), of
        `num_rows` rows; or a `tf.data.Dataset` of such tuples, in batches.
      compile: returns the arguments of `compile`, with new optimizers, losses and metrics.
      batch_size: rows of a step. It need not be divisible by the number of replicas.
      epochs: of the whole run.
      rtol: relative tolerance of weights and logs, with a tolerance of a tenth of it for zeros.
      stock_fails: why stock Keras cannot run it, if it cannot; the reference is then `reference`.
      reference: trains the model without `fit`, by hand, on one device, and returns its logs.
      fit: further arguments of `fit`, such as class_weight.
      again: changes the trained model, which is then compiled and trained once more; None to train
        once.
    """

    name: str
    source: str
    make: Callable[[], keras.Model]
    data: Callable[[], tuple | tf.data.Dataset]
    compile: Callable[[], Mapping]
    batch_size: int = 6
    epochs: int = 2
    rtol: float = 1e-4
    stock_fails: str = ""
    reference: Callable[[keras.Model], dict] | None = None
    fit: Mapping = dataclasses.field(default_factory=dict)
    again: Callable[[keras.Model], None] | None = None


def normal(seed: int, *shape: int) -> np.ndarray:
    """Returns normal random numbers: float32, always the same for a seed and a shape."""
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def numbers(seed: int, end: int, *shape: int) -> np.ndarray:
    """Returns whole random numbers in [0, end): int32, always the same for a seed and a shape."""
    return np.random.default_rng(seed).integers(0, end, shape).astype(np.int32)


def network(inputs: int = 4, outputs: int = 2, width: int = 5, **settings) -> keras.Sequential:
    """Returns a small network with one hidden layer, of these settings, built."""
    return keras.Sequential(
        [keras.Input((inputs,)), layers.Dense(width, "tanh", **settings), layers.Dense(outputs)]
    )


def gather():
    """Returns the function that gathers rows; on stock Keras on one device, it returns its rows.

    Call it where the model is made, because a step runs in the scope of no strategy.
    """
    return collectives.all_gather if tf.distribute.has_strategy() else tf.convert_to_tensor
