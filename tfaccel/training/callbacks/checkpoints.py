"""Saves checkpoints during `fit`, and stops all workers after the same step.

Takes the folder and the interval; gives a callback. `fit` of a compiled model finds it among its
callbacks (tfaccel/training/resume.py), and begins where the newest checkpoint ends.

    checkpoints = run.checkpoints("runs/a/checkpoints", CheckpointConfig(every_steps=500))
    model.fit(train, epochs=90, callbacks=[checkpoints])

The chief writes, in a thread. All workers save at the same step, because all count the same steps.
"""

import dataclasses
import json
import logging
import pathlib
import time

import keras

from tfaccel.common.errors import UserError, did_you_mean
from tfaccel.common.run_log import summary
from tfaccel.common.tables import counted
from tfaccel.config import CheckpointConfig, StepConfig
from tfaccel.data.distribute import Loader
from tfaccel.process import progress
from tfaccel.process.signals import StopSignals
from tfaccel.runtime import agreement
from tfaccel.runtime.agreement import AnyWorker, together
from tfaccel.training.callbacks.finite import RollBackError
from tfaccel.training.callbacks.restore import Beginning, Origin
from tfaccel.training.checkpoint import state as state_lib
from tfaccel.training.checkpoint.rotation import largest_is_best
from tfaccel.training.checkpoint.store import CheckpointError, Snapshot, Store, check_space
from tfaccel.training.checkpoint.writer import Writer

log = logging.getLogger("tfaccel")


class Stopped(SystemExit):
    """A signal asked to stop, and the state is saved. A script that does not catch it exits."""


class Checkpoints(keras.callbacks.Callback):
    """Saves the state of training. It follows all callbacks that have a state to save.

    In `fit` it raises Stopped if a signal asked to stop, after it has saved. If the chief cannot
    write, and `on_error` is "stop" or a signal asked to stop, the chief raises CheckpointError, and
    the other workers raise RunError at the same step.

    Attributes:
      store: the checkpoints.
      is_chief: whether this worker writes.
      when_begun: called on the chief once it is known where training begins; None to call nothing.
    """

    def __init__(
        self,
        folder: pathlib.Path,
        config: CheckpointConfig,
        *,
        monitor: str,
        is_chief: bool,
        resume: str,
        accept_changes: bool,
        facts: dict,
    ):
        """Writes nothing yet. For the arguments, see `Run.checkpoints`."""
        super().__init__()
        self.is_chief, self.when_begun = is_chief, None
        self._doing = "begin"
        self._config, self._monitor, self._warned = config, monitor, False
        self.store = Store(
            folder,
            keep_last=config.keep_last,
            keep_best=config.keep_best,
            largest_is_best=largest_is_best(monitor),
        )
        self._origin = Origin(self.store, resume, accept_changes, facts, is_chief=is_chief)

    def begin_anew_at(self, epoch: int) -> None:
        """Lets a checkpoint before that epoch restore all but the optimizer, which begins anew.

        For a model that trains other weights from the epoch on.
        """
        self._origin.anew_at = epoch

    @property
    def has_stopped(self) -> bool:
        """Whether a `fit` with this callback ended early, in this process or before it."""
        return bool(self.model.stop_training or self._begun.state.get("stop_training"))

    def __repr__(self):
        """Names the folder, the interval, and the number of checkpoints that are kept."""
        config, steps = self._config, ""
        if config.every_steps is not None:
            steps = f"{counted(config.every_steps, 'step')} and every "
        return (
            f"<tfaccel checkpoints in {self.store.folder}: every {steps}"
            f"{counted(config.every_epochs, 'epoch')}; keeps the last {config.keep_last} and the "
            f"best {config.keep_best} by {self._monitor}>"
        )

    def begin(
        self, model, loader: Loader, others: list, stop: StopSignals, config: StepConfig
    ) -> Beginning:
        """Returns where the `fit` with these arguments begins, and sets the loader to that place.

        Raises:
          UserError: training cannot resume from the newest checkpoint.
        """
        self._loader, self._others, self._stop = loader, others, stop
        self._strategy = model.distribute_strategy
        self._any_worker, self._asked = AnyWorker(self._strategy), False
        self._writer, self._saving_s = Writer(self.store, on_error=self._config.on_error), 0.0
        state_lib.warn_of_forgetful(others)
        settings = {"monitor": self._monitor, "steps_per_execution": model.steps_per_execution}
        settings |= dataclasses.asdict(self._config)
        self._begin_at(self._origin.newest(model, loader, config, settings))
        with together(self._strategy, "could not begin"):
            if self.is_chief and self.when_begun:
                self.when_begun()
        return self._begun

    def roll_back(self, error: RollBackError) -> Beginning:
        """Returns where training continues after an infinite or NaN step: see `Origin.before`."""
        self._wait_together()  # no worker may read before the chief has written
        self._begin_at(self._origin.before(error, self._begun))
        return self._begun

    def _begin_at(self, beginning: Beginning) -> None:
        self._begun, self._last_saved = beginning, self._loader.position
        # The logs and metrics of an epoch with no step left to train.
        self._logs, self._counted = beginning.state["logs"], state_lib.metrics_in(beginning.arrays)

    def end(self) -> None:
        """Waits until all is on the disk. Stops all workers if a signal followed the last step."""
        self._doing = "end"
        self._wait_together()
        if self.is_chief:
            log.info("checkpoint: training waited %.2f s for all checkpoints", self._saving_s)
        (asked,) = AnyWorker(self._strategy).says(bool(self._stop.requested))
        if asked:
            self._stop_now()

    def effect_of_stop(self) -> str:
        """Describes what happens if a signal asks to stop now. Any thread may call it."""
        if self._doing == "validate":
            return (
                "the validation stops at its next batch, and training saves its state; the same "
                "command repeats the validation and continues"
            )
        if self._doing == "end":
            return "the saved checkpoints stay, and this process stops"
        if self._doing == "begin":
            return (
                "training prepares and compiles its first step; it saves its state after that "
                "step and stops"
            )
        if not self._any_worker.is_alone:
            return (
                "all workers save the state and stop after the same step, within about "
                f"{agreement.ASK_EVERY_S:g} s, or after one step if a step takes longer"
            )
        most = self.model.steps_per_execution
        steps = "this step" if most == 1 else f"this execution of up to {most} steps"
        return f"training saves its state after {steps} and stops"

    def finish(self) -> None:
        """Waits for the checkpoint that is being written, even after an error in `fit`."""
        try:
            self._writer.wait()
        except CheckpointError as error:
            log.warning("checkpoint: %s", error)  # not raised: it would hide the error of `fit`

    def on_train_begin(self, logs=None):
        """Checks whether there is room for the checkpoints, and logs the size of one."""
        self._doing = "begin"
        keep = self._config.keep_last + self._config.keep_best
        with together(self._strategy, "has no room for checkpoints"):
            if self.is_chief:
                size = state_lib.num_bytes(self.model)
                check_space(self.store.folder, size, keep=keep)
                summary(
                    "checkpoint: %.1f MiB each, including %.1f MiB of weights; up to %d are kept",
                    *(size / 2**20, state_lib.bytes_of(self.model.weights) / 2**20, keep),
                )

    def on_train_batch_end(self, batch, logs=None):
        """Saves if it is due. After an epoch's last step it waits for the validation."""
        self._doing = "train"
        ends_epoch = self._loader.position % self._loader.num_batches == 0
        # An epoch's end always asks, so that no worker begins a validation after a signal.
        self._logs, asked = dict(logs or {}), self._is_asked(now=ends_epoch)
        if ends_epoch:
            self._counted = state_lib.metrics(self.model)
            return
        if asked or self._is_due():
            self._save()
        if asked:
            self._stop_now()

    def on_test_begin(self, logs=None):
        """Saves and stops if a signal asked to stop during the epoch's last steps."""
        self._doing = "validate"
        self._stop_untested()

    def on_test_batch_end(self, batch, logs=None):
        """Saves the trained, untested epoch and stops if a signal asked to stop."""
        self._stop_untested()

    def on_test_end(self, logs=None):
        """Ends the validation."""
        self._doing = "train"

    def _stop_untested(self) -> None:
        if self._is_asked():
            for each in self._others:
                each.on_test_end()  # EMA, for example, puts the trained weights back
            self._save(tested=False)
            self._stop_now(tested=False)

    def on_epoch_end(self, epoch, logs=None):
        """Saves, with the epoch's score, if it is due."""
        for name, value in (logs or {}).items():
            self._begun.state["history"].setdefault(name, []).append(float(value))
        asked, score = self._is_asked(now=True), self._score(logs or {})
        last = epoch + 1 == self.params["epochs"] or self.model.stop_training
        if asked or last or self._is_due() or (epoch + 1) % self._config.every_epochs == 0:
            self._save(score=score)
        if asked:
            self._stop_now()

    def _is_due(self) -> bool:
        every = self._config.every_steps
        return every is not None and self._loader.position - self._last_saved >= every

    def _is_asked(self, *, now: bool = False) -> bool:
        """Returns whether a signal asked any worker to stop.

        Workers ask each other at intervals, so the answer may be some steps late, unless `now`.
        """
        own = bool(self._stop.requested), self._writer.has_failed
        asked, failed = self._any_worker.says(*own, now=now)
        if failed:
            self._wait_together()
        self._asked |= asked
        return self._asked

    def _wait_together(self) -> None:
        """Waits, on all workers, until the chief has written.

        If the other workers ended first, a launcher could kill the chief while it writes.
        """
        with progress.within("save"), together(self._strategy, "could not save a checkpoint"):
            self._writer.wait()

    def _stop_now(self, *, tested: bool = True) -> None:
        self._wait_together()
        with together(self._strategy, "could not save before it stopped"):
            self._writer.check_last()
        log.log(
            logging.WARNING if self.is_chief else logging.INFO,
            "checkpoint: stopped by %s after step %d, which is saved; %s",
            self._stop.requested or "another worker's signal",
            self._loader.position + self._begun.state["offset"],
            self._how_it_continues(tested=tested),
        )
        progress.beat("end")
        raise self.stopped()

    def stopped(self) -> Stopped:
        """Returns the error that ends a `fit` which a signal asked to stop."""
        return Stopped(self._config.exit_code)

    def _how_it_continues(self, *, tested: bool) -> str:
        epochs, steps = divmod(self._loader.position, self._loader.num_batches)
        if not tested:
            return (
                f"epoch {epochs} is trained but not yet tested: the same command tests it, writes "
                "its line and continues"
            )
        if steps:
            num_steps = self._loader.num_batches
            return (
                f"the same command continues after step {steps} of {num_steps} of epoch "
                f"{epochs + 1}"
            )
        if epochs >= self.params["epochs"] or self.model.stop_training:
            return "training is complete, and the same command continues with what follows it"
        return f"the same command continues with epoch {epochs + 1}"

    def _save(self, *, score: float | None = None, tested: bool = True) -> None:
        begun, self._last_saved = time.monotonic(), self._loader.position
        epoch, step = divmod(self._last_saved, self._loader.num_batches)
        metrics = state_lib.metrics(self.model) if step else {}
        if not tested:
            epoch, step, metrics = epoch - 1, self._loader.num_batches, self._counted
        with progress.within("save"):
            # When a worker is lost, NCCL breaks off its sums, and their partial results are taken
            # for sums. So nothing is saved unless all workers answer each other after the copy.
            with together(self._strategy, "could not copy its state"):
                sharded = state_lib.sharded_states(self.model, kept=self.is_chief)
                snapshot = self._snapshot(epoch, step, metrics, sharded) if self.is_chief else None
            if self.is_chief:  # it waits until the previous checkpoint is written
                self._writer.write(snapshot, score=score, tested=tested)
        self._saving_s += time.monotonic() - begun

    def _snapshot(
        self, epoch: int, step: int, metrics: state_lib.Arrays, sharded: state_lib.Arrays
    ) -> Snapshot:
        callbacks, arrays = state_lib.of_callbacks(self._others)
        begun = self._begun.state
        state = {
            **{name: begun[name] for name in ("offset", "rollbacks", "history")},
            **self._origin.run,
            "step": self._last_saved + begun["offset"],
            "epoch": epoch,
            "step_in_epoch": step,
            "stop_training": bool(self.model.stop_training),
            "logs": {name: float(each) for name, each in self._logs.items()},
            "callbacks": callbacks,
        }
        arrays = metrics | arrays | state_lib.variables(self.model, sharded)
        return Snapshot(arrays, json.loads(json.dumps(state)))

    def _score(self, logs: dict) -> float | None:
        """Returns the value of the monitor; None if the logs have none.

        Raises:
          UserError: the logs of a validation do not have the monitor of early stopping, so training
            would never stop early.
        """
        if self._monitor in logs:
            return float(logs[self._monitor])
        is_tested = any(name.startswith("val_") for name in logs)
        if is_tested and any(
            isinstance(each, keras.callbacks.EarlyStopping) and each.monitor == self._monitor
            for each in self._others
        ):
            raise UserError(
                f"early stopping monitors {self._monitor!r}, which is not in the logs"
                f"{did_you_mean(self._monitor, logs)}"
            )
        if self._config.keep_best and not self._warned:
            self._warned = True
            log.warning(
                "checkpoint: monitor=%r is not in the logs (%s), so no checkpoint counts as best",
                *(self._monitor, ", ".join(logs)),
            )
        return None
