"""Gives the epochs of a script's `fit` to experiment trackers.

Takes a run in its trackers (tfaccel/training/trackers/tracked.py); gives a callback, which is also
the context of the whole run. `Run.track` makes it.

    with run.track("mlflow", "runs/photos", config={"learning_rate": 1e-3}) as tracking:
        model.fit(train, epochs=3, callbacks=[checkpoints, tracking])
        tracking.log_export(run.export(model, "exported/1", loader=test))

It does nothing at a batch's end, so `fit` need not wait for each execution's results.
"""

import os
import time
from collections.abc import Mapping

import keras

from tfaccel.common.errors import UserError
from tfaccel.common.local_path import local_path
from tfaccel.training.callbacks.logs import record_of_epoch
from tfaccel.training.trackers.tracked import Tracked


class Tracking(keras.callbacks.Callback):
    """Sends each epoch's logs. Use it as a context, whose end is the end of the run.

    A `fit` that resumes goes on in the same run of the tracker. One that begins at the first epoch
    begins a new run, unless the earlier one has no epoch yet.
    """

    def __init__(self, tracked: Tracked, config: Mapping[str, object]):
        """Begins nothing yet. For the arguments, see `Run.track`."""
        super().__init__()
        self._tracked, self._config, self._is_open = tracked, dict(config), False
        self._start = time.perf_counter()

    def get_state(self) -> dict:
        """Returns nothing, because the folder has the state."""
        return {}

    def set_state(self, state: dict) -> None:
        """Ignores the state: see `get_state`."""

    def __enter__(self) -> "Tracking":
        """Returns itself."""
        self._is_open = True
        self._tracked.__enter__()
        return self

    def __exit__(self, *error) -> None:
        """Sends what is left, and tells the trackers how the run ended."""
        self._is_open = False
        self._tracked.__exit__(*error)

    def on_train_begin(self, logs=None):
        """Checks that the trackers will be told how the run ends."""
        self._check_open()

    def on_epoch_begin(self, epoch, logs=None):
        """Begins the run in the trackers before the first epoch."""
        self._begin(continues=epoch > 0)

    def on_epoch_end(self, epoch, logs=None):
        """Sends the epoch's logs with the number of steps so far."""
        seconds = time.perf_counter() - self._start
        self._tracked.epoch(record_of_epoch(self, epoch, logs, seconds=seconds))

    def on_train_end(self, logs=None):
        """Waits until all epochs are sent."""
        self._tracked.close()

    def log_export(self, path: str | os.PathLike) -> None:
        """Gives the folder of an export to the trackers, as an artefact.

        With several workers only the chief has the folder, and only the chief sends it.

        Raises:
          UserError: there is no such folder.
        """
        self._check_open()
        self._begin(continues=True)  # a `fit` with nothing left to train began nothing
        self._tracked.export(local_path(path).absolute())

    def _begin(self, *, continues: bool) -> None:
        if not self._tracked.has_begun:
            self._tracked.begin(self._config, continues=continues)

    def _check_open(self) -> None:
        if not self._is_open:
            raise UserError(
                "the trackers would not be told how the run ends; call fit and log_export within "
                "`with run.track(...) as tracking:`"
            )
