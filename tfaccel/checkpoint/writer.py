"""Checkpoints written in the background, one at a time, while training goes on.

Takes a `Store` and snapshots; gives the seconds that training had to wait.

    writer = Writer(store)
    waited_s = writer.write(snapshot, score=0.76)    # returns at once, unless one is being written
    writer.wait()                                    # all of it is on the disk, or CheckpointError
"""

import logging
import threading
import time

# Here for its TensorFlow, which cannot be imported in a thread while the program ends.
import tfaccel.checkpoint.arrays  # noqa: F401
from tfaccel.checkpoint.store import Snapshot, Store

log = logging.getLogger("tfaccel")


class Writer:
    """One thread at a time that writes a snapshot. Called from one thread.

    Attributes:
      waited_s: seconds for which callers have waited so far.
    """

    def __init__(self, store: Store):
        """Starts nothing yet."""
        self.waited_s = 0.0
        self._store = store
        self._thread = None
        self._error = None
        self._said = False

    def write(self, snapshot: Snapshot, **how) -> float:
        """Starts to write, once the one before is written. Returns the seconds waited for that.

        Args:
          snapshot: whose arrays nobody changes from now on: copies, not views of variables.
          **how: as `Store.write` takes it.

        Raises:
          CheckpointError: the one before was not written. This one is begun all the same, so that
            whoever trains on after an error has lost no other.
        """
        waited_s, error = self._join()
        # Python waits for it where the program ends, as it does for all that are not daemons.
        self._thread = threading.Thread(
            target=self._write, args=(snapshot, waited_s, how), name="tfaccel checkpoint"
        )
        self._thread.start()
        if error is not None:
            raise error
        return waited_s

    def wait(self) -> float:
        """Returns the seconds until what was begun is on the disk itself.

        Raises:
          CheckpointError: it was not written. It is said once.
        """
        waited_s, error = self._join()
        if error is not None:
            raise error
        return waited_s

    def _join(self) -> tuple[float, BaseException | None]:
        begun = time.monotonic()
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        waited_s = time.monotonic() - begun
        self.waited_s += waited_s
        error, self._error = self._error, None
        return waited_s, error

    def _write(self, snapshot: Snapshot, waited_s: float, how: dict) -> None:
        begun = time.monotonic()
        try:
            self._store.write(snapshot, **how)
        except BaseException as error:
            self._error = error
            log.warning("checkpoint: step %d is not written: %s", snapshot.step, error)  # at once
            return
        log.log(
            logging.DEBUG if self._said else logging.INFO,
            "checkpoint: step %d, %.0f MiB in %.1f s, training waited %.2f s",
            *(snapshot.step, snapshot.num_bytes / 2**20, time.monotonic() - begun, waited_s),
        )
        self._said = True
