"""Decides which replica reads which example at which step, in pure arithmetic.

The order of the examples depends on (seed, epoch) alone, and step s of an epoch has the same
examples for any number of replicas. Every batch has the same number of rows. With a sampling, the
order depends on the labels, too. Needs no TensorFlow.

    plan = Plan(num_examples=10, global_batch_size=4, num_replicas=2, seed=0, shuffle=True)
    plan.rows(epoch=3, step=2, replica_index=1)
"""

import dataclasses
import functools
import math
import threading

import numpy as np

from tfaccel.common.errors import UserError
from tfaccel.data.sampling import ClassSampling


def epoch_order(num_examples: int, *, seed: int, epoch: int, shuffle: bool) -> np.ndarray:
    """Returns all examples' indices: [num_examples] int64, in a new order for each epoch."""
    if not shuffle:
        return np.arange(num_examples)
    # NumPy mixes both numbers independently: (seed 0, epoch 1) differs from (seed 1, epoch 0).
    return np.random.default_rng([seed, epoch]).permutation(num_examples)


_recent_order = functools.lru_cache(maxsize=4)(epoch_order)  # replicas may be in two epochs at once
_recent_sample = functools.lru_cache(maxsize=4)(ClassSampling.order)
_sampling = threading.Lock()  # the replicas' threads ask at once, and one of them sorts


def part(num_rows: int, *, num_replicas: int, replica_index: int) -> slice:
    """Returns a replica's rows of a batch: consecutive rows, and sizes differ by at most one."""
    start, stop = (num_rows * each // num_replicas for each in (replica_index, replica_index + 1))
    return slice(start, stop)


def check_even(global_batch_size: int, *, num_replicas: int) -> None:
    """Raises UserError unless every replica gets the same number of rows of a batch."""
    below = global_batch_size // num_replicas * num_replicas
    if below != global_batch_size:
        fix = f"{below} or {below + num_replicas}" if below else f"{num_replicas}"
        raise UserError(
            f"global_batch_size={global_batch_size} is not divisible by {num_replicas} replicas; "
            f"use {fix}"
        )


@dataclasses.dataclass(frozen=True)
class Rows:
    """One replica's rows of one step.

    Attributes:
      ids: [rows] int64, the example in each row.
      positions: [rows] int64, each row's place in the step's global batch, which random draws use.
      real: [rows] bool; False for a padding row, which repeats another row of the step.
    """

    ids: np.ndarray
    positions: np.ndarray
    real: np.ndarray


@dataclasses.dataclass(frozen=True)
class Plan:
    """How epochs are cut into steps, and steps into replicas' rows.

    Attributes:
      num_examples: number of examples in an epoch.
      global_batch_size: examples per step over all replicas; a multiple of `num_replicas`.
      num_replicas: number of replicas over all workers.
      seed: seed of the order.
      shuffle: whether every epoch has a new order.
      last_batch: "pad", "drop" or "repeat", as in ImageConfig.
      sampling: what draws each epoch's `num_examples` rows; None for each example once.
    """

    num_examples: int
    global_batch_size: int
    num_replicas: int
    seed: int = 0
    shuffle: bool = False
    last_batch: str = "pad"
    sampling: ClassSampling | None = None

    def __post_init__(self):
        """Checks that all replicas get equal batches, and that an epoch has a batch."""
        check_even(self.global_batch_size, num_replicas=self.num_replicas)
        if self.num_steps == 0:
            raise UserError(
                f"global_batch_size={self.global_batch_size} is more than the {self.num_examples} "
                "examples, so last_batch='drop' leaves no batch; use a smaller batch, or "
                "last_batch='pad'"
            )

    @property
    def rows_per_replica(self) -> int:
        """The rows of every batch; a padded batch has no more rows than a replica has examples."""
        rows = self.global_batch_size // self.num_replicas
        if self.last_batch == "repeat":
            return rows  # a whole batch, for any number of replicas
        return min(rows, math.ceil(self.num_examples / self.num_replicas))

    @property
    def num_steps(self) -> int:
        """The number of steps in an epoch."""
        if self.last_batch == "drop":
            return self.num_examples // self.global_batch_size
        return math.ceil(self.num_examples / self.global_batch_size)

    def num_real(self, step: int) -> int:
        """Returns how many rows of a step are not padding, over all replicas."""
        left = self.num_examples - step * self.global_batch_size
        full = self.rows_per_replica * self.num_replicas
        return full if self.last_batch == "repeat" else min(left, full)

    def rows(self, *, epoch: int, step: int, replica_index: int) -> Rows:
        """Returns one replica's rows of one step.

        A global batch is cut into consecutive parts, in replica order. Their sizes differ by at
        most one. A part that is smaller than `rows_per_replica` is followed by padding rows.

        Args:
          epoch: the epoch, from 0.
          step: the step within the epoch, from 0.
          replica_index: index of the replica over all workers, from 0.
        """
        order = self._order(epoch)
        positions = self.positions(step=step, replica_index=replica_index)
        ids = order[(step * self.global_batch_size + positions) % self.num_examples]
        real = self.real(epoch=epoch, step=step, replica_index=replica_index)
        return Rows(ids, positions, real)

    def positions(self, *, step: int, replica_index: int) -> np.ndarray:
        """Returns the places of one replica's rows in a step's global batch: [rows] int64.

        Padding rows repeat the replica's own rows, or the step's first row if it has no own rows.
        """
        own = self._own(step, replica_index)
        return np.resize(own if len(own) else [0], self.rows_per_replica)

    def real(self, *, epoch: int, step: int, replica_index: int) -> np.ndarray:
        """Returns which of one replica's rows of one step are not padding: [rows] bool."""
        return np.arange(self.rows_per_replica) < len(self._own(step, replica_index))

    def _order(self, epoch: int) -> np.ndarray:
        if self.sampling is None:
            return _recent_order(
                self.num_examples, seed=self.seed, epoch=epoch, shuffle=self.shuffle
            )
        with _sampling:
            return _recent_sample(self.sampling, seed=self.seed, epoch=epoch)

    def _own(self, step: int, replica_index: int) -> np.ndarray:
        """Returns a replica's places in the step's global batch, without padding."""
        num_real = self.num_real(step)
        own = part(num_real, num_replicas=self.num_replicas, replica_index=replica_index)
        return np.arange(own.start, own.stop)
