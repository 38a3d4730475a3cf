"""Reads the results of each execution of `fit` while the device runs the next execution.

Takes the callbacks that check every execution (loss scale, finite values, audit of replicas); gives
one callback that stands for them. It is for a `fit` in which no other callback sees each batch.

    ahead = Ahead(loss_scale, finite, audit)
    with ahead.of(model):
        model.fit(loader, callbacks=[ahead])

After every batch, Keras turns the logs into Python numbers. It waits for them, and only then queues
the next batch. That takes 8.7 ms of a ResNet-50 step's 40 ms (H200, 2026-11-22). With `Ahead`,
Keras gets the logs of the previous execution, which are ready. At the end of an epoch it gets the
logs of the last execution.
"""

import concurrent.futures
import contextlib
import logging
from collections.abc import Iterator

import keras
import numpy as np
import tensorflow as tf

from tfaccel.keras_internals.callbacks import before_epoch_logs, python_logs, sees_batches
from tfaccel.process import waits
from tfaccel.process.to_host import make_to_host
from tfaccel.training.callbacks.finite import Finite
from tfaccel.training.callbacks.keras_writers import logs_epochs_alone
from tfaccel.training.callbacks.loss_scale import LossScale
from tfaccel.training.callbacks.replica_audit import ReplicaAudit

log = logging.getLogger("tfaccel")


def can_be_ahead(model: keras.Model, callbacks: list[keras.callbacks.Callback]) -> bool:
    """Returns whether `fit` may read the results of each execution one execution late.

    It may not if one of the user's callbacks is called at each batch's end, because that callback
    expects the logs of that batch. Keras's own progress bar is an exception. The reason is logged.
    """
    if not hasattr(type(model.train_function), "launched"):
        return False  # stock Keras's step does not report its executions
    readers = [
        type(each).__name__
        for each in callbacks
        if type(each) is not keras.callbacks.ProgbarLogger  # a user's subclass may read the logs
        and not logs_epochs_alone(each)
        and sees_batches(each)
    ]
    if readers:
        log.info(
            "step: training reads the results of each execution before it queues the next one, "
            "because these callbacks read them: %s; with a small model, a larger "
            "steps_per_execution makes this cheaper",
            ", ".join(readers),
        )
    return not readers


def silenced(model: keras.Model) -> contextlib.AbstractContextManager:
    """Returns a context in which the model's executions are not reported to any `fit`.

    A callback of `fit` may train the model itself. `fit` must not count those steps.
    """
    execution = model.train_function
    reports = hasattr(type(execution), "launched")
    return with_attributes(execution, launched=None) if reports else contextlib.nullcontext()


@contextlib.contextmanager
def with_attributes(owner, **attributes) -> Iterator[None]:
    """Sets the attributes of an object within the context, and restores the old ones after it."""
    own = vars(owner)  # bypasses Keras's tracking of attributes
    before = {name: own[name] for name in attributes if name in own}
    own.update(attributes)
    try:
        yield
    finally:
        for name in attributes:
            del own[name]
        own.update(before)


class Ahead(keras.callbacks.Callback):
    """Stands for the callbacks of a step in one `fit`.

    Their errors are raised one execution later. Before an epoch's validation begins, they have seen
    all of its executions.
    """

    def __init__(self, loss_scale: LossScale, finite: Finite, audit: ReplicaAudit | None = None):
        """Takes the callbacks that it stands for; `audit` only with several replicas."""
        super().__init__()
        self._loss_scale, self._finite, self._audit = loss_scale, finite, audit
        self._all = [each for each in (loss_scale, finite, audit) if each is not None]
        self._pending = None  # the execution that was launched and not checked yet
        self._shown = None  # the logs of this epoch that Keras was given

    @contextlib.contextmanager
    def of(self, model: keras.Model) -> Iterator[None]:
        """Within the context, the model reports its executions and each epoch's end."""

        def check_last(logs):
            if logs is self._shown:  # these are the logs of training, not of a validation
                self._check_last()

        # Two threads: while one waits for an execution's end, the other queues the next copy.
        with (
            concurrent.futures.ThreadPoolExecutor(2, thread_name_prefix="read") as self._reader,
            with_attributes(model.train_function, launched=self._launched),
            before_epoch_logs(model, check_last),
        ):
            yield

    def _launched(self, logs: dict, codes) -> dict:
        """Begins to read this execution's results, and returns the logs of the previous one."""
        to_host = make_to_host(tf.nest.flatten(codes)[0].device)
        launched = self._reader.submit(to_host, (logs, codes)), self._finite.position
        self._needs_audit = True
        if self._shown is None:  # the epoch's first execution has no previous one
            self._shown = self._check(*launched)
            return self._shown
        if self._pending is not None:
            self._shown = self._check(*self._pending)
        self._pending = launched
        return self._shown

    def _check(self, reading: concurrent.futures.Future, position: int | None) -> dict:
        with waits.on("running the steps of an execution", is_usual=True):
            logs, codes = reading.result()
        logs = python_logs(logs)  # the form in which Keras's callbacks get them
        self._loss_scale.on_train_batch_end(0, logs)
        # NumPy, because an operation of TensorFlow would wait on the device for the next execution.
        self._finite.check(np.hstack([each.numpy() for each in codes]), position, logs)
        return logs

    def _check_last(self) -> None:
        """Checks an epoch's last execution, and audits the replicas, before any validation."""
        pending, self._pending = self._pending, None
        if pending is not None:
            # In place: Keras reuses this dict for later epochs that have no data.
            self._shown.update(self._check(*pending))
        self._audit_last()

    def _audit_last(self) -> None:
        if self._audit is not None and self._needs_audit:
            self._audit.on_train_batch_end(0)
        self._needs_audit = False

    # Keras's events.

    def _call_all(self, event: str, *args) -> None:
        for each in self._all:
            getattr(each, event)(*args)

    def set_params(self, params):
        """Passes them to all callbacks."""
        super().set_params(params)
        self._call_all("set_params", params)

    def set_model(self, model):
        """Passes it to all callbacks."""
        super().set_model(model)
        self._call_all("set_model", model)

    def on_train_begin(self, logs=None):
        """Forgets the previous `fit`."""
        self._needs_audit = False
        self._call_all("on_train_begin", logs)

    def on_epoch_begin(self, epoch, logs=None):
        """Forgets the logs of the previous epoch."""
        self._shown = None
        self._call_all("on_epoch_begin", epoch, logs)

    def on_train_batch_begin(self, batch, logs=None):
        """Audits the replicas after the previous execution, which needs no logs."""
        self._audit_last()
        self._call_all("on_train_batch_begin", batch, logs)

    def on_epoch_end(self, epoch, logs=None):
        """Calls all callbacks."""
        self._call_all("on_epoch_end", epoch, logs)

    def on_train_end(self, logs=None):
        """Calls all callbacks."""
        self._call_all("on_train_end", logs)
