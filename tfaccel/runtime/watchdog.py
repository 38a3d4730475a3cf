"""Watches the other workers during training: the loss of a worker ends the job, without a hang.

    watchdog = Watchdog(cluster, peer_timeout_s=60)
    with watchdog.guard():      # raises WorkerLostError, which names the worker
        model.fit(...)

A collective waits for every worker, possibly for ever. If a worker is lost, three things can end
the wait: the broken connection, if data was being received from the worker; TensorFlow's heartbeats
to the chief, with the timeout that `make_strategy` sets; and the thread here, which asks each
worker itself. The thread notices within seconds that a process is gone, and also notices a worker
that only some workers cannot reach. C++ threads answer all three, so a worker that is busy in
Python, however long, is not lost.

A sum inside an XLA program cannot be broken off: the GPU waits for the lost worker's data, and this
process for the GPU. So if the call of TensorFlow that the training is in does not end either, the
thread says who was lost, and ends the process.
"""

import atexit
import contextlib
import faulthandler
import functools
import itertools
import math
import os
import pathlib
import threading
import time
from collections.abc import Iterator

import tensorflow as tf

from tfaccel.common.errors import RunError, tell
from tfaccel.process import leave, progress
from tfaccel.runtime.cluster import Cluster
from tfaccel.runtime.private_names import abort_collectives, ask_worker, frame_of

# The call holds Python's lock while it waits, so its timeout is short. A worker that runs answers
# in 2 ms (two processes of one machine, 2026-11).
PROBE_TIMEOUT_S = 1.0

# Every worker is asked once in ROUND_S. A worker that does not answer is asked again every RETRY_S.
ROUND_S = 2.0
RETRY_S = 1.0

# If a process is gone, its machine refuses the connection at once. A worker that is frozen or cut
# off from the network is silent instead, and is lost after peer_timeout_s.
GONE_AFTER_S = 3.0

# All workers have started, so an address that refuses or that no route leads to is wrong. A lost
# packet is sent again within this time.
REACH_S = 10.0

# After a loss, a call of TensorFlow that was made before ends within milliseconds if it can.
STUCK_S = 3.0
# Libraries wait for the GPU when the process ends.
END_S = 20.0

# The errors that TensorFlow may raise in a worker when another is lost; the first three were seen
# on the CPU. Each may have another cause, so the workers are asked before one is declared lost.
LOSSES = (
    tf.errors.UnavailableError,
    tf.errors.DeadlineExceededError,
    tf.errors.AbortedError,
    tf.errors.CancelledError,
    tf.errors.FailedPreconditionError,
    tf.errors.InternalError,
)


_TENSORFLOW = pathlib.Path(tf.__file__).parent


class WorkerLostError(RunError):
    """Another worker is dead, frozen or cut off; the message says which."""


class Watchdog:
    """Asks each other worker in turn whether it is alive."""

    def __init__(self, cluster: Cluster, *, peer_timeout_s: int = 60):
        """Does nothing until `guard`.

        Args:
          cluster: the workers, and which of them this is.
          peer_timeout_s: seconds for which a worker may be silent; a minute is more than networks
            and machines under load need.
        """
        self._cluster = cluster
        self._peer_timeout_s = peer_timeout_s
        self._peers = [
            each for each in range(len(cluster.addresses)) if each != cluster.worker_index
        ]
        self._answered_at, self._given_up = {}, []

    def check_reach(self) -> None:
        """Asks each other worker once, at its address, when all have started.

        Workers start as soon as all reach the chief. An address of a network that does not lead to
        a worker would be noticed only in the first collective, with an error of TensorFlow.

        Raises:
          WorkerLostError: a worker does not answer.
        """
        for peer in self._peers:
            began = time.monotonic()
            while trouble := self._trouble(peer):
                # A silent worker may be frozen for a while, as in training.
                is_silent = isinstance(trouble, tf.errors.DeadlineExceededError)
                limit_s = self._peer_timeout_s if is_silent else min(REACH_S, self._peer_timeout_s)
                if time.monotonic() - began > limit_s:
                    progress.lost(peer)
                    raise WorkerLostError(
                        f"worker {peer} has started, but cannot be reached at "
                        f"{self._cluster.addresses[peer]} ({_first_line(trouble)}); see its own "
                        "log, and give it an address of a network that all hosts share (`tfaccel "
                        "doctor` on each host shows them)"
                    ) from trouble
                time.sleep(RETRY_S)

    @contextlib.contextmanager
    def guard(self) -> Iterator[None]:
        """A context in which a call that waits for a lost worker ends with WorkerLostError.

        Raises:
          WorkerLostError: a worker is lost. End this process: it can run no more collectives. If
            the call does not end, because the GPU waits for the lost worker, the process ends with
            the same message and exit code 1.
        """
        if not self._peers:
            yield
            return
        self._answered_at = dict.fromkeys(self._peers, time.monotonic())
        ended = threading.Event()
        watched = threading.get_ident(), ended
        thread = threading.Thread(target=self._watch, args=watched, daemon=True)
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
                said += f" (the error here, which it caused or which came before: {error})"
            raise WorkerLostError(said) from error
        finally:
            # No thread may be inside TensorFlow while the interpreter ends.
            ended.set()
            thread.join()

    def _watch(self, caller: int, ended: threading.Event) -> None:
        """Asks one worker after another, and aborts every collective if one is lost.

        Args:
          caller: the thread that trains, from `threading.get_ident`.
          ended: set when it has left the guard.
        """
        for peer in itertools.cycle(self._peers):
            if ended.wait(ROUND_S / len(self._peers)):
                return
            if self._is_lost(peer, ended):
                # NCCL reports an aborted sum as done, so errors that follow, such as a gradient
                # that is not finite, are caused by it.
                self._given_up = [peer]
                abort_collectives(self._describe([peer]))
                _end_in_time()
                if _is_stuck(caller, ended):
                    progress.lost(peer)
                    leave.now(tell(WorkerLostError(self._describe([peer]))))
                return

    def _is_lost(self, peer: int, ended: threading.Event) -> bool:
        """Asks a worker until it answers; returns whether its time to answer is over."""
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
        """Asks a worker and returns the error if it does not answer; else None."""
        try:
            ask_worker(self._cluster.task(peer), timeout_s=PROBE_TIMEOUT_S)
        except tf.errors.OpError as error:
            return error
        self._answered_at[peer] = time.monotonic()
        return None

    def _describe(self, lost: list[int]) -> str:
        now = time.monotonic()
        # Name first the worker that fell silent first: it may have stopped the others.
        silent = ", ".join(
            f"worker {peer} ({self._cluster.addresses[peer]}) is lost: no answer for "
            f"{math.ceil(now - self._answered_at[peer])} s"
            for peer in sorted(lost, key=self._answered_at.get)
        )
        return (
            f"{silent}; this worker stops. See the lost worker's own log, and start all workers "
            "again: a single worker cannot rejoin"
        )


def _is_stuck(caller: int, ended: threading.Event) -> bool:
    """Waits until a thread leaves the guard; returns True if a call of TensorFlow does not end."""
    place, since = None, time.monotonic()
    while not ended.wait(min(0.1, STUCK_S / 4)):
        frame = frame_of(caller)
        now = None if frame is None else (frame, frame.f_lasti)
        is_ours = (
            frame is not None and _TENSORFLOW in pathlib.Path(frame.f_code.co_filename).parents
        )
        if now != place or not is_ours:
            place, since = now, time.monotonic()
        elif time.monotonic() - since >= STUCK_S:
            return True
    return False


@functools.cache
def _end_in_time() -> None:
    """Lets this process end within END_S of its last line, whatever its GPUs wait for."""
    nowhere = open(os.devnull, "w")  # noqa: SIM115  (until the process ends)
    atexit.register(faulthandler.dump_traceback_later, END_S, exit=True, file=nowhere)


def _first_line(error: tf.errors.OpError) -> str:
    return error.message.strip().split("\n", 1)[0]
