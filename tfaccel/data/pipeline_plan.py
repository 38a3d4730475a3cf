"""Computes the length of an epoch of a user's own DALI pipeline, and its padding rows.

`plan_by` takes DALI's description of the pipeline's readers and returns a `PipelinePlan`. This is
pure arithmetic with DALI's own rules, as measured (tests/data/test_user_pipeline.py compares them
with DALI 2.4).

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
    """How many batches of a user's pipeline are an epoch, and which of their rows are padding.

    A DALI reader with pad_last_batch=True makes ceil(largest shard / rows) batches in each pass
    over its shard, and fills the last ones up with copies of its last example. Without it, a reader
    starts its next pass in the middle of a batch. Shard i of R holds the examples from
    floor(i * N / R) to floor((i + 1) * N / R). Without stick_to_shard=True a reader moves to the
    next shard in each pass.

    Attributes:
      num_examples: number of the readers' examples; None for a pipeline without a reader.
      global_batch_size: examples per step over all replicas; a multiple of `num_replicas`.
      num_replicas: number of replicas over all workers.
      num_steps: number of steps in an epoch.
      last_batch: "pad", "drop" or "repeat", as in ImageConfig.
      reader_pads: whether the readers have pad_last_batch=True.
      reader_sticks: whether each reader keeps its shard.
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
        """The number of rows in every batch."""
        return self.global_batch_size // self.num_replicas

    @property
    def batches_per_epoch(self) -> int:
        """The number of batches that the pipeline makes in an epoch, at least `num_steps`."""
        if self.reader_pads:
            return math.ceil(self.num_examples / self.global_batch_size)
        return self.num_steps

    def real(self, *, step: int, epoch: int, replica_index: int) -> np.ndarray:
        """Returns which of one replica's rows of one step are not padding: [rows] bool.

        Args:
          step: the step within the epoch, from 0.
          epoch: the epoch, from 0.
          replica_index: index of the replica over all workers, from 0.
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
    """The batches that one replica reads. DALI chooses their examples.

    Attributes:
      plan: how long an epoch is.
      replica_index: index of the replica over all workers, from 0.
      first: the batch that has number 0, counted from the start of epoch 0.
    """

    plan: PipelinePlan
    replica_index: int
    first: int = 0


def plan_by(
    readers: Mapping, *, global_batch_size: int, num_replicas: int, last_batch: str
) -> PipelinePlan:
    """Returns the plan of a pipeline with readers, which tell how long an epoch is.

    Args:
      readers: DALI's `reader_meta()` of the last replica's pipeline.
      global_batch_size: examples per step over all replicas.
      num_replicas: number of replicas over all workers.
      last_batch: "pad", "drop" or "repeat", as in ImageConfig.

    Raises:
      UserError: a reader is not sharded, readers differ, or they do not suit `last_batch`.
    """
    size, pads, sticks = _agreed(readers, num_replicas)
    even = size % global_batch_size == 0
    if last_batch == "pad" and not (pads or even):
        raise UserError(
            "last_batch='pad' needs a reader that pads its last batch; add pad_last_batch=True to "
            "the reader, or use last_batch='repeat' or 'drop'"
        )
    if last_batch == "drop" and size < global_batch_size:
        raise UserError(
            f"global_batch_size={global_batch_size} is more than the {size} examples, so "
            "last_batch='drop' leaves no batch; use a smaller batch, or last_batch='pad'"
        )
    if last_batch == "repeat" and not even:
        log.info("pipeline: some examples count twice in an epoch, to fill its last batch")
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
    """Returns the readers' epoch_size, pad_last_batch and stick_to_shard if they agree."""
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
            "give all readers the same values, so that an epoch has one length"
        )
    return kinds[0]
