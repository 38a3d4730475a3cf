"""Which example goes where, in pure arithmetic.

Takes the number of examples, the seed and the epoch; gives each replica's rows of each step. The
order is a function of (seed, epoch) alone: step s of an epoch holds the same examples on any
number of replicas. Needs no TensorFlow.

    order = epoch_order(10, seed=0, epoch=3, shuffle=True)
    replica_batch(order, step=2, global_batch_size=4, num_replicas=2, replica_index=1)
"""

import math

import numpy as np


def epoch_order(num_examples: int, *, seed: int, epoch: int, shuffle: bool) -> np.ndarray:
    """Returns every example's index once: [num_examples] int64, shuffled anew for each epoch."""
    if not shuffle:
        return np.arange(num_examples)
    # A sequence seeds both numbers independently: (seed 0, epoch 1) is not (seed 1, epoch 0).
    return np.random.default_rng([seed, epoch]).permutation(num_examples)


def num_steps(num_examples: int, *, global_batch_size: int) -> int:
    """Returns the steps of an epoch; a partial last one counts."""
    return math.ceil(num_examples / global_batch_size)


def replica_batch(
    order: np.ndarray,
    *,
    step: int,
    global_batch_size: int,
    num_replicas: int,
    replica_index: int,
) -> np.ndarray:
    """Returns one replica's indices for one step of an epoch.

    A global batch is cut into `num_replicas` consecutive parts, in replica order, whose sizes
    differ by at most one.

    Args:
      order: [num_examples] int64, the epoch's order.
      step: of the epoch, from 0.
      global_batch_size: examples per step over all replicas; a multiple of `num_replicas`.
      num_replicas: over all workers.
      replica_index: from 0, over all workers.

    Returns:
      [global_batch_size / num_replicas] int64; fewer in a partial last batch, down to none.
    """
    batch = order[step * global_batch_size : (step + 1) * global_batch_size]
    return batch[part(len(batch), num_replicas=num_replicas, replica_index=replica_index)]


def part(num_rows: int, *, num_replicas: int, replica_index: int) -> slice:
    """Returns which of a batch's rows are a replica's."""
    start, stop = (num_rows * each // num_replicas for each in (replica_index, replica_index + 1))
    return slice(start, stop)
