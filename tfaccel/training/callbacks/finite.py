"""Stops, warns or rolls back after a step with infinite or NaN gradients, statistics or metrics."""

import logging

import keras
import numpy as np

from tfaccel.common.errors import RunError
from tfaccel.keras_internals.float32_layers import layers_by_name
from tfaccel.keras_internals.layers import layers_of
from tfaccel.keras_internals.model_view import variables_of
from tfaccel.step.finite import FINE, WEIGHTS
from tfaccel.step.labels import LABELS, beyond

log = logging.getLogger("tfaccel")


class NonFiniteError(RunError):
    """A step found an infinite or NaN value and was not applied, or the weights are not finite.

    Later steps may have run.
    """


class RollBackError(NonFiniteError):
    """A NonFiniteError after which training continues from the last checkpoint.

    Attributes:
      logs: of the epoch so far, without the steps that were not finite.
    """

    def __init__(self, message: str, logs: dict[str, float]):
        """Takes the message, and Keras's logs."""
        super().__init__(message)
        self.logs = {name: float(value) for name, value in logs.items()}


class Finite(keras.callbacks.Callback):
    """Ends training, or logs a warning, when a step found a value that is infinite or NaN.

    Attributes:
      loader: the training data; the step number is its position. None to count the steps from the
        start of `fit`.
    """

    def __init__(self, policy: str):
        """Takes what follows such a step: "stop", "skip" or "rollback"."""
        super().__init__()
        self._policy = policy
        self.loader = None
        self._done = self._num_skipped = 0

    def get_state(self) -> dict:
        """Returns what a checkpoint keeps: the number of skipped steps of this epoch."""
        return {"left_out": self._num_skipped}

    def set_state(self, state: dict) -> None:
        """Takes what `get_state` returned."""
        self._num_skipped = state["left_out"]

    def on_train_begin(self, logs=None):
        """Starts to count the steps."""
        self._done = 0
        if not self._is_watched:
            log.warning("step: this is stock Keras's step, which applies NaN and infinity silently")

    def on_epoch_begin(self, epoch, logs=None):
        """Resets the count of skipped steps."""
        self._num_skipped = 0

    def on_train_batch_end(self, batch, logs=None):
        """Checks the steps of this execution.

        Raises:
          RollBackError: a step is not finite, and the policy is "rollback".
          NonFiniteError: a step is not finite, and the policy is "stop"; or the weights are not
            finite.
        """
        if self._is_watched:
            self.check(self.model.train_function.nonfinite, self.position, logs or {})

    @property
    def position(self) -> int | None:
        """The loader's position; None without a loader."""
        return self.loader.position if self.loader is not None else None

    def check(self, codes: np.ndarray, position: int | None, logs: dict) -> None:
        """Checks the steps of an execution.

        Args:
          codes: what each step found (tfaccel/step/finite.py).
          position: the loader's position after them; None to count from the start of `fit`.
          logs: Keras's.

        Raises:
          RollBackError, NonFiniteError: see `on_train_batch_end`.
        """
        self._done = position if position is not None else self._done + len(codes)
        faults = np.flatnonzero(codes != FINE)
        if not len(faults):
            return
        lost = np.flatnonzero(codes == WEIGHTS)
        first = int((lost if len(lost) else faults)[0])
        step = self._done - len(codes) + 1 + first
        what = self._weights(step) if len(lost) else self._fault(int(codes[first]), step)
        if self._policy == "rollback":
            raise RollBackError(what, logs)
        if len(lost) or self._policy == "stop":
            raise NonFiniteError(what)
        if not self._num_skipped:
            log.warning("step: %s", what)
        self._num_skipped += len(faults)

    def on_epoch_end(self, epoch, logs=None):
        """Logs how many steps were skipped."""
        if self._num_skipped > 1:
            log.warning(
                "step: %d steps of epoch %d were not finite and were skipped",
                *(self._num_skipped, epoch + 1),
            )

    @property
    def _is_watched(self) -> bool:
        # False after `model.compile` was called without `run.compile`.
        return hasattr(type(self.model.train_function), "nonfinite")

    def _fault(self, code: int, step: int) -> str:
        if code >= LABELS:
            return beyond(code, where=f" at step {step}, which was not applied")
        known = variables_of(self.model)
        variable = known[code - 1] if code <= len(known) else None
        if any(variable is each for each in self.model.metrics_variables):
            return (
                f"the loss or metric {variable.path} is not finite at step {step}, and does not "
                "count that step; look for NaN or infinity in the step's images and labels"
            )
        changed = variable is not None and not variable.trainable
        return (
            f"the {'value' if changed else 'gradient'} of {self._name(variable)} is not finite at "
            f"step {step}, and was not applied; look for NaN or infinity in the step's images and "
            "labels, and for labels beyond the model's outputs, or lower the learning rate"
            + self._float32_advice(variable)
        )

    def _weights(self, step: int) -> str:
        lost = [
            each
            for each in self.model.trainable_variables
            if not np.isfinite(keras.ops.convert_to_numpy(each)).all()
        ]
        return (
            f"the weights {self._name(lost[0] if lost else None)} are not finite after step {step}"
            "; lower the learning rate, or restore weights that are finite"
        )

    def _name(self, variable) -> str:
        """Returns the variable's path in the model, and its layer."""
        if variable is None:
            return "a variable outside the model"
        path = variable.path.removeprefix(f"{self.model.name}/")
        for layer in reversed(layers_of(self.model, include_self=False)):
            if any(variable is each for each in layer.variables):
                return f"{path} (layer {layer.name}, {type(layer).__name__})"
        return path

    def _float32_advice(self, variable) -> str:
        """Returns more advice if the variable's layer computes in float16, else ""."""
        for layer in layers_by_name(self.model):
            owns = any(variable is each for each in layer.variables)
            if owns and layer.compute_dtype == "float16":
                return (
                    f"; if float16 overflows there, let {layer.name} compute in float32 "
                    "(tfaccel.with_float32_layers, or --config.model.float32_layers)"
                )
        return ""
