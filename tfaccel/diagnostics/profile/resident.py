"""Gives the step the same batches on the device again and again, so that nothing is loaded.

This module takes a batch from a loader's iterator. It gives an endless iterator that looks like the
loader's to the step. If a launch of the loader has several steps, so has a launch of this iterator.

    model.train_function(Resident(next(iter(loader)), pads=loader.pads))
"""

import dataclasses
from collections.abc import Iterator, Sequence

import tensorflow as tf

from tfaccel.data.deferred import Deferred


class Resident:
    """An endless iterator of one batch.

    Attributes:
      pads: True if the loader pads its batches: rows of weight 0 are padding rows.
    """

    def __init__(
        self, batch: tuple, *, pads: bool, parts: Sequence[tuple] | None = None, most: int = 1
    ):
        """Keeps the batch.

        Args:
          batch: (x, y) or (x, y, weight), of one replica or distributed.
          pads: True if rows of weight 0 are padding rows.
          parts: each replica's part of the batch if a launch has several steps; None if each step
            has its own launch.
          most: the largest number of steps in a launch.
        """
        self._batch, self.pads, self._parts, self._most = batch, pads, parts, most

    def __iter__(self) -> Iterator:
        """Returns itself."""
        return self

    def __next__(self) -> tuple:
        """Returns the batch."""
        return self._batch

    def take(self, most: int, *, may_wait: bool = True) -> list[Deferred] | None:
        """Returns the batches of a launch for each replica; None if each step has its launch."""
        return self._parts and [_deferred(each, min(most, self._most)) for each in self._parts]


class ResidentLaunch:
    """Gives the batches of one launch again and again, so that the step is not compiled again.

    Attributes:
      pads: True if the loader pads its batches.
    """

    def __init__(self, deferred: list[Deferred], *, pads: bool):
        """Keeps each replica's batches, which are already made."""
        self._deferred, self.pads = deferred, pads

    def take(self, most: int, *, may_wait: bool = True) -> list[Deferred]:
        """Returns the batches; ignores how many the step asks for."""
        return self._deferred


def _deferred(part: tuple, number: int) -> Deferred:
    leaves = tf.nest.flatten(part)
    with tf.device(leaves[0].device):
        inputs = {"step": tf.zeros(number)}
    structure = tf.nest.map_structure(lambda leaf: None, part)
    shared = {str(index): each for index, each in enumerate(leaves)}
    return Deferred(inputs, shared, _Again(structure))


@dataclasses.dataclass(frozen=True)
class _Again:
    """Makes the batch from its tensors.

    It is a dataclass, so equal objects count as the same function, and a step is compiled once.
    """

    structure: tuple

    def __call__(self, tensors: dict[str, tf.Tensor]) -> tuple:
        leaves = [tensors[str(index)] for index in range(len(tf.nest.flatten(self.structure)))]
        return tf.nest.pack_sequence_as(self.structure, leaves)
