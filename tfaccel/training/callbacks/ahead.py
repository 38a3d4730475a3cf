"""Looks at each execution of a `fit` while the device is at the next one.

Takes what looks: at the loss scale, at what is not finite, at the replicas; gives a callback that
stands for them, where nobody else is to see each batch.

    ahead = Ahead(loss_scale, finite, audit)
    with ahead.of(model):
        model.fit(loader, callbacks=[ahead])

Keras makes Python numbers of the logs after every batch, for which it waits, and only then queues
the next: 8.7 ms of a ResNet-50 step's 40 ms (H200, 2026-11-22). Here it is given the numbers of the
batch before, which are there; at an epoch's end, those of the last one.
"""

import concurrent.futures
import contextlib
import logging
from collections.abc import Iterator

import keras
import numpy as np
import tensorflow as tf

from tfaccel.keras_internals.callbacks import before_epoch_logs, python_logs, sees_batches
from tfaccel.process.to_host import make_to_host
from tfaccel.training.callbacks.finite import Finite
from tfaccel.training.callbacks.loss_scale import LossScale
from tfaccel.training.callbacks.replica_audit import ReplicaAudit

log = logging.getLogger("tfaccel")


def can_be_ahead(model: keras.Model, callbacks: list[keras.callbacks.Callback]) -> bool:
    """Returns whether a `fit` may look at its executions one late; if it may not, says why.

    A callback that is told of each batch's end is to see that batch, but for Keras's progress bar.

    Args:
      model: compiled.
      callbacks: the user's, in a flat list.
    """
    if not hasattr(type(model.train_function), "launched"):
        return False  # stock Keras's step, which says nothing of what it launched
    looks = [
        type(each).__name__
        for each in callbacks
        if type(each) is not keras.callbacks.ProgbarLogger  # a user's own may look
        and sees_batches(each)
    ]
    if looks:
        log.info(
            "step: the numbers of each execution are read before the next one is queued, because "
            "%s look at them; with small models a larger steps_per_execution makes this rarer",
            ", ".join(looks),
        )
    return not looks


def alone(model: keras.Model) -> contextlib.AbstractContextManager:
    """Returns a context in which no `fit` is told of what the model launches.

    For what a callback of one trains meanwhile: it is not that one's.
    """
    execution = model.train_function
    has = hasattr(type(execution), "launched")
    return having(execution, launched=None) if has else contextlib.nullcontext()


@contextlib.contextmanager
def having(owner, **attributes) -> Iterator[None]:
    """Within the context, the object has these attributes; then those of its own from before."""
    own = vars(owner)  # past Keras's tracking of attributes
    before = {name: own[name] for name in attributes if name in own}
    own.update(attributes)
    try:
        yield
    finally:
        for name in attributes:
            del own[name]
        own.update(before)


class Ahead(keras.callbacks.Callback):
    """Stands for the callbacks of a step in one `fit`; what they raise comes an execution later.

    When an epoch's validation begins, they have seen all.
    """

    def __init__(self, loss_scale: LossScale, finite: Finite, audit: ReplicaAudit | None = None):
        """Takes those that it stands for; the last one where there are several replicas."""
        super().__init__()
        self._loss_scale, self._finite, self._audit = loss_scale, finite, audit
        self._all = [each for each in (loss_scale, finite, audit) if each is not None]
        self._begun = None  # what is yet to be looked at
        self._seen = None  # the logs that Keras was given, of this epoch

    @contextlib.contextmanager
    def of(self, model: keras.Model) -> Iterator[None]:
        """Within the context, it is told of what the model launches, and of an epoch's last one."""

        def look_at_last(logs):
            if logs is self._seen:  # not of a test
                self._look_at_last()

        # Two threads: one that waits for an execution's end lets the next one's copy be queued.
        with (
            concurrent.futures.ThreadPoolExecutor(2, thread_name_prefix="look") as self._reader,
            having(model.train_function, launched=self._launched),
            before_epoch_logs(model, look_at_last),
        ):
            yield

    def _launched(self, logs: dict, codes) -> dict:
        """Begins to read what was launched, looks at the execution before, and returns its logs."""
        to_host = make_to_host(tf.nest.flatten(codes)[0].device)
        begun = self._reader.submit(to_host, (logs, codes)), self._finite.position
        self._is_to_be_audited = True
        if self._seen is None:  # an epoch's first: there is none before
            self._seen = self._look_at(*begun)
            return self._seen
        if self._begun is not None:
            self._seen = self._look_at(*self._begun)
        self._begun = begun
        return self._seen

    def _look_at(self, reading: concurrent.futures.Future, position: int | None) -> dict:
        logs, codes = reading.result()
        logs = python_logs(logs)  # as Keras's callbacks get them
        self._loss_scale.on_train_batch_end(0, logs)
        # By NumPy: an operation of TensorFlow's would be the device's, behind the next execution.
        self._finite.look(np.hstack([each.numpy() for each in codes]), position, logs)
        return logs

    def _look_at_last(self) -> None:
        """Looks at an epoch's last execution, and audits after it: before there is a validation."""
        begun, self._begun = self._begun, None
        if begun is not None:
            # In place: Keras takes these logs also for epochs to come that have no data.
            self._seen.update(self._look_at(*begun))
        self._audit_last()

    def _audit_last(self) -> None:
        if self._audit is not None and self._is_to_be_audited:
            self._audit.on_train_batch_end(0)
        self._is_to_be_audited = False

    # What Keras tells.

    def set_params(self, params):
        """Is for all."""
        super().set_params(params)
        for each in self._all:
            each.set_params(params)

    def set_model(self, model):
        """Is for all."""
        super().set_model(model)
        for each in self._all:
            each.set_model(model)

    def on_train_begin(self, logs=None):
        """Begins anew."""
        self._is_to_be_audited = False
        for each in self._all:
            each.on_train_begin(logs)

    def on_epoch_begin(self, epoch, logs=None):
        """Begins an epoch."""
        self._seen = None
        for each in self._all:
            each.on_epoch_begin(epoch, logs)

    def on_train_batch_begin(self, batch, logs=None):
        """Audits after the execution before: that needs no logs."""
        self._audit_last()
        for each in self._all:
            each.on_train_batch_begin(batch, logs)

    def on_epoch_end(self, epoch, logs=None):
        """Is for all."""
        for each in self._all:
            each.on_epoch_end(epoch, logs)

    def on_train_end(self, logs=None):
        """Is for all."""
        for each in self._all:
            each.on_train_end(logs)
