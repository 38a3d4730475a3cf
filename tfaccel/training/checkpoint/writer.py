"""Writes checkpoints in the background, one at a time, while training continues.

Takes a `Store` and snapshots; reports each failure once.

    writer = Writer(store, on_error="stop")
    writer.write(snapshot, score=0.76)      # returns at once, unless one is being written
    writer.has_failed                       # checked at each step
    writer.wait()                           # all checkpoints are on the disk, or CheckpointError
"""

import logging
import threading
import time

# It imports TensorFlow, which a thread cannot import while the program ends.
import tfaccel.training.checkpoint.arrays  # noqa: F401
from tfaccel.process import leave, waits
from tfaccel.training.checkpoint.store import CheckpointError, Snapshot, Store

log = logging.getLogger("tfaccel")


class Writer:
    """Writes snapshots in a thread, one at a time. Only one thread may call it."""

    def __init__(self, store: Store, *, on_error: str):
        """Starts no thread yet.

        With `on_error="stop"`, `wait` raises a CheckpointError; with "continue" it is logged.
        """
        self._store, self._continues = store, on_error == "continue"
        self._thread = self._error = self._last_error = None
        self._is_logged = False

    @property
    def has_failed(self) -> bool:
        """True if `wait` has an error to raise. It does not wait for the thread."""
        return self._error is not None

    def check_last(self) -> None:
        """Raises the error of the last checkpoint, if there was one, whatever `on_error` is."""
        self._join()
        if self._last_error is not None:
            raise self._last_error

    def write(self, snapshot: Snapshot, **options) -> None:
        """Waits for the previous checkpoint, then starts to write this one, like `Store.write`.

        The arrays must not change from here on, so they are copies of the variables.
        """
        begun = time.monotonic()
        self._join()
        waited_s = time.monotonic() - begun
        # The thread is no daemon, so Python waits for it when the program ends.
        self._thread = threading.Thread(
            target=self._write, args=(snapshot, waited_s, options), name="tfaccel checkpoint"
        )
        leave.finish_first(self._thread)
        self._thread.start()

    def wait(self) -> None:
        """Waits until everything is on the disk.

        Raises:
          CheckpointError: a checkpoint was not written. Only the first error is raised, and once.
        """
        self._join()
        error, self._error = self._error, None
        if error is not None:
            raise error

    def _join(self) -> None:
        if self._thread is not None:
            with waits.on("writing the checkpoint"):
                self._thread.join()
            self._thread = None

    def _write(self, snapshot: Snapshot, waited_s: float, options: dict) -> None:
        begun = time.monotonic()
        self._last_error = None
        try:
            self._store.write(snapshot, **options)
        except Exception as error:
            self._last_error = error
            if self._continues and isinstance(error, CheckpointError):
                log.warning("checkpoint: %s; training continues", error)
            else:
                self._error = self._error or error
            return
        log.log(
            logging.DEBUG if self._is_logged else logging.INFO,
            "checkpoint: step %d, %.0f MiB in %.1f s, training waited %.2f s",
            *(snapshot.step, snapshot.num_bytes / 2**20, time.monotonic() - begun, waited_s),
        )
        self._is_logged = True
