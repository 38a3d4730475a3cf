"""Decides which examples one replica's stream reads next, and with which random draws.

A `Feed` takes the plan of all epochs and the augmentation, and gives the rows and draws of batch
0, 1, 2, ... without end. Every loader reads from a feed and makes no such decision itself.

    feed = Feed(plan, augment, image_size=(32, 32), replica_index=0)
    feed.rows(7).ids, feed.draws(7)["warp"]
"""

import dataclasses

import numpy as np

from tfaccel.config import AugmentConfig
from tfaccel.data import draws as draws_lib
from tfaccel.data.shards import Plan, Rows


@dataclasses.dataclass(frozen=True)
class Feed:
    """One replica's batches, by number. A feed owns no resources.

    Attributes:
      plan: how epochs are cut into steps and rows.
      augment: the settings of the augmentation.
      image_size: (height, width) of the batches.
      replica_index: index of the replica over all workers, from 0.
      first: the batch that has number 0, counted from the start of epoch 0.
      lost: ids of examples that can no longer be read; their rows become padding rows.
    """

    plan: Plan
    augment: AugmentConfig
    image_size: tuple[int, int]
    replica_index: int
    first: int = 0
    lost: frozenset[int] = frozenset()

    def rows(self, number: int) -> Rows:
        """Returns the examples of a batch."""
        epoch, step = divmod(self.first + int(number), self.plan.num_steps)
        rows = self.plan.rows(epoch=epoch, step=step, replica_index=self.replica_index)
        gone = np.isin(rows.ids, list(self.lost)) if self.lost else None
        if gone is None or not gone.any():
            return rows
        readable = next(each for each in range(self.plan.num_examples) if each not in self.lost)
        return Rows(np.where(gone, readable, rows.ids), rows.positions, rows.real & ~gone)

    def draws(self, number: int) -> dict[str, np.ndarray]:
        """Returns the random draws of a batch: see `draws.draw`."""
        epoch, step = divmod(self.first + int(number), self.plan.num_steps)
        return draws_lib.draw(
            self.augment,
            image_size=self.image_size,
            seed=self.plan.seed,
            epoch=epoch,
            step=step,
            positions=self.plan.positions(step=step, replica_index=self.replica_index),
        )
