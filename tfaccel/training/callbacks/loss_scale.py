"""Logs the skipped steps of an epoch, and ends training when the loss scale falls too low."""

import keras

from tfaccel.common.errors import RunError
from tfaccel.common.tables import in_figures


class LossScaleFloorError(RunError):
    """The dynamic loss scale fell below its floor: gradients stay infinite or NaN."""


class LossScale(keras.callbacks.Callback):
    """Makes `skipped_steps` in the logs the count of the epoch, and checks `loss_scale`.

    The step logs `loss_scale`, and the number of steps that each execution skipped.
    """

    def __init__(self, floor: float):
        """Takes the smallest loss scale with which training continues."""
        super().__init__()
        self._floor = floor
        self._skipped = 0

    def get_state(self) -> dict:
        """Returns the count, for a run that resumes within the epoch."""
        return {"skipped": self._skipped}

    def set_state(self, state: dict) -> None:
        """Continues the count that `get_state` returned."""
        self._skipped = state["skipped"]

    def on_epoch_begin(self, epoch, logs=None):
        """Resets the count."""
        self._skipped = 0

    def on_train_batch_end(self, batch, logs=None):
        """Adds up the skipped steps.

        Raises:
          LossScaleFloorError: the loss scale fell below the floor.
        """
        if logs is None or "loss_scale" not in logs:
            return
        self._skipped += int(logs["skipped_steps"])
        logs["skipped_steps"] = self._skipped
        if logs["loss_scale"] < self._floor:
            raise LossScaleFloorError(
                f"the loss scale fell to {in_figures(logs['loss_scale'])}, below its floor of "
                f"{in_figures(self._floor)}, after {self._skipped} skipped steps in this epoch: "
                "gradients stay infinite or NaN; look for NaN in the data, lower the learning "
                "rate, or let the layers in which float16 overflows compute in float32 "
                "(tfaccel.with_float32_layers, or --config.model.float32_layers)"
            )

    def on_epoch_end(self, epoch, logs=None):
        """Puts the epoch's count into its logs."""
        if logs is not None and "skipped_steps" in logs:
            logs["skipped_steps"] = self._skipped
