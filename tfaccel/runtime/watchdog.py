"""The other workers, watched while this one trains: a lost one ends the job instead of hanging it.

Takes the `Cluster`; gives a guard for the calls that train.

    watchdog = Watchdog(cluster, peer_timeout_s=60)
    with watchdog.guard():      # raises WorkerLostError, which names the worker
        model.fit(...)

A collective waits for every worker, for ever if need be. Three things end the wait when a worker is
lost: the broken connection, where something was being received from it; TensorFlow's heartbeats,
sent to the chief, whose timeout `make_strategy` sets; and the thread here, which asks each worker
itself, and so notices a process that is gone within seconds, and one that only some workers cannot
reach. All three are answered by C++ threads: a worker that is busy in Python, however long, is not
lost.
"""

import contextlib
import itertools
import math
import threading
import time
from collections.abc import Iterator

import tensorflow as tf

from tfaccel.common.errors import RunError
from tfaccel.process import progress
from tfaccel.runtime.cluster import Cluster
from tfaccel.runtime.private_names import abort_collectives, ask_worker

# The call that asks holds Python's lock, so that it must not wait long: a worker that runs answers
# in 2 ms (two processes of one machine, 2026-11).
PROBE_TIMEOUT_S = 1.0

# In which every worker is asked once; one that does not answer is then asked every RETRY_S.
ROUND_S = 2.0
RETRY_S = 1.0

# Where a process is gone, its machine refuses the connection at once. A worker that is frozen, or
# cut off, is silent instead, and has peer_timeout_s.
GONE_AFTER_S = 3.0

# What TensorFlow may raise in a worker when another is lost; the first three were seen on the CPU.
# Each may mean something else too, so that whether a worker is lost is asked, not guessed.
LOSSES = (
    tf.errors.UnavailableError,
    tf.errors.DeadlineExceededError,
    tf.errors.AbortedError,
    tf.errors.CancelledError,
    tf.errors.FailedPreconditionError,
    tf.errors.InternalError,
)


class WorkerLostError(RunError):
    """Another worker is dead, frozen or cut off; says which."""


class Watchdog:
    """Asks each other worker in turn whether it is there; nobody, where there is no other."""

    def __init__(self, cluster: Cluster, *, peer_timeout_s: int = 60):
        """Watches nothing until `guard`.

        Args:
          cluster: the workers, and which of them this is.
          peer_timeout_s: for how long a worker may be silent; a minute is more than networks and
            machines under load need.
        """
        self._cluster = cluster
        self._peer_timeout_s = peer_timeout_s
        self._peers = [
            each for each in range(len(cluster.addresses)) if each != cluster.worker_index
        ]
        self._answered_at, self._given_up = {}, []

    @contextlib.contextmanager
    def guard(self) -> Iterator[None]:
        """Within the context, a call that waits for a lost worker ends with WorkerLostError.

        Raises:
          WorkerLostError: from the error that came of it. This process can reduce no more: end it.
        """
        if not self._peers:
            yield
            return
        self._answered_at = dict.fromkeys(self._peers, time.monotonic())
        ended = threading.Event()
        thread = threading.Thread(target=self._watch, args=(ended,), daemon=True)
        thread.start()
        try:
            yield
        except Exception as error:
            lost = self._given_up
            if isinstance(error, LOSSES):
                lost = [peer for peer in self._peers if self._trouble(peer)] or lost
            if not lost:
                raise
            progress.lost(lost[0])
            said = self._describe(lost)
            if not isinstance(error, LOSSES):
                said += f" (what came of it here, or went before: {error})"
            raise WorkerLostError(said) from error
        finally:
            # No thread may be inside TensorFlow while the interpreter ends.
            ended.set()
            thread.join()

    def _watch(self, ended: threading.Event) -> None:
        """Asks one worker after another; ends every collective when one is lost."""
        for peer in itertools.cycle(self._peers):
            if ended.wait(ROUND_S / len(self._peers)):
                return
            if self._is_lost(peer, ended):
                # NCCL takes a sum that is broken off for one that is done: whatever is wrong from
                # here on, as a gradient that is not finite, comes of that.
                self._given_up = [peer]
                abort_collectives(self._describe([peer]))
                return

    def _is_lost(self, peer: int, ended: threading.Event) -> bool:
        """Asks a worker until it answers, or for as long as it may be silent."""
        silent_since = gone_since = time.monotonic()
        while trouble := self._trouble(peer):
            now = time.monotonic()
            if isinstance(trouble, tf.errors.DeadlineExceededError):
                gone_since = now
            if now - gone_since >= GONE_AFTER_S or now - silent_since >= self._peer_timeout_s:
                return True
            if ended.wait(RETRY_S):
                return False
        return False

    def _trouble(self, peer: int) -> tf.errors.OpError | None:
        """Asks a worker and returns what stands in the way of its answer; None if it answers."""
        try:
            ask_worker(self._cluster.task(peer), timeout_s=PROBE_TIMEOUT_S)
        except tf.errors.OpError as error:
            return error
        self._answered_at[peer] = time.monotonic()
        return None

    def _describe(self, lost: list[int]) -> str:
        now = time.monotonic()
        # The first to fall silent first: others may have stopped because of it.
        silent = ", ".join(
            f"worker {peer} ({self._cluster.addresses[peer]}) is lost: no answer for "
            f"{math.ceil(now - self._answered_at[peer])} s"
            for peer in sorted(lost, key=self._answered_at.get)
        )
        return (
            f"{silent}; this worker stops. Look into the lost worker's own log, and start all "
            "workers again: one alone cannot come back"
        )
