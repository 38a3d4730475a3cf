"""What all workers must agree on: asked of all at a time, answered alike.

Takes what each worker found; raises where they differ, or gives what holds for all. A worker that
sees one file fewer than the others would have shorter epochs, and they would wait for it for ever;
one that resumed from another step would train another model.

    check_same({"number of examples": 60000, "files": "5f0c..."}, strategy, of="their data")
    any_worker = AnyWorker(strategy)
    (stop,) = any_worker.says(own_flag)  # in the same step on every worker
    with together(strategy, "could not write"): ...     # an error of one is an error of all
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

MOST_FACTS = 8  # a collective needs one length
# Every vector is sent as a multiple of this length, so that few lengths are ever traced.
LENGTH = 16
# A signal may wait for so long before others hear of it. Asking takes about 1 ms, so it costs 0.4%.
ASK_EVERY_S = 0.25
MOST_CALLS = 50  # of 5 ms are a quarter of a second too


def check_same(facts: Mapping[str, object], strategy: tf.distribute.Strategy, *, of: str) -> None:
    """Raises UserError unless every worker calls this with equal facts. Returns when all have.

    Args:
      facts: what was found, by what to call it: anything that `repr` tells apart.
      strategy: over all workers.
      of: what the facts are of, for the message.
    """
    # Of other kinds of data there are other facts, so their names are one of them.
    facts = {"kind": tuple(facts), **facts}
    numbers = np.zeros(MOST_FACTS, np.int64)
    for place, each in enumerate(facts.values()):
        digest = hashlib.blake2b(repr(each).encode(), digest_size=8).digest()
        numbers[place] = int.from_bytes(digest, signed=True)
    found = of_workers(numbers, strategy)
    for (name, own), column in zip(facts.items(), found.T, strict=False):
        if len(set(column.tolist())) > 1:
            raise UserError(
                f"workers differ in the {name} of {of}: here {own}; expected the same in all, so "
                "give each the same files, settings and seed"
            )


def of_workers(vector: np.ndarray, strategy: tf.distribute.Strategy) -> np.ndarray:
    """Returns every worker's vector, [workers, n] from [n]; each worker must call it."""
    num_local = len(strategy.extended.worker_devices)
    if num_local == strategy.num_replicas_in_sync:
        return vector[np.newaxis]
    sent = vector.astype(np.int64) if vector.dtype == bool else vector
    sent = np.pad(sent, (0, -len(sent) % LENGTH))
    gathered = _gather(strategy)(tf.constant(sent[np.newaxis]))
    # Each worker's comes once for each of its replicas.
    return gathered.numpy()[::num_local, : len(vector)].astype(vector.dtype)


@contextlib.contextmanager
def together(strategy: tf.distribute.Strategy, failure: str) -> Iterator[None]:
    """Within the context an error of one worker is one of all: none is left to wait for it.

    Args:
      strategy: over all workers, each of which must enter the context.
      failure: what the others say that another worker did.

    Raises:
      RunError: another worker failed. What this one raises, it raises itself.
    """
    error = None
    try:
        yield
    except Exception as own:
        error = own
    if of_workers(np.array([error is not None]), strategy).any():
        if error is None:
            progress.lost()
        raise error or RunError(f"another worker {failure}, so this one stops too; see its log")


@functools.cache
def _gather(strategy: tf.distribute.Strategy):
    """Returns the collective, which takes 0.1 s to trace for each dtype and length."""

    @tf.function(autograph=False)
    def gather(value):
        with strategy.scope():
            return collectives.all_gather(value)

    return gather


class AnyWorker:
    """Whether any worker's flags are set, answered alike and in the same step on all of them.

    Attributes:
      is_alone: whether there is one worker, which asks nobody.
    """

    def __init__(self, strategy: tf.distribute.Strategy):
        """Takes the strategy over all workers; of one worker its own flags are the answer."""
        self._strategy = strategy
        self.is_alone = len(strategy.extended.worker_devices) == strategy.num_replicas_in_sync
        self._calls, self._ask_at, self._since = 0, 1, time.monotonic()

    def says(self, *own: bool, now: bool = False) -> tuple[bool, ...]:
        """Returns the answer for each; False between two calls that ask.

        They are about ASK_EVERY_S apart, or MOST_CALLS steps: those that follow may be slower.

        Every worker must call it in every step.

        Args:
          *own: this worker's flags.
          now: whether this call asks in any case. It must be the same on every worker.
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
        # The slowest worker's wish, so that all ask in the same step again.
        self._calls, self._ask_at, self._since = 0, int(found[:, 0].min()), time.monotonic()
        return tuple(found[:, 1:].any(axis=0).tolist())
