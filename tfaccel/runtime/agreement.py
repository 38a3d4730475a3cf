"""Compares values between all workers, so that all workers decide the same.

A worker that sees one file fewer than the others would have shorter epochs, and the others would
wait for it for ever. A worker that resumed from another step would train another model.

    check_same({"number of examples": 60000, "files": "5f0c..."}, strategy, of="their data")
    any_worker = AnyWorker(strategy)
    (stop,) = any_worker.says(own_flag)  # in the same step on every worker
    rounds = math.ceil(1.0 / slowest(own_seconds, strategy))
    with together(strategy, "could not write"): ...     # an error on one worker ends all workers
"""

import contextlib
import functools
import hashlib
import math
import time
from collections.abc import Iterator, Mapping

import numpy as np
import tensorflow as tf

from tfaccel.common.errors import RunError, UserError
from tfaccel.process import progress
from tfaccel.runtime import collectives

MOST_FACTS = 8  # a collective needs vectors of equal length
# Each vector is padded to a multiple of this length, so that few lengths are traced.
LENGTH = 16
# A signal reaches the other workers after this time at most. One exchange takes about 1 ms: 0.4%.
ASK_EVERY_S = 0.25
MOST_CALLS = 50  # also 0.25 s, for steps of 5 ms


def check_same(facts: Mapping[str, object], strategy: tf.distribute.Strategy, *, of: str) -> None:
    """Raises UserError unless all workers have equal facts. Every worker must call it.

    Args:
      facts: the values to compare, by name. Values with equal `repr` are equal.
      strategy: the strategy over all workers.
      of: what the facts describe, for the message.
    """
    # Other kinds of data have other facts, so the names of the facts are compared, too.
    facts = {"kind": tuple(facts), **facts}
    numbers = np.zeros(MOST_FACTS, np.int64)
    for place, each in enumerate(facts.values()):
        digest = hashlib.blake2b(repr(each).encode(), digest_size=8).digest()
        numbers[place] = int.from_bytes(digest, signed=True)
    found = of_workers(numbers, strategy)
    for (name, own), column in zip(facts.items(), found.T, strict=False):
        if len(set(column.tolist())) > 1:
            raise UserError(
                f"workers differ in the {name} of {of}: here it is {own}; give every worker the "
                "same files, settings and seed"
            )


def of_workers(vector: np.ndarray, strategy: tf.distribute.Strategy) -> np.ndarray:
    """Returns the vectors of all workers, [workers, n] from [n]. Every worker must call it."""
    num_local = len(strategy.extended.worker_devices)
    if num_local == strategy.num_replicas_in_sync:
        return vector[np.newaxis]
    sent = vector.astype(np.int64) if vector.dtype == bool else vector
    sent = np.pad(sent, (0, -len(sent) % LENGTH))
    gathered = _gather(strategy)(tf.constant(sent[np.newaxis]))
    # Each worker's vector appears once for each of its replicas.
    return gathered.numpy()[::num_local, : len(vector)].astype(vector.dtype)


def slowest(seconds: float, strategy: tf.distribute.Strategy) -> float:
    """Returns the largest of all workers' times, in seconds. Every worker must call it.

    A decision that depends on a clock is the same on all workers if it depends on this time.
    """
    nanoseconds = np.array([round(seconds * 1e9)], np.int64)
    return int(of_workers(nanoseconds, strategy).max()) / 1e9


@contextlib.contextmanager
def together(strategy: tf.distribute.Strategy, failure: str) -> Iterator[None]:
    """A context in which an error of one worker ends all workers, so that none waits for it.

    Args:
      strategy: the strategy over all workers. Every worker must enter the context.
      failure: what the failed worker did, for the message on the other workers.

    Raises:
      RunError: another worker failed. A worker with an error of its own raises that.
    """
    error = None
    try:
        yield
    except (Exception, SystemExit) as own:  # of a signal, too
        error = own
    if of_workers(np.array([error is not None]), strategy).any():
        if error is None:
            progress.lost()
        raise error or RunError(f"another worker {failure}, so this one stops too; see its log")


@functools.cache
def _gather(strategy: tf.distribute.Strategy):
    """Returns the collective. It takes 0.1 s to trace for each dtype and length."""

    @tf.function(autograph=False)
    def gather(value):
        with strategy.scope():
            return collectives.all_gather(value)

    return gather


class AnyWorker:
    """Tells all workers in the same step whether a flag is set on any of them.

    Attributes:
      is_alone: whether this is the only worker. It then only reads its own flags.
    """

    def __init__(self, strategy: tf.distribute.Strategy):
        """Takes the strategy over all workers."""
        self._strategy = strategy
        self.is_alone = len(strategy.extended.worker_devices) == strategy.num_replicas_in_sync
        self._calls, self._ask_at, self._since = 0, 1, time.monotonic()

    def says(self, *own: bool, now: bool = False) -> tuple[bool, ...]:
        """Returns for each flag whether any worker has set it. Every worker must call it each step.

        The workers are asked about every ASK_EVERY_S, but at least every MOST_CALLS steps, because
        later steps may be slower. Other calls return False.

        Args:
          *own: this worker's flags.
          now: whether to ask in this call. It must be the same on every worker.
        """
        if self.is_alone:
            return own
        self._calls += 1
        if self._calls < self._ask_at and not now:
            return (False,) * len(own)
        seconds = max(1e-6, time.monotonic() - self._since)
        calls = math.floor(self._calls * ASK_EVERY_S / seconds)
        calls = max(1, min(calls, MOST_CALLS))
        found = of_workers(np.array([calls, *own], np.int64), self._strategy)
        # The smallest number of all workers, so that all ask in the same step again.
        self._calls, self._ask_at, self._since = 0, int(found[:, 0].min()), time.monotonic()
        return tuple(found[:, 1:].any(axis=0).tolist())
