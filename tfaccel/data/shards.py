"""Which example goes where, in pure arithmetic.

Takes the number of examples, the seed and the epoch; gives each replica's rows of each step. The
order is a function of (seed, epoch) alone: step s of an epoch holds the same examples on any
number of replicas. Every batch has the same number of rows. Needs no TensorFlow.

    plan = Plan(num_examples=10, global_batch_size=4, num_replicas=2, seed=0, shuffle=True)
    plan.rows(epoch=3, step=2, replica_index=1)
"""

import dataclasses
import functools
import math

import numpy as np

from tfaccel.common.errors import UserError


def epoch_order(num_examples: int, *, seed: int, epoch: int, shuffle: bool) -> np.ndarray:
    """Returns every example's index once: [num_examples] int64, shuffled anew for each epoch."""
    if not shuffle:
        return np.arange(num_examples)
    # A sequence seeds both numbers independently: (seed 0, epoch 1) is not (seed 1, epoch 0).
    return np.random.default_rng([seed, epoch]).permutation(num_examples)


def part(num_rows: int, *, num_replicas: int, replica_index: int) -> slice:
    """Returns which of a batch's rows are a replica's: consecutive, sizes differ by at most one."""
    start, stop = (num_rows * each // num_replicas for each in (replica_index, replica_index + 1))
    return slice(start, stop)


def check_even(global_batch_size: int, *, num_replicas: int) -> None:
    """Raises UserError unless every replica gets as many rows of a batch as the others."""
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
      ids: [rows] int64, which example each row is.
      positions: [rows] int64, each row's place in the step's global batch: random draws go by it.
      real: [rows] bool; False for padding, which repeats another row of the step.
    """

    ids: np.ndarray
    positions: np.ndarray
    real: np.ndarray


@dataclasses.dataclass(frozen=True)
class Plan:
    """How epochs are cut into steps, and steps into replicas' rows.

    Attributes:
      num_examples: of an epoch.
      global_batch_size: examples per step over all replicas; a multiple of `num_replicas`.
      num_replicas: over all workers.
      seed: of the order.
      shuffle: whether every epoch has a new order.
      last_batch: "pad", "drop" or "repeat", as ImageConfig says.
    """

    num_examples: int
    global_batch_size: int
    num_replicas: int
    seed: int = 0
    shuffle: bool = False
    last_batch: str = "pad"

    def __post_init__(self):
        """Checks that batches come out even, and that there is one."""
        check_even(self.global_batch_size, num_replicas=self.num_replicas)
        if self.num_steps == 0:
            raise UserError(
                f"global_batch_size={self.global_batch_size} is more than the {self.num_examples} "
                "examples, and last_batch='drop' leaves none; use a smaller batch, or 'pad'"
            )

    @property
    def rows_per_replica(self) -> int:
        """The rows of every batch: where it is padded, no more than a replica's examples."""
        rows = self.global_batch_size // self.num_replicas
        if self.last_batch == "repeat":
            return rows  # a whole batch, on any number of replicas
        return min(rows, math.ceil(self.num_examples / self.num_replicas))

    @property
    def num_steps(self) -> int:
        """The steps of an epoch."""
        if self.last_batch == "drop":
            return self.num_examples // self.global_batch_size
        return math.ceil(self.num_examples / self.global_batch_size)

    def num_real(self, step: int) -> int:
        """Returns how many examples a step counts, over all replicas."""
        left = self.num_examples - step * self.global_batch_size
        full = self.rows_per_replica * self.num_replicas
        return full if self.last_batch == "repeat" else min(left, full)

    def rows(self, *, epoch: int, step: int, replica_index: int) -> Rows:
        """Returns one replica's rows of one step.

        A global batch is cut into consecutive parts, in replica order, whose sizes differ by at
        most one; where that is fewer than `rows_per_replica`, padding follows.

        Args:
          epoch: from 0.
          step: of the epoch, from 0.
          replica_index: from 0, over all workers.
        """
        order = _recent_order(self.num_examples, self.seed, epoch, self.shuffle)
        positions = self.positions(step=step, replica_index=replica_index)
        ids = order[(step * self.global_batch_size + positions) % self.num_examples]
        real = self.real(epoch=epoch, step=step, replica_index=replica_index)
        return Rows(ids, positions, real)

    def positions(self, *, step: int, replica_index: int) -> np.ndarray:
        """Returns the place of each of one replica's rows in a step's global batch: [rows] int64.

        Padding repeats the replica's own rows; one that has none takes the step's first.
        """
        own = self._own(step, replica_index)
        return np.resize(own if len(own) else [0], self.rows_per_replica)

    def real(self, *, epoch: int, step: int, replica_index: int) -> np.ndarray:
        """Returns which of one replica's rows of one step are no padding: [rows] bool."""
        return np.arange(self.rows_per_replica) < len(self._own(step, replica_index))

    def _own(self, step: int, replica_index: int) -> np.ndarray:
        """Returns the places in the step's global batch that are a replica's."""
        num_real = self.num_real(step)
        own = part(num_real, num_replicas=self.num_replicas, replica_index=replica_index)
        return np.arange(own.start, own.stop)


@functools.lru_cache(maxsize=4)  # replicas may stand on two sides of an epoch's end
def _recent_order(num_examples: int, seed: int, epoch: int, shuffle: bool) -> np.ndarray:
    return epoch_order(num_examples, seed=seed, epoch=epoch, shuffle=shuffle)
