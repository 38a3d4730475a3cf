"""How long an epoch of a user's own DALI pipeline is, and which rows of it are padding.

Takes what DALI says of the pipeline's readers; gives a `PipelinePlan`. Pure arithmetic: DALI's own
rules, as measured (tests/data/test_user_pipeline.py holds them against DALI 2.4).

    plan = plan_by(pipeline.reader_meta(), global_batch_size=8, num_replicas=2, last_batch="pad")
    plan.real(epoch=3, step=4, replica_index=1)
"""

import dataclasses
import logging
import math
from collections.abc import Mapping

import numpy as np

from tfaccel.common.errors import UserError
from tfaccel.data.shards import part

log = logging.getLogger("tfaccel")


@dataclasses.dataclass(frozen=True)
class PipelinePlan:
    """How many batches of a user's pipeline are an epoch, and which of their rows count.

    A DALI reader with pad_last_batch=True makes ceil(largest shard / rows) batches of each pass
    over its shard, the last ones filled up with copies of its last example. Without, it goes on
    with the next pass inside a batch. Shard i of R holds the examples floor(i * N / R) to
    floor((i + 1) * N / R); without stick_to_shard=True a reader takes the next one each pass.

    Attributes:
      num_examples: of the readers; None for a pipeline without.
      global_batch_size: examples per step over all replicas; a multiple of `num_replicas`.
      num_replicas: over all workers.
      num_steps: of an epoch.
      last_batch: "pad", "drop" or "repeat", as ImageConfig says.
      reader_pads: whether the readers have pad_last_batch=True.
      reader_sticks: whether each stays with its shard.
    """

    num_examples: int | None
    global_batch_size: int
    num_replicas: int
    num_steps: int
    last_batch: str
    reader_pads: bool = False
    reader_sticks: bool = False

    @property
    def rows_per_replica(self) -> int:
        """The rows of every batch."""
        return self.global_batch_size // self.num_replicas

    @property
    def batches_per_epoch(self) -> int:
        """What the pipeline makes in an epoch: with "drop", more than the steps if it pads."""
        if self.reader_pads:
            return math.ceil(self.num_examples / self.global_batch_size)
        return self.num_steps

    def real(self, *, step: int, epoch: int, replica_index: int) -> np.ndarray:
        """Returns which of one replica's rows of one step count: [rows] bool.

        Args:
          step: of the epoch, from 0.
          epoch: from 0.
          replica_index: from 0, over all workers.
        """
        left = self.rows_per_replica
        if self.reader_pads and self.last_batch == "pad":
            shard = replica_index + (0 if self.reader_sticks else epoch)
            own = part(
                self.num_examples,
                num_replicas=self.num_replicas,
                replica_index=shard % self.num_replicas,
            )
            left = own.stop - own.start - step * self.rows_per_replica
        return np.arange(self.rows_per_replica) < left


@dataclasses.dataclass(frozen=True)
class PipelineFeed:
    """Which batches one replica reads. DALI decides on the examples.

    Attributes:
      plan: how long an epoch is.
      replica_index: from 0, over all workers.
      first: which batch is number 0, counted from the start of epoch 0.
    """

    plan: PipelinePlan
    replica_index: int
    first: int = 0


def plan_by(
    readers: Mapping, *, global_batch_size: int, num_replicas: int, last_batch: str
) -> PipelinePlan:
    """Returns the plan of a pipeline whose readers say how long an epoch is.

    Args:
      readers: what DALI's `reader_meta()` says of each, in the pipeline of the last replica.
      global_batch_size: examples per step over all replicas.
      num_replicas: over all workers.
      last_batch: as ImageConfig says.

    Raises:
      UserError: a reader is not sharded, they differ, or they do not suit `last_batch`.
    """
    size, pads, sticks = _agreed(readers, num_replicas)
    even = size % global_batch_size == 0
    if last_batch == "pad" and not (pads or even):
        raise UserError(
            "last_batch='pad' for a pipeline whose reader runs on into the next epoch; add "
            "pad_last_batch=True to it, or give last_batch='repeat' or 'drop'"
        )
    if last_batch == "drop" and size < global_batch_size:
        raise UserError(
            f"global_batch_size={global_batch_size} is more than the {size} examples, and "
            "last_batch='drop' leaves none; use a smaller batch, or 'pad'"
        )
    if last_batch == "repeat" and not even:
        log.info("pipeline: an epoch counts some examples again, to fill its last batch")
    whole = math.floor if last_batch == "drop" else math.ceil
    return PipelinePlan(
        num_examples=size,
        global_batch_size=global_batch_size,
        num_replicas=num_replicas,
        num_steps=whole(size / global_batch_size),
        last_batch=last_batch,
        reader_pads=bool(pads),
        reader_sticks=bool(sticks),
    )


def _agreed(readers: Mapping, num_replicas: int) -> tuple[int, int, int]:
    """Returns the readers' length, and whether they pad and stick to their shard."""
    last = num_replicas - 1
    for meta in readers.values():
        if (meta["number_of_shards"], meta["shard_id"]) != (num_replicas, last):
            raise UserError(
                f"a reader reads shard {meta['shard_id']} of {meta['number_of_shards']} on replica "
                f"{last} of {num_replicas}; add shard_id=shard_id, num_shards=num_shards to it, "
                "and both to the parameters of the pipeline's function"
            )
    keys = ("epoch_size", "pad_last_batch", "stick_to_shard")
    kinds = sorted({tuple(meta[key] for key in keys) for meta in readers.values()})
    if len(kinds) > 1:
        raise UserError(
            f"the pipeline's readers differ in ({', '.join(keys)}): {kinds[0]} and {kinds[1]}; "
            "make them alike, or an epoch has no one length"
        )
    return kinds[0]
