"""The batches of several steps, for a compiled step that trains on all of them in one launch.

A `Deferred` holds either finished batches, or the host's decisions about each batch and a function
that makes the batch inside the compiled step.

    deferred, = iterator.take(98)       # one for each replica
    own = {name: each[7] for name, each in deferred.inputs.items()}
    image, label = deferred.make({**own, **deferred.shared})
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping

import numpy as np
import tensorflow as tf

from tfaccel.data.feed import Feed


@dataclasses.dataclass(frozen=True)
class Deferred:
    """Batches that the step makes, or takes one after another.

    Attributes:
      inputs: each batch's own inputs, by name: [batches, ...], on the replica's device.
      shared: the inputs that all batches share, by name, on the replica's device.
      make: makes a batch from one batch's inputs and the shared ones, inside a `tf.function`. Two
        functions that do the same are equal, so that the step is compiled once.
      is_made: whether the batches exist already, and `make` only takes them apart.
    """

    inputs: Mapping[str, tf.Tensor]
    shared: Mapping[str, tf.Tensor]
    make: Callable[[dict[str, tf.Tensor]], tuple]
    is_made: bool = False

    def __len__(self):
        """Returns the number of batches."""
        return len(next(iter(self.inputs.values())))

    def specs(self) -> list[tf.TensorSpec]:
        """Returns the specs of one batch's inputs."""
        return [tf.TensorSpec(each.shape[1:], each.dtype) for each in self.inputs.values()]

    def cut(self, number: int) -> "Deferred":
        """Returns the first batches."""
        inputs = {name: each[:number] for name, each in self.inputs.items()}
        return dataclasses.replace(self, inputs=inputs)

    def first(self) -> tuple:
        """Returns the first batch."""
        return self.at(0)

    def at(self, index: int) -> tuple:
        """Returns one batch."""
        own = {name: each[index] for name, each in self.inputs.items()}
        make = functools.partial(self.make)  # a new one, or TensorFlow warns of retracing
        return tf.function(make, autograph=False)({**own, **self.shared})


def dividing(most: int, fit: int) -> tuple[int, str]:
    """Returns the largest divisor of `most` up to `fit`, at least 1, and advice if it is 1.

    Args:
      most: the steps of an execution.
      fit: the batches for which there is room.

    Returns:
      The number of batches of a launch, and the end of a sentence that says why; "" if it is not 1.
    """
    number = max((each for each in range(1, fit + 1) if most % each == 0), default=1)
    if number > 1 or fit <= 1:
        return number, ""
    return 1, f", and no smaller number divides {most}; use steps_per_execution with divisors"


def span(feed: Feed, number: int, *, most: int) -> range:
    """Returns the numbers of the batches in one span: consecutive batches of one epoch.

    Args:
      feed: one replica's batches; the first may be in the middle of an epoch.
      number: the span's number, from 0.
      most: the largest number of batches in a span.
    """
    num_steps = feed.plan.num_steps
    left = num_steps - feed.first % num_steps  # batches in the rest of the first epoch
    epoch, part = divmod(int(number) - math.ceil(left / most), math.ceil(num_steps / most))
    if epoch < 0:
        begin, end = int(number) * most, left
    else:
        begin, end = left + epoch * num_steps + part * most, left + (epoch + 1) * num_steps
    return range(begin, min(begin + most, end))


def stacked(batches: list[dict[str, np.ndarray]]) -> dict[str, np.ndarray]:
    """Returns the arrays of several batches, stacked by name: [batches, ...]."""
    return {name: np.stack([each[name] for each in batches]) for name in batches[0]}
