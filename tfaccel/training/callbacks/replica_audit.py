"""Starts all replicas with equal variables, and stops training when the replicas differ."""

import functools

import keras

from tfaccel.training.replica_checksums import Audit


class ReplicaAudit(keras.callbacks.Callback):
    """Compares checksums of all variables across all replicas, at an interval and at the end.

    At the start it gives all replicas the values of replica 0, if they differ.

    Attributes:
      loader: the step number is its position. None to count the executions from the start, each as
        a full one.
    """

    def __init__(self, steps: int):
        """Takes the steps between two checks, counted across epochs; 0 checks only at the start."""
        super().__init__()
        self._steps, self.loader = steps, None

    @functools.cached_property
    def _audit(self) -> Audit:
        return Audit(self.model)  # it compiles once, however often `fit` is called

    def on_train_begin(self, logs=None):
        """Starts to count."""
        self._started = False
        self._done = self._checked = 0 if self.loader is None else self.loader.position

    def on_train_batch_begin(self, batch, logs=None):
        """Makes the replicas equal before the first step, after all callbacks that load weights."""
        if not self._started:
            self._audit.make_equal()
            self._started = True

    def on_train_batch_end(self, batch, logs=None):
        """Compares the replicas when the interval is over."""
        if self.loader is not None:
            self._done = self.loader.position
        else:
            self._done += self.model.steps_per_execution
        if self._steps and self._done - self._checked >= self._steps:
            self._checked = self._done
            self._audit.check(when=f"at step {self._done}")

    def on_train_end(self, logs=None):
        """Compares the replicas at the end of training."""
        if self._steps:
            self._audit.check(when="at the end of training")
