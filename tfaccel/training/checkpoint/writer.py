"""Checkpoints written in the background, one at a time, while training goes on.

Takes a `Store` and snapshots; gives what became of them, once.

    writer = Writer(store, on_error="stop")
    writer.write(snapshot, score=0.76)      # returns at once, unless one is being written
    writer.has_failed                       # asked at each step
    writer.wait()                           # all of it is on the disk, or CheckpointError
"""

import logging
import threading
import time

# Here for its TensorFlow, which cannot be imported in a thread while the program ends.
import tfaccel.training.checkpoint.arrays  # noqa: F401
from tfaccel.training.checkpoint.store import CheckpointError, Snapshot, Store

log = logging.getLogger("tfaccel")


class Writer:
    """One thread at a time that writes a snapshot. Called from one thread."""

    def __init__(self, store: Store, *, on_error: str):
        """Starts nothing yet.

        Args:
          store: that is written to.
          on_error: what follows a CheckpointError: "stop" to raise it in `wait`, "continue" to say
            it in the log, at once.
        """
        self._store, self._goes_on = store, on_error == "continue"
        self._thread = self._error = self._last_error = None
        self._said = False

    @property
    def has_failed(self) -> bool:
        """Whether `wait` has an error to raise: asking for it does not wait."""
        return self._error is not None

    def check_last(self) -> None:
        """Raises, whatever `on_error` says, what kept the last one from being written, if it is."""
        self._join()
        if self._last_error is not None:
            raise self._last_error

    def write(self, snapshot: Snapshot, **how) -> None:
        """Starts to write, once the one before is written or has failed.

        Args:
          snapshot: whose arrays nobody changes from now on: copies, not views of variables.
          **how: as `Store.write` takes it.
        """
        begun = time.monotonic()
        self._join()
        waited_s = time.monotonic() - begun
        # Python waits for it where the program ends, as it does for all that are not daemons.
        self._thread = threading.Thread(
            target=self._write, args=(snapshot, waited_s, how), name="tfaccel checkpoint"
        )
        self._thread.start()

    def wait(self) -> None:
        """Returns when all that was begun is on the disk itself.

        Raises:
          CheckpointError: one was not written, the first of them. It is raised once.
        """
        self._join()
        error, self._error = self._error, None
        if error is not None:
            raise error

    def _join(self) -> None:
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def _write(self, snapshot: Snapshot, waited_s: float, how: dict) -> None:
        begun = time.monotonic()
        self._last_error = None
        try:
            self._store.write(snapshot, **how)
        except Exception as error:
            self._last_error = error
            if self._goes_on and isinstance(error, CheckpointError):
                log.warning("checkpoint: %s; training goes on", error)
            else:
                self._error = self._error or error
            return
        log.log(
            logging.DEBUG if self._said else logging.INFO,
            "checkpoint: step %d, %.0f MiB in %.1f s, training waited %.2f s",
            *(snapshot.step, snapshot.num_bytes / 2**20, time.monotonic() - begun, waited_s),
        )
        self._said = True
