"""What follows a step whose gradients, statistics or metrics are infinite or NaN."""

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
    """A step found what is infinite or NaN, and did not apply it, or such weights.

    Later steps may have run.
    """


class RollBackError(NonFiniteError):
    """The same, where training goes on from the last checkpoint.

    Attributes:
      logs: of the epoch so far, without the steps that were not finite.
    """

    def __init__(self, what: str, logs: dict[str, float]):
        """Takes the sentence, and Keras's logs."""
        super().__init__(what)
        self.logs = {name: float(value) for name, value in logs.items()}


class Finite(keras.callbacks.Callback):
    """Ends training, or says what was left out of it, when a step found what is not finite.

    Attributes:
      loader: that `fit` trains on, whose position says which step it is; None to count from the
        start of `fit`.
    """

    def __init__(self, policy: str):
        """Takes what follows: "stop", "skip" or "rollback"."""
        super().__init__()
        self._policy = policy
        self.loader = None
        self._done = self._left_out = 0

    def get_state(self) -> dict:
        """Returns what a checkpoint keeps: the steps of this epoch that were left out."""
        return {"left_out": self._left_out}

    def set_state(self, state: dict) -> None:
        """Takes what `get_state` returned."""
        self._left_out = state["left_out"]

    def on_train_begin(self, logs=None):
        """Counts steps anew."""
        self._done = 0
        if not self._is_watched:
            log.warning("step: it is stock Keras's, which applies NaN and infinity without a word")

    def on_epoch_begin(self, epoch, logs=None):
        """Counts anew what is left out."""
        self._left_out = 0

    def on_train_batch_end(self, batch, logs=None):
        """Reads what the steps of this execution found.

        Raises:
          RollBackError: it is not finite, and the policy is "rollback".
          NonFiniteError: it is not finite, and the policy is "stop"; or the weights are not.
        """
        if self._is_watched:
            self.look(self.model.train_function.nonfinite, self.position, logs or {})

    @property
    def position(self) -> int | None:
        """The loader's; None where there is none."""
        return self.loader.position if self.loader is not None else None

    def look(self, codes: np.ndarray, position: int | None, logs: dict) -> None:
        """Looks at what the steps of an execution found.

        Args:
          codes: of each step.
          position: the loader's after them; None to count from the start of `fit`.
          logs: Keras's.

        Raises:
          RollBackError, NonFiniteError: as `on_train_batch_end` says.
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
        if not self._left_out:
            log.warning("step: %s", what)
        self._left_out += len(faults)

    def on_epoch_end(self, epoch, logs=None):
        """Says how many steps were left out."""
        if self._left_out > 1:
            log.warning("step: %d steps of epoch %d were not finite", self._left_out, epoch + 1)

    @property
    def _is_watched(self) -> bool:
        # It is not with run_eagerly, nor once `model.compile` was called past `run.compile`.
        return hasattr(type(self.model.train_function), "nonfinite")

    def _fault(self, code: int, step: int) -> str:
        if code >= LABELS:
            return beyond(code, where=f" at step {step}, which was not applied")
        known = variables_of(self.model)
        variable = known[code - 1] if code <= len(known) else None
        if any(variable is each for each in self.model.metrics_variables):
            return (
                f"the loss or metric {variable.path} is not finite at step {step}, and leaves that "
                "step out; look for NaN or infinity in its images and labels"
            )
        changed = variable is not None and not variable.trainable
        return (
            f"the {'value' if changed else 'gradient'} of {self._name(variable)} is not finite at "
            f"step {step}, and was not applied; look for NaN or infinity in its images and labels, "
            "and for labels beyond the model's outputs, or lower the learning rate"
            + self._cure(variable)
        )

    def _weights(self, step: int) -> str:
        lost = [
            each
            for each in self.model.trainable_variables
            if not np.isfinite(keras.ops.convert_to_numpy(each)).all()
        ]
        return (
            f"the weights {self._name(lost[0] if lost else None)} are not finite after step {step}"
            "; lower the learning rate, or go back to weights that are finite"
        )

    def _name(self, variable) -> str:
        """Returns the variable's path in the model, and its layer."""
        if variable is None:
            return "a variable that is not the model's"
        path = variable.path.removeprefix(f"{self.model.name}/")
        for layer in reversed(layers_of(self.model, include_self=False)):
            if any(variable is each for each in layer.variables):
                return f"{path} (layer {layer.name}, {type(layer).__name__})"
        return path

    def _cure(self, variable) -> str:
        """Returns what else may help, where the variable's layer computes in float16."""
        for layer in layers_by_name(self.model):
            owns = any(variable is each for each in layer.variables)
            if owns and layer.compute_dtype == "float16":
                return (
                    f"; if float16 overflows there, let {layer.name} compute in float32 "
                    "(tfaccel.with_float32_layers, or --config.model.float32_layers)"
                )
        return ""
