"""Checkpoints in the course of `fit`, and what a resumed `fit` begins with.

Takes the folder and when to save; gives the callback, which `fit` of a compiled model finds among
its callbacks (tfaccel/resume.py) and lets begin where the newest checkpoint ends.

    model.fit(train, epochs=90, callbacks=[run.checkpoints("runs/a/checkpoints", every_steps=500)])

The chief writes, in a thread; every worker saves at the same step, because all count alike.
"""

import contextlib
import hashlib
import json
import logging
import pathlib
from collections.abc import Iterator

import keras
import numpy as np

from tfaccel.agreement import AnyWorker, check_same, of_workers
from tfaccel.callbacks.finite import NonFiniteError
from tfaccel.checkpoint import state as state_lib
from tfaccel.checkpoint.store import CheckpointError, Snapshot, Store, check_space
from tfaccel.checkpoint.writer import Writer
from tfaccel.config import CheckpointConfig
from tfaccel.data.distribute import Loader
from tfaccel.errors import UserError
from tfaccel.signals import StopSignals

log = logging.getLogger("tfaccel")


class Stopped(SystemExit):
    """A signal asked to stop, and the state is saved. A script that does not catch it exits so."""


class Checkpoints(keras.callbacks.Callback):
    """Saves the state of training, and puts it back where `fit` begins.

    Attributes:
      folder: that holds a folder for each checkpoint.
      is_chief: whether this worker writes.
      first: what must come before all other callbacks of the same `fit`.
    """

    def __init__(
        self,
        folder: pathlib.Path,
        config: CheckpointConfig,
        *,
        monitor: str,
        is_chief: bool,
        resume: str = "auto",
        accept_changes: bool = False,
        facts: dict | None = None,
    ):
        """Writes nothing yet.

        Args:
          folder: for the checkpoints; of several workers each sees the chief's.
          config: when they are made and how many are kept.
          monitor: the log by which they are best; losses should fall, all others rise.
          is_chief: whether this worker writes.
          resume: "auto", "required" (there must be a checkpoint) or "never" (there must be none).
          accept_changes: whether a checkpoint of other `facts` may be gone on with.
          facts: what else a resumed run must share with it, JSON-ready, by name.
        """
        super().__init__()
        self.folder = pathlib.Path(folder)
        self._config, self._monitor, self.is_chief = config, monitor, is_chief
        self._resume, self._accept_changes, self._facts = resume, accept_changes, facts or {}
        self._warned = False
        self._store = Store(
            self.folder,
            keep_last=config.keep_last,
            keep_best=config.keep_best,
            largest_is_best=not monitor.removeprefix("val_").endswith("loss"),
        )
        self.first = _First(self)

    # Before `fit`.

    def begin(self, model, loader: Loader, callbacks: list, stop: StopSignals) -> int:
        """Reads the newest checkpoint, if there is one, and returns the epoch to begin with.

        Args:
          model: that `fit` is called on.
          loader: that it trains on; it is set to where the checkpoint ends.
          callbacks: all others of this `fit`, whose state is kept too.
          stop: what hears signals.

        Raises:
          UserError: it is of another experiment, or `resume` and the folder do not agree.
        """
        self._loader, self._callbacks, self._stop = loader, callbacks, stop
        self._strategy = model.distribute_strategy
        self._any_worker = AnyWorker(self._strategy)
        self._writer = Writer(self._store)
        self._history, self._rollbacks, self._logs_so_far = {}, 0, {}
        self._facts_now = self._facts | _data_facts(loader)
        state_lib.warn_of_forgetful(callbacks)
        if self.is_chief:
            self._store.remove_unfinished()
        of_workers(np.zeros(1), self._strategy)  # nobody reads before that is done
        self._snapshot = self._newest()
        if self._snapshot is None:
            return 0
        state = self._snapshot.state
        self._check_facts(state)
        self._say_what_changes(state)
        return self._go_to(state["epoch"], state["step_in_epoch"], state)

    def roll_back(self, error: NonFiniteError, position: int, *, limit: int) -> int:
        """Puts back the newest checkpoint, but goes on with the data from a later position.

        Args:
          error: what is gone back from.
          position: of the first batch to train on.
          limit: of rollbacks in a run.

        Returns:
          The epoch to begin with.

        Raises:
          NonFiniteError: there is no checkpoint, or there were too many rollbacks.
        """
        self._all_written()
        self._snapshot = self._store.newest()
        if self._snapshot is None or self._rollbacks >= limit:
            why = f"it has {limit} times" if self._snapshot else "there is no checkpoint yet"
            raise NonFiniteError(f"{error}; nonfinite='rollback' cannot go back: {why}") from error
        self._rollbacks += 1
        state = self._snapshot.state
        self._history = state["history"]
        log.warning(
            "checkpoint: back to step %d, and on with the data from step %d of them",
            state["step"],
            position,
        )
        epoch, step = divmod(position, self._loader.num_batches)
        return self._go_to(epoch, step, state)

    def _all_written(self) -> None:
        """Returns once the chief's checkpoint is on the disk, for all workers."""
        self.finish()
        of_workers(np.zeros(1), self._strategy)

    def _newest(self) -> Snapshot | None:
        snapshot = self._store.newest()
        found = {"step of checkpoint": None, "content of checkpoint": None}
        if snapshot:
            found = {
                "step of checkpoint": snapshot.state["step"],
                "content of checkpoint": _digest(snapshot),
            }
        check_same(
            {**found, "config": json.dumps(self._facts_now, sort_keys=True)},
            self._strategy,
            of=f"their run, in {self.folder}",
        )
        if snapshot is None and self._resume == "required":
            raise UserError(
                f"{self.folder} has no checkpoint to resume from; check the path, or leave out "
                "resume='required' to begin anew"
            )
        if snapshot and self._resume == "never":
            raise UserError(
                f"{self.folder} has a checkpoint of step {snapshot.state['step']}; give another "
                "folder, or resume='auto' to go on from it"
            )
        return snapshot

    def _check_facts(self, state: dict) -> None:
        before, now = state["facts"], json.loads(json.dumps(self._facts_now))
        changed = [
            f"{name} {before.get(name)!r} -> {now.get(name)!r}"
            for name in sorted({*before, *now})
            if before.get(name) != now.get(name)
        ]
        if not changed:
            return
        if not self._accept_changes:
            raise UserError(
                f"the checkpoint of step {state['step']} in {self.folder} is of another run: "
                f"{'; '.join(changed)}; change that back, give another folder, or go on all the "
                "same by accept_changes"
            )
        log.warning("checkpoint: resumed with changes: %s", "; ".join(changed))

    def _say_what_changes(self, state: dict) -> None:
        now = self._strategy.num_replicas_in_sync
        log.info(
            "checkpoint: resumed from step %d: epoch %d, step %d of %d",
            state["step"],
            state["epoch"] + 1,
            state["step_in_epoch"],
            state["num_steps"],
        )
        if state["num_replicas"] != now:
            log.warning(
                "checkpoint: made on %d replicas, resumed on %d: images, order and augmentation "
                "stay; dropout draws otherwise, batch norm normalizes other parts of a batch, and "
                "sums round otherwise",
                state["num_replicas"],
                now,
            )

    def _go_to(self, epoch: int, step: int, state: dict) -> int:
        if state["num_steps"] != self._loader.num_batches and step:
            log.warning(
                "checkpoint: an epoch has %d steps now, and had %d: epoch %d begins anew",
                self._loader.num_batches,
                state["num_steps"],
                epoch + 1,
            )
            step = 0
        if state["stop_training"]:
            return _NEVER
        self._loader.start_at(epoch=epoch, step=step)
        return epoch

    def finish(self) -> None:
        """Waits until what was begun is on the disk. After an error, too: it may be the newest."""
        with self._allowed_to_fail():
            self._writer.wait()

    # In `fit`.

    def on_train_begin(self, logs=None):
        """Gives the other callbacks their states, after they began."""
        self._last_saved = self._loader.position
        if self._snapshot:
            state = self._snapshot.state
            self._history, self._rollbacks = (
                state["history"],
                max(self._rollbacks, state["rollbacks"]),
            )
            self._put_callbacks()
        if self.is_chief:
            arrays = state_lib.variables(self.model)
            check_space(
                self.folder,
                sum(each.nbytes for each in arrays.values()),
                keep=self._config.keep_last + self._config.keep_best,
            )

    def on_epoch_begin(self, epoch, logs=None):
        """Gives them to the callbacks that begin anew with an epoch, and to Keras's History."""
        self._asked, self._logs_so_far, self._counted = False, {}, {}
        if self._snapshot:
            state = self._snapshot.state
            if state["step_in_epoch"]:
                self._put_callbacks()
                self._logs_so_far, self._counted = state["logs"], self._snapshot.arrays
            self._put_history()
            self._snapshot = None

    def on_train_batch_end(self, batch, logs=None):
        """Saves when it is time, or when a signal asked to stop.

        Raises:
          Stopped: once saved.
        """
        self._logs_so_far = dict(logs or {})
        position = self._loader.position
        ends_epoch = position % self._loader.num_batches == 0
        if ends_epoch:
            self._counted = state_lib.metrics(self.model)
        asked = self._any_worker.says(bool(self._stop.requested))
        if asked and not ends_epoch:
            self._save(position)
            self._stop_now(position)
        every = self._config.every_steps
        if every and position - self._last_saved >= every and not ends_epoch:
            self._save(position)
        self._asked = asked

    def on_test_batch_end(self, batch, logs=None):
        """Saves what is trained, but not tested, when a signal asked to stop.

        Raises:
          Stopped: once saved.
        """
        self._asked = self._any_worker.says(bool(self._stop.requested)) or self._asked
        if self._asked:
            for each in self._callbacks:
                each.on_test_end()  # as the averaged weights, which give the trained ones back
            self._save(self._loader.position, tested=False)
            self._stop_now(self._loader.position)

    def on_epoch_end(self, epoch, logs=None):
        """Saves with the epoch's score.

        Raises:
          Stopped: a signal asked to stop.
        """
        for name, value in (logs or {}).items():
            self._history.setdefault(name, []).append(float(value))
        asked = self._any_worker.says(bool(self._stop.requested)) or self._asked
        last = epoch + 1 == self.params["epochs"] or self.model.stop_training
        if asked or last or (epoch + 1) % self._config.every_epochs == 0:
            self._save(self._loader.position, score=self._score(logs or {}))
        if asked and not last:
            self._stop_now(self._loader.position)

    def on_train_end(self, logs=None):
        """Waits until all is on the disk."""
        if self._snapshot:  # not an epoch was left to train
            self._put_history()
        self.finish()
        if self.is_chief:
            log.info("checkpoint: training waited %.2f s for all of them", self._writer.waited_s)

    # What is saved.

    def _save(self, position: int, *, score: float | None = None, tested: bool = True) -> None:
        self._last_saved = position
        num_steps = self._loader.num_batches
        epoch, step = divmod(position, num_steps)
        arrays = {}
        if not tested:
            epoch, step = epoch - 1, num_steps
            arrays = {name: each for name, each in self._counted.items() if "metric/" in name}
        elif step:
            arrays = state_lib.metrics(self.model)
        if not self.is_chief:
            return
        callbacks, callback_arrays = state_lib.of_callbacks(self._callbacks)
        state = {
            "step": position,
            "epoch": epoch,
            "step_in_epoch": step,
            "num_steps": num_steps,
            "num_replicas": self._strategy.num_replicas_in_sync,
            "stop_training": bool(self.model.stop_training),
            "rollbacks": self._rollbacks,
            "history": self._history,
            "logs": {name: float(each) for name, each in self._logs_so_far.items()},
            "callbacks": callbacks,
            "facts": self._facts_now,
        }
        arrays = arrays | callback_arrays | state_lib.variables(self.model)
        snapshot = Snapshot(arrays, json.loads(json.dumps(state)))
        with self._allowed_to_fail():
            self._writer.write(snapshot, score=score, tested=tested)

    @contextlib.contextmanager
    def _allowed_to_fail(self) -> Iterator[None]:
        """Within the context, an error of the writer is a warning, if the config says so."""
        try:
            yield
        except CheckpointError as error:
            if self._config.on_error == "stop":
                raise
            log.warning("checkpoint: %s; training goes on", error)

    def _score(self, logs: dict) -> float | None:
        if self._monitor in logs:
            return float(logs[self._monitor])
        if self._config.keep_best and not self._warned:
            self._warned = True
            log.warning(
                "checkpoint: monitor=%r is none of the logs (%s): no checkpoint is best",
                self._monitor,
                ", ".join(logs),
            )
        return None

    def _stop_now(self, position: int) -> None:
        self._writer.wait()
        log.warning(
            "checkpoint: stopped by %s after step %d, which is saved; the same command goes on",
            self._stop.requested or "another worker's signal",
            position,
        )
        raise Stopped(self._config.exit_code)

    def _put_callbacks(self) -> None:
        snapshot = self._snapshot
        state_lib.put_callbacks(self._callbacks, snapshot.state["callbacks"], snapshot.arrays)

    def _put_history(self) -> None:
        history = self.model.history
        history.history = {name: list(values) for name, values in self._history.items()}
        history.epoch = list(range(max(map(len, self._history.values()), default=0)))


class _First(keras.callbacks.Callback):
    """What must come before the other callbacks: the model as it was, and the epoch's logs."""

    def __init__(self, checkpoints: Checkpoints):
        super().__init__()
        self._checkpoints = checkpoints
        self._logs = None

    def on_train_begin(self, logs=None):
        snapshot = self._checkpoints._snapshot
        if snapshot:
            state_lib.put_variables(self.model, snapshot.arrays)

    def on_epoch_begin(self, epoch, logs=None):
        snapshot, self._logs = self._checkpoints._snapshot, None
        state = snapshot.state if snapshot else {}
        if state.get("step_in_epoch") and state["epoch"] == epoch:
            is_chief = self._checkpoints.is_chief
            state_lib.put_metrics(self.model, snapshot.arrays, is_chief=is_chief)
            self._logs = state["logs"]

    def on_train_batch_end(self, batch, logs=None):
        self._logs = None

    def on_epoch_end(self, epoch, logs=None):
        if self._logs and logs is not None:  # all steps were trained before the checkpoint
            logs.update({name: each for name, each in self._logs.items() if name not in logs})


_NEVER = 2**31  # an epoch that no run has


def _data_facts(loader: Loader) -> dict:
    """Returns what the data are, but for how they are cut for replicas, JSON-ready."""
    facts = loader.data.facts()
    plan = {name: each for name, each in vars(facts.pop("plan")).items() if name != "num_replicas"}
    return {name: repr(each) for name, each in {**facts, **plan}.items()}


def _digest(snapshot: Snapshot) -> str:
    """Returns what tells this checkpoint from another of the same step."""
    digest = hashlib.blake2b(json.dumps(snapshot.state, sort_keys=True).encode(), digest_size=8)
    for name, array in sorted(snapshot.arrays.items()):
        digest.update(name.encode() + np.ascontiguousarray(array).tobytes())
    return digest.hexdigest()
