"""Logs the skipped steps of an epoch, and ends training when the loss scale falls too low."""

import keras

from tfaccel.common.errors import RunError
from tfaccel.common.tables import in_figures
from tfaccel.step.loss_scale import SCALE, SKIPPED, is_skipped


class LossScaleFloorError(RunError):
    """The dynamic loss scale fell below its floor: gradients stay infinite or NaN."""


class LossScale(keras.callbacks.Callback):
    """Makes `skipped_steps` in the logs the count of the epoch, and checks `loss_scale`.

    The step logs `loss_scale`, and the number of steps that each execution skipped. For optimizers
    other than the compiled one it logs `loss_scale/NAME` and `skipped_steps/NAME`.
    """

    def __init__(self, floor: float):
        """Takes the smallest loss scale with which training continues."""
        super().__init__()
        self._floor = floor
        self._skipped = {}  # by the name of the log

    def get_state(self) -> dict:
        """Returns the counts, for a run that resumes within the epoch."""
        return {"skipped": self._skipped}

    def set_state(self, state: dict) -> None:
        """Continues the count that `get_state` returned."""
        skipped = state["skipped"]
        self._skipped = dict(skipped) if isinstance(skipped, dict) else {SKIPPED: skipped}

    def on_epoch_begin(self, epoch, logs=None):
        """Resets the count."""
        self._skipped = {}

    def on_train_batch_end(self, batch, logs=None):
        """Adds up the skipped steps.

        Raises:
          LossScaleFloorError: the loss scale fell below the floor.
        """
        for name in filter(is_skipped, list(logs or ())):
            self._skipped[name] = self._skipped.get(name, 0) + int(logs[name])
            logs[name] = self._skipped[name]
            scale = logs[name.replace(SKIPPED, SCALE, 1)]
            if scale < self._floor:
                _, _, optimizer = name.partition("/")
                raise LossScaleFloorError(
                    f"the loss scale{f' of {optimizer}' if optimizer else ''} fell to "
                    f"{in_figures(scale)}, below its floor of {in_figures(self._floor)}, after "
                    f"{self._skipped[name]} skipped steps in this epoch: gradients stay infinite "
                    "or NaN; look for NaN in the data, lower the learning rate, or let the layers "
                    "in which float16 overflows compute in float32 (tfaccel.with_float32_layers, "
                    "or --config.model.float32_layers)"
                )

    def on_epoch_end(self, epoch, logs=None):
        """Puts the epoch's count into its logs."""
        for name in filter(is_skipped, list(logs or ())):
            logs[name] = self._skipped.get(name, 0)
