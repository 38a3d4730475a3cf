"""The rows that a loader gave each replica in an epoch, as arrays.

epoch = Epoch.of([[(ids, real, None)], [(ids, real, None)]])    # two steps of one replica
"""

import dataclasses
from collections.abc import Sequence

import numpy as np


@dataclasses.dataclass(frozen=True)
class Epoch:
    """The rows of one epoch. If a batch has fewer rows than others, its last rows are not real.

    Attributes:
      ids: [steps, replicas, rows] int64, the example in each row.
      real: [steps, replicas, rows] bool; False for padding rows.
      draws: [steps, replicas, rows] int64, a fingerprint of each row's random numbers; None if
        nothing is drawn.
      num_rows: [steps, replicas] int64, the number of rows in each batch, including padding.
    """

    ids: np.ndarray
    real: np.ndarray
    draws: np.ndarray | None
    num_rows: np.ndarray

    @classmethod
    def of(cls, steps: Sequence[Sequence[tuple]]) -> "Epoch":
        """Returns the epoch with the given steps.

        Args:
          steps: for each step, for each replica: ids [rows], real [rows], and fingerprints [rows]
            or None.
        """
        num_replicas = max(map(len, steps))
        num_rows = np.zeros((len(steps), num_replicas), np.int64)
        for step, batches in enumerate(steps):
            num_rows[step, : len(batches)] = [len(ids) for ids, _, _ in batches]
        shape = (*num_rows.shape, num_rows.max())
        ids, real, draws = np.zeros(shape, np.int64), np.zeros(shape, bool), np.zeros(shape, int)
        for step, batches in enumerate(steps):
            for replica, batch in enumerate(batches):
                for array, part in zip((ids, real, draws), batch, strict=True):
                    if part is not None:
                        array[step, replica, : len(part)] = part
        is_random = steps[0][0][2] is not None
        return cls(ids, real, draws if is_random else None, num_rows)
