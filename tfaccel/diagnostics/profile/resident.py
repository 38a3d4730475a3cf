"""Batches on the device, given to the step again and again: what trains when nothing is loaded.

Takes what a loader's iterator gives; gives an iterator without end that the step cannot tell from
it, in one launch for several steps where the loader's own are.

    model.train_function(Resident(next(iter(loader)), pads=loader.pads))
"""

import dataclasses
from collections.abc import Iterator, Sequence

import tensorflow as tf

from tfaccel.data.deferred import Deferred


class Resident:
    """The same batch without end.

    Attributes:
      pads: as the loader's iterator.
    """

    def __init__(
        self, batch: tuple, *, pads: bool, parts: Sequence[tuple] | None = None, most: int = 1
    ):
        """Keeps the batch.

        Args:
          batch: (x, y) or (x, y, weight), of one replica or distributed.
          pads: whether rows of weight 0 are padding.
          parts: of each replica, where several steps are one launch; None where each has its own.
          most: steps of such a launch.
        """
        self._batch, self.pads, self._parts, self._most = batch, pads, parts, most

    def __iter__(self) -> Iterator:
        """Returns itself."""
        return self

    def __next__(self) -> tuple:
        """Returns the batch."""
        return self._batch

    def take(self, most: int, *, may_wait: bool = True) -> list[Deferred] | None:
        """Returns the batch as often as a launch has it, of each replica; or None."""
        return self._parts and [_deferred(each, min(most, self._most)) for each in self._parts]


class ResidentLaunch:
    """The same batches of one launch without end, so that its step is not compiled once more.

    Attributes:
      pads: as the loader's iterator.
    """

    def __init__(self, deferred: list[Deferred], *, pads: bool):
        """Keeps each replica's batches, which are there already."""
        self._deferred, self.pads = deferred, pads

    def take(self, most: int, *, may_wait: bool = True) -> list[Deferred]:
        """Returns them, however many are asked for."""
        return self._deferred


def _deferred(part: tuple, number: int) -> Deferred:
    leaves = tf.nest.flatten(part)
    with tf.device(leaves[0].device):
        inputs = {"step": tf.zeros(number)}
    structure = tf.nest.map_structure(lambda leaf: None, part)
    return Deferred(inputs, _numbered(leaves), _Again(structure))


def _numbered(leaves: Sequence[tf.Tensor]) -> dict[str, tf.Tensor]:
    return {str(index): each for index, each in enumerate(leaves)}


@dataclasses.dataclass(frozen=True)
class _Again:
    """Makes the batch of its leaves. Equal ones are one function: a step is compiled once."""

    structure: tuple

    def __call__(self, tensors: dict[str, tf.Tensor]) -> tuple:
        leaves = [tensors[str(index)] for index in range(len(tf.nest.flatten(self.structure)))]
        return tf.nest.pack_sequence_as(self.structure, leaves)
