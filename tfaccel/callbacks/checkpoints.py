"""Checkpoints in the course of `fit`, and what a resumed `fit` begins with.

Takes the folder and when to save; gives the callback, which `fit` of a compiled model finds among
its callbacks (tfaccel/resume.py) and lets begin where the newest checkpoint ends.

    checkpoints = run.checkpoints("runs/a/checkpoints", CheckpointConfig(every_steps=500))
    model.fit(train, epochs=90, callbacks=[checkpoints])

The chief writes, in a thread; every worker saves at the same step, because all count alike.
"""

import contextlib
import dataclasses
import hashlib
import json
import logging
import pathlib
import time
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
      when_begun: called on the chief once it is settled where training begins; None for nothing.
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
        self.when_begun = None
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
        self._facts_now = self._facts | _data_facts(loader) | _optimizer_facts(model)
        self._same_here = {**dataclasses.asdict(self._config), "monitor": self._monitor}
        self._same_here["steps_per_execution"] = model.steps_per_execution
        self._offset, self._goes_on_in, self._has_changed, self._saving_s = 0, None, False, 0.0
        state_lib.warn_of_forgetful(callbacks)
        if self.is_chief:
            self._store.remove_unfinished()
        of_workers(np.zeros(1), self._strategy)  # nobody reads before that is done
        self._snapshot = self._newest()
        epoch = 0
        if self._snapshot is None:
            loader.start_at(epoch=0)  # it may have given batches before
        else:
            state = self._snapshot.state
            self._check_facts(state)
            self._say_what_changes(state)
            epoch = self._go_to(state["epoch"], state["step_in_epoch"], state)
        if self.is_chief and self.when_begun:
            self.when_begun()
        return epoch

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
        self.finish()
        of_workers(np.zeros(1), self._strategy)  # nobody reads before the chief has written
        self._snapshot = self._newest()
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
        # After an epoch's last step there is its validation still to come.
        epoch, step = divmod(position - 1, self._loader.num_batches)
        return self._go_to(epoch, step + 1, state)

    def _newest(self) -> Snapshot | None:
        snapshot = self._store.newest()
        found = {"step of checkpoint": None, "content of checkpoint": None}
        if snapshot:
            found = {
                "step of checkpoint": snapshot.state["step"],
                "content of checkpoint": _digest(snapshot),
            }
        check_same(
            {
                **found,
                "config": json.dumps(self._facts_now, sort_keys=True),
                "checkpoint settings": json.dumps(self._same_here, sort_keys=True),
            },
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
        self._has_changed = True
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
                "stay; dropout and mixup draw otherwise, batch norm normalizes other parts of a "
                "batch, and sums round otherwise",
                state["num_replicas"],
                now,
            )
        before, loader = state.get("loader"), _loader_name(self._loader)
        if before != loader:
            log.warning(
                "checkpoint: made with the loader %s, resumed with %s, whose pixels may differ a "
                "little; for the same set data.loader",
                before,
                loader,
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
        self._loader.start_at(epoch=epoch, step=step)
        self._goes_on_in = epoch if step and state["epoch"] == epoch else None
        # Names rise, also where epochs have fewer steps than they had.
        self._offset = max(state.get("offset", 0), state["step"] - self._loader.position)
        if state["stop_training"]:
            log.info("checkpoint: training ended early, after epoch %d, and is over", epoch)
            return _NEVER
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
            keep = self._config.keep_last + self._config.keep_best
            check_space(self.folder, state_lib.num_bytes(self.model), keep=keep)

    def on_epoch_begin(self, epoch, logs=None):
        """Gives them to the callbacks that begin anew with an epoch, and to Keras's History."""
        self._asked, self._logs_so_far, self._counted = False, {}, {}
        if self._snapshot:
            state = self._snapshot.state
            if self._goes_on_in == epoch:
                self._put_callbacks()
                self._logs_so_far = state["logs"]
                self._counted = state_lib.metrics_in(self._snapshot.arrays)
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
        if self._is_due(position) and not ends_epoch:
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
        position = self._loader.position
        if asked or last or self._is_due(position) or (epoch + 1) % self._config.every_epochs == 0:
            self._save(position, score=self._score(logs or {}))
        if asked:
            self._stop_now(position)

    def on_train_end(self, logs=None):
        """Waits until all is on the disk."""
        if self._snapshot:  # not an epoch was left to train
            self._put_history()
        self.finish()
        if self.is_chief:
            log.info("checkpoint: training waited %.2f s for all of them", self._saving_s)

    # What is saved.

    def _is_due(self, position: int) -> bool:
        every = self._config.every_steps
        return every is not None and position - self._last_saved >= every

    def _save(self, position: int, *, score: float | None = None, tested: bool = True) -> None:
        begun = time.monotonic()
        self._save_now(position, score=score, tested=tested)
        self._saving_s += time.monotonic() - begun

    def _save_now(self, position: int, *, score: float | None, tested: bool) -> None:
        self._last_saved = position
        num_steps = self._loader.num_batches
        epoch, step = divmod(position, num_steps)
        arrays = {}
        if not tested:
            epoch, step, arrays = epoch - 1, num_steps, self._counted
        elif step:
            arrays = state_lib.metrics(self.model)
        if not self.is_chief:
            return
        callbacks, callback_arrays = state_lib.of_callbacks(self._callbacks)
        state = {
            "step": position + self._offset,
            "offset": self._offset,
            "loader": _loader_name(self._loader),
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

    def stop_if_asked(self) -> None:
        """Ends the process after `fit`, where a signal came when all steps were done.

        Raises:
          Stopped: it did.
        """
        if of_workers(np.array([bool(self._stop.requested)]), self._strategy).any():
            self._stop_now(self._loader.position)

    def _stop_now(self, position: int) -> None:
        """Ends all workers once the chief has written; else a launcher may kill it before."""
        error = None
        try:
            self._writer.wait()
        except CheckpointError as failed:
            error = failed
        if of_workers(np.array([error is not None]), self._strategy).any():
            raise error or CheckpointError(
                "the chief could not save before it stopped; see its log"
            )
        log.warning(
            "checkpoint: stopped by %s after step %d, which is saved; the same command goes on",
            self._stop.requested or "another worker's signal",
            position + self._offset,
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
            # Of what was changed, the rate would be put back with the optimizer.
            keep = "learning_rate" if self._checkpoints._has_changed else None
            state_lib.put_variables(self.model, snapshot.arrays, keep=keep)

    def on_epoch_begin(self, epoch, logs=None):
        snapshot, self._logs = self._checkpoints._snapshot, None
        if snapshot and self._checkpoints._goes_on_in == epoch:
            is_chief = self._checkpoints.is_chief
            state_lib.put_metrics(self.model, snapshot.arrays, is_chief=is_chief)
            self._logs = snapshot.state["logs"]

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


def _optimizer_facts(model) -> dict:
    """Returns the optimizer as it was compiled, JSON-ready, but for the names of its parts."""

    def bare(config):
        if isinstance(config, dict):
            return {key: bare(each) for key, each in config.items() if key != "name"}
        return config if isinstance(config, int | float | str | None) else repr(config)

    optimizer = model.optimizer
    return {"optimizer": [type(optimizer).__name__, bare(optimizer.get_config())]}


def _loader_name(loader: Loader) -> str | None:
    """Returns which loader reads images; None for data of another kind."""
    return getattr(loader.data, "loader", None)


def _digest(snapshot: Snapshot) -> str:
    """Returns what tells this checkpoint from another of the same step."""
    digest = hashlib.blake2b(json.dumps(snapshot.state, sort_keys=True).encode(), digest_size=8)
    for name, array in sorted(snapshot.arrays.items()):
        digest.update(name.encode() + np.ascontiguousarray(array).tobytes())
    return digest.hexdigest()
