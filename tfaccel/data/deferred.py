"""The batches of several steps, for a compiled step that does them all in one launch.

Takes what the host decides of each batch, for several of them, or the batches themselves; gives it
to the step, together with what makes a batch of it there.

    deferred, = iterator.take(98)       # one of each replica
    own = {name: each[7] for name, each in deferred.inputs.items()}
    image, label = deferred.make({**own, **deferred.shared})
"""

import dataclasses
import math
from collections.abc import Callable, Mapping

import numpy as np
import tensorflow as tf

from tfaccel.data.feed import Feed


@dataclasses.dataclass(frozen=True)
class Deferred:
    """Batches that the step makes, or takes one after another.

    Attributes:
      inputs: of each batch, by name: [batches, ...], on the replica's device.
      shared: what all batches are made of, by name, on the device.
      make: makes a batch, in a `tf.function`, of one batch's inputs and what is shared. Those that
        do the same are equal, so that a step is compiled once.
      is_made: whether batches are there already, and `make` only takes them apart.
    """

    inputs: Mapping[str, tf.Tensor]
    shared: Mapping[str, tf.Tensor]
    make: Callable[[dict[str, tf.Tensor]], tuple]
    is_made: bool = False

    def __len__(self):
        """Returns how many batches."""
        return len(next(iter(self.inputs.values())))

    def first(self) -> tuple:
        """Returns the first batch."""
        return self.at(0)

    def at(self, index: int) -> tuple:
        """Returns one batch."""
        own = {name: each[index] for name, each in self.inputs.items()}
        return tf.function(self.make, autograph=False)({**own, **self.shared})


def span(feed: Feed, number: int, *, most: int) -> range:
    """Returns which batches of a feed are taken together: consecutive ones, of one epoch.

    Args:
      feed: whose first batch may be in the middle of an epoch.
      number: of the span, from 0.
      most: batches in it.
    """
    num_steps = feed.plan.num_steps
    left = num_steps - feed.first % num_steps  # of the epoch that it begins in
    epoch, part = divmod(int(number) - math.ceil(left / most), math.ceil(num_steps / most))
    if epoch < 0:
        begin, end = int(number) * most, left
    else:
        begin, end = left + epoch * num_steps + part * most, left + (epoch + 1) * num_steps
    return range(begin, min(begin + most, end))


def stacked(batches: list[dict[str, np.ndarray]]) -> dict[str, np.ndarray]:
    """Returns the arrays of several batches as one of each name: [batches, ...]."""
    return {name: np.stack([each[name] for each in batches]) for name in batches[0]}
